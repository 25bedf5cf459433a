//! Waiting for a session that may end or be paused meanwhile.

use k8e_model::Phase;
use std::pin::pin;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Resolves when the session is over, or about to be.
pub(crate) async fn left_active(phases: &mut watch::Receiver<Phase>) {
    // A closed channel means that the session is gone too.
    phases.wait_for(|phase| phase.is_ending()).await.ok();
}

/// Waits for `work`, as long as `left` says; the time that the session is paused does not count. None
/// when that is over.
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
