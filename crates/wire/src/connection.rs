//! The two ends of a call, typed so that each can send only its own messages.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "three replies carry stream data; all others, also future ones, do not"
)]

use crate::frame::{self, FrameReader, FrameWriter, WireError};
use crate::proto::{Input, Reply, Request, input, reply, request};
use crate::{GUEST_FRAME_BYTES_MAX, HOST_FRAME_BYTES_MAX, RateLimit};
use bytes::{Buf as _, Bytes, BytesMut};
use std::io::{ErrorKind, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, sleep_until};

/// The host's end of one call.
#[derive(Debug)]
pub struct HostEnd {
    /// Replies of the guest.
    pub replies: Replies,
    /// Inputs that the host sends after its request.
    pub inputs: Inputs,
}

/// Replies of the guest, in order.
#[derive(Debug)]
pub struct Replies {
    frames: FrameReader<OwnedReadHalf>,
    /// Shared by all calls to that guest. Without it nothing waits and nothing is coalesced.
    rate_limit: Option<Arc<RateLimit>>,
    /// Until when the rate limit delays the next reply.
    paid_at: Option<Instant>,
    /// A reply that was decoded ahead and could not be coalesced with the one before it.
    ahead: Option<Result<reply::Reply, WireError>>,
}

/// Smaller chunks of one stream that have arrived are coalesced, up to about this many bytes.
const COALESCED_BYTES_MAX: usize = 16 * 1024;

/// Inputs to the guest. Dropping it closes that direction.
#[derive(Debug)]
pub struct Inputs(FrameWriter<OwnedWriteHalf>);

/// The guest's end of one call.
#[derive(Debug)]
pub struct GuestEnd {
    /// The request and inputs of the host.
    pub requests: Requests,
    /// Replies to the host.
    pub replies: ReplySink,
}

/// The request and the inputs of the host, in order.
#[derive(Debug)]
pub struct Requests(FrameReader<OwnedReadHalf>);

/// Sends replies to the host.
#[derive(Debug)]
pub struct ReplySink(FrameWriter<OwnedWriteHalf>);

// === impl HostEnd ===

impl HostEnd {
    /// Starts a call on a new connection. The first write is done at once, without waiting for the
    /// reactor to report the socket writable.
    pub async fn call(mut stream: StdStream, call: request::Call) -> Result<Self, WireError> {
        let mut request = BytesMut::new();
        frame::put(&mut request, &Request { call: Some(call) })?;
        stream.set_nonblocking(true).map_err(WireError::Io)?;
        match stream.write(&request) {
            Ok(sent) => request.advance(sent),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(WireError::Io(error)),
        }
        let stream = UnixStream::from_std(stream).map_err(WireError::Io)?;
        let (read, write) = stream.into_split();
        let mut writer = FrameWriter::with_held(write, request);
        writer.flush().await?;
        Ok(Self {
            replies: Replies {
                frames: FrameReader::new(read, GUEST_FRAME_BYTES_MAX),
                rate_limit: None,
                paid_at: None,
                ahead: None,
            },
            inputs: Inputs(writer),
        })
    }

    /// Applies a rate limit to the replies.
    #[must_use]
    pub fn rate_limited(mut self, rate_limit: &Arc<RateLimit>) -> Self {
        self.replies.rate_limit = Some(Arc::clone(rate_limit));
        self
    }
}

// === impl Replies ===

impl Replies {
    /// The next reply. EOF is an error, because the last reply of a call is marked as such.
    /// Cancel safe.
    pub async fn next(&mut self) -> Result<reply::Reply, WireError> {
        if let Some(at) = self.paid_at {
            sleep_until(at).await;
            self.paid_at = None;
        }
        let reply = match self.ahead.take() {
            Some(reply) => reply?,
            None => filled(self.frames.next().await?.ok_or(WireError::Eof)?)?,
        };
        let Some(rate_limit) = self.rate_limit.clone() else {
            return Ok(reply);
        };
        let (reply, frames) = self.coalesce(reply);
        self.paid_at = rate_limit.take(frames, stream_data(&reply).map_or(0, Bytes::len));
        Ok(reply)
    }

    /// Coalesces small chunks of the same stream that are already buffered; returns the number of frames
    /// too. Empty chunks are not coalesced: the reader counts them.
    fn coalesce(&mut self, reply: reply::Reply) -> (reply::Reply, u64) {
        let mut frames = 1;
        let mut coalesced = match stream_data(&reply) {
            Some(first) if (1..COALESCED_BYTES_MAX).contains(&first.len()) => BytesMut::new(),
            _ => return (reply, frames),
        };
        while coalesced.len() < COALESCED_BYTES_MAX {
            let next = match self.frames.take::<Reply>() {
                Ok(None) => break,
                Ok(Some(next)) => filled(next),
                Err(error) => Err(error),
            };
            match next {
                Ok(next) if continues(&reply, &next) => {
                    if coalesced.is_empty() {
                        coalesced.extend(stream_data(&reply).into_iter().flatten());
                    }
                    coalesced.extend(stream_data(&next).into_iter().flatten());
                    frames += 1;
                }
                other => {
                    self.ahead = Some(other);
                    break;
                }
            }
        }
        match coalesced.is_empty() {
            true => (reply, frames),
            false => (with_data(reply, coalesced.freeze()), frames),
        }
    }
}

fn filled(reply: Reply) -> Result<reply::Reply, WireError> {
    reply.reply.ok_or(WireError::OutOfTurn("an empty reply"))
}

