//! A guest on a separate thread with its own tokio runtime: it can be killed as a whole, and the paused
//! clock of a test does not affect it.

use std::future::Future;
use std::path::Path;
use std::thread::JoinHandle;
use tokio::net::UnixListener;
use tokio::sync::oneshot;

/// A running guest. Dropping it closes every connection at once, as when a sandbox dies.
pub(crate) struct GuestThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

// === impl GuestThread ===

impl GuestThread {
    /// Starts the thread; the guest listens at `path` when this returns.
    pub(crate) fn start<F, G>(path: &Path, serve: F) -> std::io::Result<Self>
    where
        F: FnOnce(UnixListener) -> G + Send + 'static,
        G: Future<Output = ()>,
    {
        let listener = std::os::unix::net::UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let thread = std::thread::Builder::new()
            .name("guest".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    let listener =
                        UnixListener::from_std(listener).expect("the listener is nonblocking");
                    tokio::select! {
                        () = serve(listener) => {}
                        _ = stopped => {}
                    }
                });
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for GuestThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A guest that panicked has already failed the test.
            thread.join().ok();
        }
    }
}
