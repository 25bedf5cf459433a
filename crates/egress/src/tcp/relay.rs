//! Carries bytes between two sockets until both sides have said all, as fast as this machine can.

use super::carrier::Carrier;
use super::pace::{OF_READ, Pace};
use super::socket;
use rustix::net::Shutdown;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Without a byte in either direction for this long (at most twice this long) a connection ends.
/// Databases, shells and long polls are silent for many minutes; a peer that is gone without a
/// word is found out by keep-alive long before.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(60 * 60);

/// One end of a connection.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    pub(super) stream: &'a TcpStream,
    /// What it has said that the other side was not told yet.
    pub(super) said: &'a [u8],
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Both sides have said all.
    Finished,
    /// One side broke it off, so the other is reset too.
    Broken,
    /// Nobody said anything for too long.
    Idle,
}

/// Carries both directions. Unless it is finished, both sockets are reset when they are dropped.
pub(super) async fn relay(a: Side<'_>, b: Side<'_>, pace: &Pace) -> End {
    let moved = AtomicU64::new(0);
    let (a_done, b_done) = (Notify::new(), Notify::new());
    let a_to_b = Way {
        from: a,
        to: b.stream,
        pace,
        moved: &moved,
        done: &a_done,
        other_done: &b_done,
    };
    let b_to_a = Way {
        from: b,
        to: a.stream,
        done: &b_done,
        other_done: &a_done,
        ..a_to_b
    };
    let both = async { tokio::try_join!(a_to_b.carry(), b_to_a.carry()) };
    tokio::select! {
        done = both => if done.is_ok() {
            socket::finish(a.stream);
            socket::finish(b.stream);
            End::Finished
        } else {
            End::Broken
        },
        () = stands_still(&moved, IDLE_MAX) => End::Idle,
    }
}

/// Ends when nothing was moved for this long, at most twice this long.
pub(super) async fn stands_still(moved: &AtomicU64, time: Duration) {
    let mut last = moved.load(Ordering::Relaxed);
    loop {
        tokio::time::sleep(time).await;
        let now = moved.load(Ordering::Relaxed);
        if now == last {
            return;
        }
        last = now;
    }
}

/// One of the two directions.
#[derive(Clone, Copy)]
struct Way<'a> {
    from: Side<'a>,
    to: &'a TcpStream,
    pace: &'a Pace,
    moved: &'a AtomicU64,
    done: &'a Notify,
    other_done: &'a Notify,
}

// === impl Way ===

impl Way<'_> {
    /// An error ends both directions at once.
    async fn carry(self) -> io::Result<()> {
        let sent = self.send_all().await?;
        self.done.notify_one();
        if let Err(error) = sent {
            // Its peer takes nothing any more. What it has said before it broke off still goes the
            // other way, which ends with the same error.
            self.other_done.notified().await;
            return Err(error);
        }
        // Who has closed already need not be told.
        let _ = rustix::net::shutdown(self.to, Shutdown::Write);
        tokio::select! {
            () = self.other_done.notified() => Ok(()),
            // Who has said all is not read from any more: only this tells that it is gone.
            () = socket::broken(self.from.stream) => Err(io::ErrorKind::ConnectionReset.into()),
        }
    }

    /// Until its peer has said all. The outer error is about reading, the inner one about writing.
    async fn send_all(&self) -> io::Result<io::Result<()>> {
        let said = self.from.said;
        if !said.is_empty() {
            self.meter(said.len()).await;
            if let Err(error) = socket::write_all(self.to, said).await {
                return Ok(Err(error));
            }
        }
        let mut carrier = Carrier::new(self.pace.piece());
        loop {
            let bytes = carrier.load(self.from.stream).await?;
            if bytes == 0 {
                return Ok(Ok(()));
            }
            self.meter(bytes).await;
            if let Err(error) = socket::write_all(self.to, carrier.loaded(bytes)).await {
                return Ok(Err(error));
            }
            // Others want their turn, and whoever carries this wants to look at the policy.
            tokio::task::coop::consume_budget().await;
        }
    }

    async fn meter(&self, bytes: usize) {
        self.moved.fetch_add(1, Ordering::Relaxed);
        self.pace.take(bytes, OF_READ).await;
    }
}
