//! Ends a terminal and all processes it started: termination signals, a grace period, then SIGKILL.

use super::terminal::Terminal;
use crate::exec::kill;
use crate::{Guest, sys};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Longest grace period.
const GRACE_MAX: Duration = Duration::from_secs(20);

/// Poll interval of the remaining processes.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Interval of SIGHUP to shells: one that was about to wait for input may have missed the last.
const HINT_EVERY: Duration = Duration::from_millis(200);

/// Deadline for a supervisor to report the exit of its command.
const REPORT_WITHIN: Duration = Duration::from_secs(1);

/// Ends a terminal. The supervisor is stopped meanwhile: so it stays alive as the ancestor of all that the
/// command started.
pub(super) async fn end(guest: Arc<Guest>, terminal: Arc<Terminal>, grace: Duration) {
    let supervisor = terminal.supervisor;
    if terminal.exited().is_some() || !guest.supervisors.contains(supervisor) {
        return;
    }
    sys::kill(supervisor, libc::SIGSTOP);
    let begin = Instant::now();
    let grace = grace.min(GRACE_MAX);
    kill::ask(supervisor);
    let (mut hinted_at, mut hung_up) = (begin, false);
    while kill::count(supervisor) > 0 && begin.elapsed() < grace {
        tokio::time::sleep(LOOK_EVERY).await;
        if hinted_at.elapsed() >= HINT_EVERY {
            hinted_at = Instant::now();
            kill::hang_up(supervisor, false);
        }
        if !hung_up && begin.elapsed() >= grace / 2 {
            hung_up = true;
            kill::hang_up(supervisor, true);
        }
    }
    kill::kill_below(&guest, supervisor).await;
    // Now it reports the exit of its command, and exits.
    sys::kill(supervisor, libc::SIGCONT);
    let mut changed = terminal.changes();
    let over = async {
        while terminal.exited().is_none() {
            changed.changed().await.ok();
        }
    };
    if tokio::time::timeout(REPORT_WITHIN, over).await.is_err()
        && guest.supervisors.contains(supervisor)
    {
        sys::kill(supervisor, libc::SIGKILL);
    }
}
