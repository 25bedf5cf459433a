//! A guest on a thread and a runtime of its own: it dies whole, and a test's paused clock does not stop it.

use std::future::Future;
use std::path::Path;
use std::thread::JoinHandle;
use tokio::net::UnixListener;
use tokio::sync::oneshot;

/// A guest under way. Dropping it ends it: every connection closes at once, as when a sandbox dies.
pub(crate) struct GuestThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

// === impl GuestThread ===

impl GuestThread {
    /// Listens at `path` before it returns.
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
            // A guest that panicked has already failed its test's expectations.
            thread.join().ok();
        }
    }
}
