//! The end: commands are asked to end, then killed; connections end with the request they have.

use crate::shared::{Phase, Shared};
use rustix::process::{Pid, Signal};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

/// Between looks at who is left.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What is left of the time when commands are killed, for their last output to arrive.
const LAST_PART: u32 = 5;

/// Ends all. Probes are answered meanwhile, and told.
pub(crate) async fn stop(shared: &Shared, mut doors: JoinSet<()>, is_init: bool) {
    let config = &shared.config;
    let deadline = Instant::now() + config.shutdown_timeout;
    let ask_until = deadline - config.shutdown_timeout / LAST_PART;
    crate::say("k8e-runtime stops: commands are asked to end");
    shared.phase.send_replace(Phase::Stopping);
    if is_init {
        ask_everybody();
    } else {
        shared.registry.signal_all(Signal::TERM);
    }
    if timeout_at(ask_until, quiet(shared, is_init)).await.is_err() {
        crate::say("k8e-runtime stops: what is left is killed");
        shared.registry.signal_all(Signal::KILL);
        let _ = timeout_at(deadline, shared.registry.drained()).await;
    }
    shared.phase.send_replace(Phase::Closing);
    let closed = async { while doors.join_next().await.is_some() {} };
    // What still runs after that dies with us.
    let _ = timeout_at(deadline, closed).await;
}

/// Resolves when no command runs and, for init, nothing else does.
async fn quiet(shared: &Shared, is_init: bool) {
    shared.registry.drained().await;
    while is_init && shared.agent.processes().await.is_ok_and(|left| left > 0) {
        sleep(LOOK_EVERY).await;
    }
}

/// As init, also what commands left in the background.
fn ask_everybody() {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return;
    };
    let pids = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw);
    for pid in pids.filter(|pid| !pid.is_init()) {
        let _ = rustix::process::kill_process(pid, Signal::TERM);
    }
}
