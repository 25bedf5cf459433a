//! Idle stop: stops sandboxes in which nothing runs, where idling costs CPU. The kernel inside a gVisor
//! sandbox stays busy, and a hundred of them keep the machine busy. The next use wakes the sandbox.
//! Idle stop is internal to the server and is not the pause that a session's owner asks for: the
//! session stays active.
//!
//! A sandbox is stopped only when its guest reports that nothing runs: a server that an agent left in
//! the background keeps serving.

use super::Shared;
use crate::live::Live;
use futures::StreamExt as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Interval between checks for idle sessions.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// A session counts as idle this long after its last use: one that was used more recently is likely to be
/// used again, and a wake costs a few milliseconds of CPU.
const IDLE_FOR: Duration = Duration::from_secs(5);

/// Delay before the next check of a session in which something runs: it may run for long.
const RECHECK_AFTER: Duration = Duration::from_secs(10);

/// Timeout of the guest's reply. A guest that takes longer does not count as idle.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Guests that are asked concurrently.
const CONCURRENCY: usize = 4;

/// Background task: stops idle sandboxes until shutdown.
pub(super) async fn idle_stop(shared: Arc<Shared>) {
    loop {
        tokio::select! {
            () = shared.stopped() => return,
            () = sleep(CHECK_EVERY) => {}
        }
        let now = Instant::now();
        let sessions: Vec<_> = shared.index().sessions.values().cloned().collect();
        let idle = |live: Arc<Live>| {
            let since = live.idle_since(now, IDLE_FOR)?;
            Some((live, since))
        };
        let idle = futures::stream::iter(sessions.into_iter().filter_map(idle));
        let stop = |(live, since): (Arc<Live>, Instant)| async move {
            if runs_nothing(&live).await {
                live.idle_stop(since);
            } else {
                live.defer_idle_check(now + RECHECK_AFTER);
            }
        };
        idle.for_each_concurrent(CONCURRENCY, stop).await;
    }
}

/// Whether the guest is the only process of the sandbox. The guest's own report is enough: one that lies
/// stops only itself.
async fn runs_nothing(live: &Live) -> bool {
    let Some(sandbox) = live.sandbox() else {
        return false;
    };
    let count = timeout(REPLY_TIMEOUT, sandbox.guest().count_processes()).await;
    matches!(count, Ok(Ok(0)))
}
