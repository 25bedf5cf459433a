//! Waits on a session's phase: its end, and timeouts that stop while it is paused.

use k8e_model::Phase;
use std::pin::pin;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Resolves when the session is terminating or has ended.
pub(crate) async fn left_active(phases: &mut watch::Receiver<Phase>) {
    // A closed channel: the session has ended.
    phases.wait_for(|phase| phase.is_ending()).await.ok();
}

/// Runs `work` with the timeout `left`, which does not count down while the session is paused. None
/// on timeout.
pub(crate) async fn within<T>(
    phases: &watch::Receiver<Phase>,
    left: &mut Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut phases = phases.clone();
    let mut work = pin!(work);
    loop {
        let since = Instant::now();
        let paused = *phases.borrow_and_update() == Phase::Paused;
        let (done, late) = tokio::select! {
            biased;
            done = &mut work => (Some(done), false),
            Ok(()) = phases.changed() => (None, false),
            () = sleep(*left), if !paused => (None, true),
        };
        if !paused {
            *left = left.saturating_sub(since.elapsed());
        }
        if done.is_some() || late {
            return done;
        }
    }
}
