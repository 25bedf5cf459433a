//! Connection to a service in a sandbox: a bidirectional relay with independent half-close.
//!
//! A relay task copies bytes between the guest's call and the holder of the [`PortConnection`]. It ends
//! with either, with the session, and when the service is no longer exposed.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::OpenPort;
use crate::Error;
use crate::guest::Call;
use crate::live::{Purpose, Use, left_active};
use bytes::{Buf as _, Bytes, BytesMut};
use k8e_wire::proto::{End, Forward, input, reply, request};
use k8e_wire::{CHUNK_BYTES, Inputs, Replies};
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::mpsc;

/// Concurrent connections per session: together with runs and calls under the guest's 512.
const PER_SESSION_MAX: usize = 64;

/// Chunks buffered for the reader (backpressure): one in transit, one ready.
const CHUNKS_MAX: usize = 2;

/// Empty chunks that a guest may send in a row.
const EMPTIES_MAX: u32 = 64;

/// A connection to a service in a sandbox. Dropping it closes both ends; shutting it down ends what is
/// sent to the service. While it is there its session is not idle.
pub struct PortConnection {
    chunks: mpsc::Receiver<io::Result<Bytes>>,
    /// Unread part of the last chunk.
    rest: Bytes,
    ended: bool,
    to_service: DuplexStream,
}

/// Relay state, owned by the relay task.
struct Relay {
    replies: Replies,
    inputs: Inputs,
    from_writer: DuplexStream,
    /// An empty chunk is the end of what the service sends.
    to_reader: mpsc::Sender<io::Result<Bytes>>,
    /// Keeps the session from being idle.
    _used: Use,
}

// === impl OpenPort ===

impl OpenPort {
    /// Connects to the service.
    ///
    /// # Errors
    ///
    /// [`k8e_model::Code::Precondition`] when the connection is refused.
    pub async fn connect(&self) -> Result<PortConnection, Error> {
        let used = self
            .live
            .begin(Purpose::Connection, PER_SESSION_MAX, &self.recorder)?;
        let forward = request::Call::Forward(Forward {
            port: self.port.get().into(),
            host: self.host.to_string(),
        });
        let what = format!("connect to port {}", self.port);
        let mut call = Call::start(used, forward, what).await?;
        match call.reply().await? {
            reply::Reply::Connected(_) => {}
            _ => return Err(call.misbehaved("it did not report that it connected")),
        }
        let Some(inputs) = call.inputs.take() else {
            return Err(call.misbehaved("it had closed the connection"));
        };
        let (to_reader, chunks) = mpsc::channel(CHUNKS_MAX);
        let (to_service, from_writer) = tokio::io::duplex(CHUNK_BYTES);
        let Call {
            replies,
            used,
            mut phases,
            ..
        } = call;
        let relay = Relay {
            replies,
            inputs,
            from_writer,
            to_reader: to_reader.clone(),
            _used: used,
        };
        let mut cut = self.cut.clone();
        tokio::spawn(async move {
            let error = tokio::select! {
                biased;
                () = to_reader.closed() => return,
                // A dropped sender: the exposure is gone.
                _ = cut.wait_for(|cut| *cut) => broken("the service is no longer exposed"),
                () = left_active(&mut phases) => broken("the session has ended"),
                relayed = relay.run() => match relayed {
                    Ok(()) => return,
                    Err(error) => error,
                },
            };
            // The call is closed by now; the error waits for the reader.
            let _ = to_reader.send(Err(error)).await;
        });
        Ok(PortConnection {
            chunks,
            rest: Bytes::new(),
            ended: false,
            to_service,
        })
    }
}

// === impl Relay ===

impl Relay {
    /// Relays until both directions have ended.
    async fn run(self) -> io::Result<()> {
        let Self {
            replies,
            inputs,
            from_writer,
            to_reader,
            _used,
        } = self;
        tokio::select! {
            biased;
            relayed = relay_to_reader(replies, &to_reader) => relayed,
            error = relay_to_service(from_writer, inputs) => Err(error),
        }
    }
}

/// Relays from the service to the reader.
async fn relay_to_reader(
    mut replies: Replies,
    to_reader: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let mut empties = 0;
    let mut ended = false;
    loop {
        let chunk = match replies.next().await {
            Ok(reply::Reply::Data(data)) if ended || empties > EMPTIES_MAX => {
                drop(data);
                return Err(broken("the sandbox's agent misbehaved"));
            }
            Ok(reply::Reply::Data(data)) if data.is_empty() => {
                empties += 1;
                continue;
            }
            Ok(reply::Reply::Data(data)) => data,
            Ok(reply::Reply::End(_)) if !ended => {
                ended = true;
                Bytes::new()
            }
            Ok(reply::Reply::Done(_)) if ended => return Ok(()),
            Ok(reply::Reply::Error(_)) => return Err(broken("the service broke the connection")),
            Ok(_) => return Err(broken("the sandbox's agent misbehaved")),
            Err(_) => return Err(broken("the sandbox closed the connection")),
        };
        empties = 0;
        if to_reader.send(Ok(chunk)).await.is_err() {
            return Ok(());
        }
    }
}

/// Relays from the writer to the service. Returns only on failure.
async fn relay_to_service(mut from_writer: DuplexStream, mut inputs: Inputs) -> io::Error {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK_BYTES);
        let read = from_writer.read_buf(&mut buffer).await;
        let input = match read {
            Ok(0) | Err(_) => input::Input::End(End {}),
            Ok(_) => input::Input::Data(buffer.split().freeze()),
        };
        let last = matches!(input, input::Input::End(_));
        if inputs.send(input).await.is_err() {
            return broken("the sandbox closed the connection");
        }
        if last {
            // Half-close: closing the call would cancel the service's response.
            std::future::pending().await
        }
    }
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::ConnectionReset, what)
}

// === impl PortConnection ===

impl AsyncRead for PortConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.rest.is_empty() && !self.ended {
            match ready!(self.chunks.poll_recv(context)) {
                Some(Ok(chunk)) => {
                    self.ended = chunk.is_empty();
                    self.rest = chunk;
                }
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Err(broken("the connection has ended"))),
            }
        }
        let taken = self.rest.len().min(buffer.remaining());
        buffer.put_slice(&self.rest[..taken]);
        self.rest.advance(taken);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PortConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.to_service).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.to_service).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.to_service).poll_shutdown(context)
    }
}

impl std::fmt::Debug for PortConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortConnection").finish_non_exhaustive()
    }
}
