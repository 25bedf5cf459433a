//! The listening socket, and closing it for a checkpoint.
//!
//! gVisor cannot save a socket that is bound on the host. So the host asks to have it closed ([`Listener::close`]),
//! which is refused while other calls are open, and the guest then tries to bind it again until the host makes the
//! socket's directory writable: right after the checkpoint failed, or in the restored sandbox. The two names of the
//! socket take turns, because the kernel inside still knows the old one.

use crate::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Delay between attempts to bind. Short: a call waits for it. In a sandbox that is stopped it costs nothing.
const BIND_PAUSE: Duration = Duration::from_millis(2);

/// The two paths of the socket; the first is bound.
#[derive(Clone, Debug)]
pub struct SocketNames {
    bound: PathBuf,
    next: PathBuf,
}

/// Counts connections, and passes the request to close the socket to the loop that accepts.
pub(crate) struct Listener {
    connections_max: usize,
    room: Arc<Semaphore>,
    close: mpsc::Sender<oneshot::Sender<()>>,
    requests: Mutex<mpsc::Receiver<oneshot::Sender<()>>>,
}

// === impl SocketNames ===

impl SocketNames {
    /// `bound` is the name that the socket has now.
    pub fn new(bound: &Path, next: &Path) -> Self {
        Self {
            bound: bound.to_owned(),
            next: next.to_owned(),
        }
    }

    /// Binds the other name as soon as the host allows it, and removes the first.
    pub(crate) async fn bind_next(&mut self) -> UnixListener {
        loop {
            if let Ok(listener) = UnixListener::bind(&self.next) {
                // The host waits until it is gone.
                let _ = std::fs::remove_file(&self.bound);
                std::mem::swap(&mut self.bound, &mut self.next);
                return listener;
            }
            tokio::time::sleep(BIND_PAUSE).await;
        }
    }
}

// === impl Listener ===

impl Listener {
    pub(crate) fn new(connections_max: usize) -> Self {
        let (close, requests) = mpsc::channel(1);
        Self {
            connections_max,
            room: Arc::new(Semaphore::new(connections_max)),
            close,
            requests: Mutex::new(requests),
        }
    }

    /// Counts a connection until the permit is dropped; none when there are too many.
    pub(crate) fn connection(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.room).try_acquire_owned().ok()
    }

    /// Resolves when the socket is to be closed, with what is to be told then.
    pub(crate) async fn close_requested(&self) -> oneshot::Sender<()> {
        match self.requests.lock().await.recv().await {
            Some(closed) => closed,
            // The sender is beside the receiver.
            None => std::future::pending().await,
        }
    }

    /// Closes the socket, when the call that asks for it is the only connection.
    pub(crate) async fn close(&self) -> Result<(), Error> {
        let open = self.connections_max - self.room.available_permits();
        if open > 1 {
            return Err(Error::Precondition(format!("{} calls are open", open - 1)));
        }
        let (closed, told) = oneshot::channel();
        let refused = || Error::Precondition("its socket cannot be closed".to_owned());
        self.close.try_send(closed).map_err(|_| refused())?;
        told.await.map_err(|_| refused())
    }
}
