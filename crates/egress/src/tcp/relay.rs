//! Bidirectional relay between two sockets, until both peers have closed (EOF) or one has failed.

use super::rate_limit::{READ_COST, RateLimit};
use super::relay_buffer::RelayBuffer;
use super::socket;
use rustix::net::Shutdown;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Idle timeout: without a byte in either direction for this long (at most twice this long) a
/// connection ends. Databases, shells and long polls are idle for many minutes; a dead peer is
/// detected by TCP keep-alive long before.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(60 * 60);

/// One end of a connection.
#[derive(Clone, Copy)]
pub(super) struct Endpoint<'a> {
    pub(super) stream: &'a TcpStream,
    /// Bytes already read from it that are to be written to the other peer first.
    pub(super) pending: &'a [u8],
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// EOF from both peers.
    Finished,
    /// One peer failed or was reset, so the other is reset too.
    Broken,
    /// The idle timeout has passed.
    Idle,
}

/// Relays both directions. Unless it returns [`End::Finished`], both sockets are reset on drop.
pub(super) async fn relay(a: Endpoint<'_>, b: Endpoint<'_>, rate_limit: &RateLimit) -> End {
    let progress = AtomicU64::new(0);
    let (a_done, b_done) = (Notify::new(), Notify::new());
    let a_to_b = Direction {
        from: a,
        to: b.stream,
        rate_limit,
        progress: &progress,
        done: &a_done,
        other_done: &b_done,
    };
    let b_to_a = Direction {
        from: b,
        to: a.stream,
        done: &b_done,
        other_done: &a_done,
        ..a_to_b
    };
    let both = async { tokio::try_join!(a_to_b.run(), b_to_a.run()) };
    tokio::select! {
        done = both => if done.is_ok() {
            socket::finish(a.stream);
            socket::finish(b.stream);
            End::Finished
        } else {
            End::Broken
        },
        () = idle_for(&progress, IDLE_MAX) => End::Idle,
    }
}

/// Returns when `progress` has not changed for this long (at most twice this long).
pub(super) async fn idle_for(progress: &AtomicU64, time: Duration) {
    let mut last = progress.load(Ordering::Relaxed);
    loop {
        tokio::time::sleep(time).await;
        let now = progress.load(Ordering::Relaxed);
        if now == last {
            return;
        }
        last = now;
    }
}

/// One direction of a relay.
#[derive(Clone, Copy)]
struct Direction<'a> {
    from: Endpoint<'a>,
    to: &'a TcpStream,
    rate_limit: &'a RateLimit,
    progress: &'a AtomicU64,
    done: &'a Notify,
    other_done: &'a Notify,
}

// === impl Direction ===

impl Direction<'_> {
    /// Relays this direction to its end. An error ends both directions.
    async fn run(self) -> io::Result<()> {
        let sent = self.send_all().await?;
        self.done.notify_one();
        if let Err(error) = sent {
            // The receiver takes nothing any more. What it sent before still goes the other way, which
            // ends with the same error.
            self.other_done.notified().await;
            return Err(error);
        }
        // An error means that the peer has closed already.
        let _ = rustix::net::shutdown(self.to, Shutdown::Write);
        tokio::select! {
            () = self.other_done.notified() => Ok(()),
            // After EOF the sender is not read any more: only this detects that it was reset.
            () = socket::broken(self.from.stream) => Err(io::ErrorKind::ConnectionReset.into()),
        }
    }

    /// Copies until EOF. The outer error is about reading, the inner one about writing.
    async fn send_all(&self) -> io::Result<io::Result<()>> {
        let pending = self.from.pending;
        if !pending.is_empty() {
            self.meter(pending.len()).await;
            if let Err(error) = socket::write_all(self.to, pending).await {
                return Ok(Err(error));
            }
        }
        let mut buffer = RelayBuffer::new(self.rate_limit.chunk_bytes_max());
        loop {
            let bytes = buffer.read_from(self.from.stream).await?;
            if bytes == 0 {
                return Ok(Ok(()));
            }
            self.meter(bytes).await;
            if let Err(error) = socket::write_all(self.to, buffer.filled(bytes)).await {
                return Ok(Err(error));
            }
            // Yields to other tasks, and to the policy watch of this one.
            tokio::task::coop::consume_budget().await;
        }
    }

    async fn meter(&self, bytes: usize) {
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.rate_limit.take(bytes, READ_COST).await;
    }
}
