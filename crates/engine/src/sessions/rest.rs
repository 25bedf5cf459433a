//! Has sandboxes rest in which nothing runs, where idling costs CPU: the kernel inside a gVisor
//! sandbox keeps itself busy, and a hundred of them keep the machine busy. The next use wakes
//! it. That is nobody's business but the server's: a session that its owner paused is another thing.
//!
//! Only what the guest says runs nothing is put to rest: a server that an agent left in the background
//! keeps serving.

use super::Shared;
use crate::live::Live;
use futures::StreamExt as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Between looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Whoever used it so lately will use it again: resuming takes a few milliseconds of its CPU.
const QUIET_FOR: Duration = Duration::from_secs(5);

/// Something runs in it: it may go on for long.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// A guest that does not answer sooner is not quiet.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Guests that are asked at once.
const ASKED_AT_ONCE: usize = 4;

/// Runs until shutdown.
pub(super) async fn rest(shared: Arc<Shared>) {
    loop {
        tokio::select! {
            () = shared.stopped() => return,
            () = sleep(LOOK_EVERY) => {}
        }
        let now = Instant::now();
        let sessions: Vec<_> = shared.index().sessions.values().cloned().collect();
        let quiet = |live: Arc<Live>| {
            let since = live.quiet_since(now, QUIET_FOR)?;
            Some((live, since))
        };
        let quiet = futures::stream::iter(sessions.into_iter().filter_map(quiet));
        let settle = |(live, since): (Arc<Live>, Instant)| async move {
            if runs_nothing(&live).await {
                live.rest(since);
            } else {
                live.look_again(now + LOOK_AGAIN);
            }
        };
        quiet.for_each_concurrent(ASKED_AT_ONCE, settle).await;
    }
}

/// Whether there is no process in it but the guest. Its word is enough: who lies stops itself.
async fn runs_nothing(live: &Live) -> bool {
    let Some(sandbox) = live.sandbox() else {
        return false;
    };
    let count = timeout(ANSWER_WITHIN, sandbox.guest().count_processes()).await;
    matches!(count, Ok(Ok(0)))
}
