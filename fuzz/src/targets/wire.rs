//! Frames of the guest protocol, in both directions.

use crate::outcome;
use futures::FutureExt as _;
use k8e_wire::proto::{Input, Reply, Request};
use k8e_wire::{FrameReader, GUEST_FRAME_BYTES_MAX, HOST_FRAME_BYTES_MAX};
use prost::Message;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, ReadBuf};

/// A reader that returns a limited number of bytes per read.
struct Pieces<'a> {
    bytes: &'a [u8],
    each: usize,
}

/// Decoding does not depend on read sizes, and each frame round-trips.
pub(super) fn frames(bytes: &[u8]) -> u64 {
    let (replies, end) = read::<Reply>(bytes, usize::MAX, GUEST_FRAME_BYTES_MAX);
    let (in_pieces, same_end) = read::<Reply>(bytes, 1 + bytes.len() % 7, GUEST_FRAME_BYTES_MAX);
    assert_eq!(in_pieces, replies);
    assert_eq!(same_end, end);
    let frames_max = bytes.len() / 4;
    assert!(replies.len() <= frames_max, "each has a prefix");
    for reply in &replies {
        let again = Reply::decode(reply.encode_to_vec().as_slice());
        assert_eq!(again.as_ref(), Ok(reply));
    }
    let (requests, asked) = read::<Request>(bytes, usize::MAX, HOST_FRAME_BYTES_MAX);
    let (inputs, _) = read::<Input>(bytes, usize::MAX, HOST_FRAME_BYTES_MAX);
    let kinds = (replies.first(), requests.first(), inputs.len().min(2));
    outcome(&format!("{end}{asked}{kinds:?}"))
}

fn read<M: Message + Default>(bytes: &[u8], each: usize, max: usize) -> (Vec<M>, String) {
    let mut reader = FrameReader::new(Pieces { bytes, each }, max);
    let mut messages = Vec::new();
    loop {
        let next = reader.next().now_or_never();
        match next.expect("a peer that has sent all is not waited for") {
            Ok(Some(message)) => messages.push(message),
            Ok(None) => return (messages, "closed".to_owned()),
            Err(error) => return (messages, error.to_string()),
        }
    }
}

// === impl Pieces ===

impl AsyncRead for Pieces<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let count = self.each.min(buffer.remaining()).min(self.bytes.len());
        let (now, later) = self.bytes.split_at(count);
        buffer.put_slice(now);
        self.bytes = later;
        Poll::Ready(Ok(()))
    }
}