/// The bytes of a reply that carries stream data.
fn stream_data(reply: &reply::Reply) -> Option<&Bytes> {
    match reply {
        reply::Reply::Stdout(data) | reply::Reply::Stderr(data) | reply::Reply::Data(data) => {
            Some(data)
        }
        _ => None,
    }
}

/// Whether `next` is a small chunk of the same stream.
fn continues(reply: &reply::Reply, next: &reply::Reply) -> bool {
    std::mem::discriminant(reply) == std::mem::discriminant(next)
        && stream_data(next).is_some_and(|data| (1..COALESCED_BYTES_MAX).contains(&data.len()))
}

fn with_data(reply: reply::Reply, data: Bytes) -> reply::Reply {
    match reply {
        reply::Reply::Stdout(_) => reply::Reply::Stdout(data),
        reply::Reply::Stderr(_) => reply::Reply::Stderr(data),
        reply::Reply::Data(_) => reply::Reply::Data(data),
        other => other,
    }
}

// === impl Inputs ===

impl Inputs {
    /// Sends one input.
    pub async fn send(&mut self, input: input::Input) -> Result<(), WireError> {
        self.0.send(&Input { input: Some(input) }).await
    }
}

// === impl GuestEnd ===

impl GuestEnd {
    /// The guest's end of an accepted connection.
    pub fn new(stream: UnixStream) -> Self {
        let (read, write) = stream.into_split();
        Self {
            requests: Requests(FrameReader::new(read, HOST_FRAME_BYTES_MAX)),
            replies: ReplySink(FrameWriter::new(write)),
        }
    }
}

// === impl Requests ===

impl Requests {
    /// The request; none when the host closed without sending one.
    pub async fn request(&mut self) -> Result<Option<request::Call>, WireError> {
        let request: Option<Request> = self.0.next().await?;
        Ok(request.and_then(|request| request.call))
    }

    /// The next input; none when the host closed, which cancels the call. Cancel safe.
    pub async fn input(&mut self) -> Result<Option<input::Input>, WireError> {
        match self.0.next::<Input>().await? {
            None => Ok(None),
            Some(Input { input: Some(input) }) => Ok(Some(input)),
            Some(Input { input: None }) => Err(WireError::OutOfTurn("an empty input")),
        }
    }
}

impl AsFd for Requests {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_ref().as_fd()
    }
}

// === impl ReplySink ===

impl ReplySink {
    /// Sends one reply, after those that are buffered.
    pub async fn send(&mut self, reply: reply::Reply) -> Result<(), WireError> {
        self.0.send(&Reply { reply: Some(reply) }).await
    }

    /// Buffers a reply until the next [`Self::send`] or [`Self::flush`].
    pub fn hold(&mut self, reply: reply::Reply) -> Result<(), WireError> {
        self.0.hold(&Reply { reply: Some(reply) })
    }

    /// Sends the buffered replies.
    pub async fn flush(&mut self) -> Result<(), WireError> {
        self.0.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Exited, Hello};
    use reply::Reply::{Data, Exited as Ended, Stderr, Stdout};

    /// The replies that the host reads when the guest has sent all of these before.
    async fn read(
        sent: Vec<reply::Reply>,
        rate_limit: Option<Arc<RateLimit>>,
    ) -> Vec<reply::Reply> {
        let (ours, theirs) = StdStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut guest = GuestEnd::new(UnixStream::from_std(theirs).unwrap());
        let call = request::Call::Hello(Hello::default());
        let mut host = HostEnd::call(ours, call).await.unwrap();
        if let Some(rate_limit) = &rate_limit {
            host = host.rate_limited(rate_limit);
        }
        for reply in &sent {
            guest.replies.hold(reply.clone()).unwrap();
        }
        guest.replies.flush().await.unwrap();
        drop(guest);
        let mut came = Vec::new();
        while let Ok(reply) = host.replies.next().await {
            came.push(reply);
        }
        came
    }

    fn bytes(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    #[tokio::test]
    async fn small_chunks_of_a_stream_are_coalesced_in_order() {
        let large = Bytes::from(vec![b'x'; COALESCED_BYTES_MAX]);
        let exited = Ended(Exited::default());
        let sent = vec![
            Stdout(bytes("a")),
            Stdout(bytes("b")),
            Stderr(bytes("c")),
            Stdout(bytes("d")),
            Stdout(Bytes::new()),
            Stdout(bytes("e")),
            Stdout(large.clone()),
            Data(bytes("f")),
            exited.clone(),
        ];
        let together = vec![
            Stdout(bytes("ab")),
            Stderr(bytes("c")),
            Stdout(bytes("d")),
            Stdout(Bytes::new()),
            Stdout(bytes("e")),
            Stdout(large),
            Data(bytes("f")),
            exited,
        ];
        let rate_limit = Some(Arc::default());
        assert_eq!(read(sent.clone(), rate_limit).await, together);
        assert_eq!(read(sent.clone(), None).await, sent);
    }

    #[tokio::test]
    async fn a_flood_of_single_bytes_is_coalesced() {
        let sent = vec![Stdout(bytes("x")); 10_000];
        let chunks = read(sent, Some(Arc::default())).await;
        assert!(chunks.len() < 500, "{} chunks", chunks.len());
        let total: usize = chunks.iter().filter_map(stream_data).map(Bytes::len).sum();
        assert_eq!(total, 10_000);
    }
}
