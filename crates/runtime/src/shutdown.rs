//! Graceful shutdown: SIGTERM to all commands, SIGKILL near the end of `-shutdown-timeout`, then connections are
//! drained.

use crate::shared::{Phase, Shared};
use rustix::process::{Pid, Signal};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

/// Interval at which init counts the processes that are left.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// The last fifth of the timeout is left after SIGKILL, for the last output to reach clients.
const AFTER_KILL_PART: u32 = 5;

/// Ends all commands and connections. Meanwhile probes are answered with 503.
pub(crate) async fn shutdown(shared: &Shared, mut listeners: JoinSet<()>, is_init: bool) {
    let config = &shared.config;
    let deadline = Instant::now() + config.shutdown_timeout;
    let kill_at = deadline - config.shutdown_timeout / AFTER_KILL_PART;
    crate::log("k8e-runtime is shutting down: sending SIGTERM to all commands");
    shared.phase.send_replace(Phase::Stopping);
    if is_init {
        terminate_all_processes();
    } else {
        shared.registry.signal_all(Signal::TERM);
    }
    if timeout_at(kill_at, drained(shared, is_init)).await.is_err() {
        crate::log("k8e-runtime is shutting down: sending SIGKILL to the commands that are left");
        shared.registry.signal_all(Signal::KILL);
        let _ = timeout_at(deadline, shared.registry.drained()).await;
    }
    shared.phase.send_replace(Phase::Closing);
    let closed = async { while listeners.join_next().await.is_some() {} };
    // A command that is still running after that ends with this process.
    let _ = timeout_at(deadline, closed).await;
}

/// Resolves when no command runs and, as PID 1, no other process of the pod does.
async fn drained(shared: &Shared, is_init: bool) {
    shared.registry.drained().await;
    while is_init && shared.agent.processes().await.is_ok_and(|left| left > 0) {
        sleep(POLL_EVERY).await;
    }
}

/// As PID 1: SIGTERM to every process, also to those that commands left in the background.
fn terminate_all_processes() {
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
