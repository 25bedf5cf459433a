//! Bounded accept loop: a connection limit for a listener, and a pause when accepting fails.
//!
//! Connections over the limit are not refused: they wait in the kernel's queue until one that is open is closed.

use futures::Stream;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

/// Before the next try after a failed accept. Most likely there are no file descriptors left, and others must close theirs
/// first; without a pause the loop would take a whole CPU until then.
const ACCEPT_FAILED_PAUSE: Duration = Duration::from_millis(50);

/// A listening socket.
pub trait Listener: Send + Sync + 'static {
    /// An accepted connection.
    type Stream: Send;
    /// Accepts one connection. Can be dropped before it is done without losing one.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// How many connections may be open at once, of one listener or of several together. Clones share the limit.
#[derive(Clone, Debug)]
pub struct ConnectionLimit(Arc<Semaphore>);

/// One connection's part of a [`ConnectionLimit`]: drop it when the connection is closed.
#[derive(Debug)]
pub struct ConnectionPermit(
    #[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit,
);

/// The next connection, without a limit. Failures are logged once in a row and tried again after a pause.
pub async fn accept<L: Listener>(listener: &L) -> L::Stream {
    let mut failed = false;
    loop {
        match listener.accept().await {
            Ok(stream) => return stream,
            Err(error) => {
                if !std::mem::replace(&mut failed, true) {
                    tracing::warn!("cannot accept a connection: {error}");
                }
                sleep(ACCEPT_FAILED_PAUSE).await;
            }
        }
    }
}

// === impl ConnectionLimit ===

impl ConnectionLimit {
    /// At most `connections_max` at once.
    #[must_use]
    pub fn new(connections_max: usize) -> Self {
        Self(Arc::new(Semaphore::new(connections_max)))
    }

    /// A permit, once the limit allows one more.
    pub async fn acquire(&self) -> ConnectionPermit {
        let permit = Arc::clone(&self.0).acquire_owned().await;
        ConnectionPermit(permit.expect("the semaphore is never closed"))
    }

    /// A permit, if the limit allows one more now.
    #[must_use]
    pub fn try_acquire(&self) -> Option<ConnectionPermit> {
        let permit = Arc::clone(&self.0).try_acquire_owned();
        permit.ok().map(ConnectionPermit)
    }

    /// The next connection of `listener`, once the limit allows one more. Can be dropped before it is done.
    pub async fn accept<L: Listener>(&self, listener: &L) -> (L::Stream, ConnectionPermit) {
        let permit = self.acquire().await;
        (accept(listener).await, permit)
    }

    /// The connections of `listener`. Never ends.
    pub fn incoming<L: Listener>(
        self,
        listener: L,
    ) -> impl Stream<Item = (L::Stream, ConnectionPermit)> + Send {
        futures::stream::unfold((self, listener), |(limit, listener)| async move {
            let accepted = limit.accept(&listener).await;
            Some((accepted, (limit, listener)))
        })
    }
}

// === impl Listener ===

impl Listener for TcpListener {
    type Stream = TcpStream;
    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = Self::accept(self).await?;
        // Answers are small and waited for. A client that is gone already is noticed by whoever reads.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;
    async fn accept(&self) -> io::Result<UnixStream> {
        Self::accept(self).await.map(|(stream, _)| stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt as _, StreamExt as _};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::time::Instant;

    /// Fails three times out of four.
    struct Failing(AtomicUsize);

    impl Listener for Failing {
        type Stream = usize;
        async fn accept(&self) -> io::Result<usize> {
            match self.0.fetch_add(1, Ordering::Relaxed) {
                n if n % 4 == 3 => Ok(n),
                _ => Err(io::Error::other("no descriptors")),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_accepts_are_retried_after_a_pause() {
        let listener = Failing(AtomicUsize::new(0));
        let begun = Instant::now();
        assert_eq!(accept(&listener).await, 3);
        assert_eq!(begun.elapsed(), 3 * ACCEPT_FAILED_PAUSE);
    }

    #[tokio::test]
    async fn connections_over_the_limit_wait_for_one_to_close() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Box::pin(ConnectionLimit::new(2).incoming(listener));
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(TcpStream::connect(address).await.unwrap());
        }
        let limit = ConnectionLimit::new(1);
        let only = limit.try_acquire();
        assert!(only.is_some() && limit.clone().try_acquire().is_none());
        let (first, permit) = incoming.next().await.unwrap();
        assert!(first.nodelay().unwrap());
        let _second = incoming.next().await.unwrap();
        assert!(incoming.next().now_or_never().is_none());
        drop((first, permit));
        incoming.next().await.unwrap();
    }
}
