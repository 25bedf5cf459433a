//! The signals that ask a server to stop: SIGTERM, and SIGINT (Ctrl-C).

use std::io;
use tokio::signal::unix::{SignalKind, signal};

/// Handles both signals from now on; the future is done when the first of them came.
///
/// # Errors
///
/// The system lets no handler be set.
pub fn signals() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use rustix::process::{Signal, getpid, kill_process};

    #[tokio::test]
    async fn both_signals_are_handled_before_they_are_awaited() {
        for kind in [Signal::TERM, Signal::INT] {
            let mut stop = Box::pin(signals().unwrap());
            assert!(stop.as_mut().now_or_never().is_none());
            kill_process(getpid(), kind).unwrap();
            stop.await;
        }
    }
}
