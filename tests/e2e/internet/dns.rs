//! Resolvers, over UDP, TCP and TLS. Made by hand: one from the library that the product uses
//! would share its mistakes.

mod message;

use super::log::{Log, Query};
use super::zone::{Data, Zone};
use message::Question;
use std::net::SocketAddr;
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UdpSocket;

const MESSAGE_BYTES_MAX: usize = 65_535;

/// A resolver.
#[derive(Clone, Debug)]
pub(super) struct Resolver {
    pub(super) log: Log,
    pub(super) zone: Zone,
}

// === impl Resolver ===

impl Resolver {
    pub(super) async fn serve_udp(self, socket: UdpSocket) {
        let local = socket.local_addr().expect("an address");
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        loop {
            // An error is about an answer that nobody waited for.
            let Ok((length, peer)) = socket.recv_from(&mut buffer).await else {
                continue;
            };
            let message = &buffer[..length];
            self.log.datagram(local, message);
            let room = message::udp_bytes_max(message);
            if let Some(answer) = self.answer(local, message, room) {
                // Who is gone does not want it.
                drop(socket.send_to(&answer, peer).await);
            }
        }
    }

    pub(super) async fn serve_stream<S>(self, mut stream: S, local: SocketAddr)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        while let Ok(length) = stream.read_u16().await {
            let mut message = vec![0; usize::from(length)];
            if stream.read_exact(&mut message).await.is_err() {
                return;
            }
            let Some(answer) = self.answer(local, &message, MESSAGE_BYTES_MAX) else {
                continue;
            };
            let length = u16::try_from(answer.len()).expect("it was made to fit");
            let framed = [&length.to_be_bytes()[..], &answer].concat();
            if stream.write_all(&framed).await.is_err() {
                return;
            }
        }
    }

    /// Nothing when it stays silent.
    fn answer(&self, local: SocketAddr, message: &[u8], room: usize) -> Option<Vec<u8>> {
        let question = Question::parse(message)?;
        self.log.query(Query {
            at: Instant::now(),
            local,
            name: question.name.clone(),
            kind: question.kind,
            message: message.to_vec(),
        });
        let records = self.zone.look_up(&question.name, question.kind);
        let says = |data: &Data| records.iter().flatten().any(|record| record.data == *data);
        if says(&Data::Silence) {
            return None;
        }
        if says(&Data::Failure) {
            return Some(question.failure());
        }
        Some(question.answer(records.as_deref(), room))
    }
}
