//! Kills the process tree of a command.
//!
//! Whatever the command forked is a descendant of its supervisor, which is stopped first so that it
//! stays there as their parent. Then every descendant is stopped, repeatedly, until two scans
//! in a row show the same processes, all stopped: from then on none can fork, and the set is complete.
//! Then all are killed. Killing without stopping first would race with forks and with orphans that
//! change parents.

use crate::Guest;
use crate::procfs::{self, Stat};
use crate::sys;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Deadline of killing. A process that the kernel does not end within that is stuck in a
/// device or a file system.
const KILL_WITHIN: Duration = Duration::from_secs(5);

/// Scans until stopping is given up and killing begins anyway: a parent inside vfork never shows as
/// stopped, and another command could send SIGCONT.
const STOP_ROUNDS_MAX: u32 = 50;

/// Deadline of killing when the guest itself is exiting and nothing else can run.
const KILL_NOW_WITHIN: Duration = Duration::from_secs(1);

/// Delay for signals to be delivered.
const PAUSE: Duration = Duration::from_millis(1);

/// Kills every process under the supervisor, those of the command's session (0: not known), and the
/// supervisor.
pub(crate) async fn kill_tree(guest: &Guest, supervisor: i32, command: i32) {
    let mut killing = Killing::new(guest, supervisor, command, KILL_WITHIN);
    while let Some(pause) = killing.step() {
        if pause.is_zero() {
            tokio::task::yield_now().await
        } else {
            tokio::time::sleep(pause).await
        }
    }
}

/// Kills every process under the supervisor, and leaves the supervisor stopped.
pub(crate) async fn kill_below(guest: &Guest, supervisor: i32) {
    let mut killing = Killing::new(guest, supervisor, 0, KILL_WITHIN);
    killing.spares_supervisor = true;
    while let Some(pause) = killing.step() {
        tokio::time::sleep(pause).await;
    }
}

/// SIGTERM to every process under the supervisor.
pub(crate) fn ask(supervisor: i32) {
    for stat in descendants(supervisor, 0).unwrap_or_default() {
        sys::kill(stat.pid, libc::SIGTERM);
        // A stopped process cannot handle SIGTERM.
        sys::kill(stat.pid, libc::SIGCONT);
    }
    hang_up(supervisor, false);
}

/// SIGHUP to processes under the supervisor: all, or those that ignore SIGTERM.
/// Interactive shells do.
pub(crate) fn hang_up(supervisor: i32, all: bool) {
    for stat in descendants(supervisor, 0).unwrap_or_default() {
        if all || procfs::ignores(stat.pid, libc::SIGTERM) {
            sys::kill(stat.pid, libc::SIGHUP);
            sys::kill(stat.pid, libc::SIGCONT);
        }
    }
}

/// Number of processes under the supervisor.
pub(crate) fn count(supervisor: i32) -> usize {
    descendants(supervisor, 0).map_or(0, |found| found.len())
}

/// The same, blocking, for a call that is dropped together with its runtime.
pub(crate) fn kill_tree_now(guest: &Guest, supervisor: i32, command: i32) {
    let mut killing = Killing::new(guest, supervisor, command, KILL_NOW_WITHIN);
    while let Some(pause) = killing.step() {
        std::thread::sleep(pause);
    }
}

struct Killing {
    /// 0 when it is gone.
    supervisor: i32,
    command: i32,
    deadline: Instant,
    /// Scans left until killing begins; none while killing.
    stop_rounds: Option<u32>,
    /// Processes of the last scan, if all of them were stopped.
    before: Option<BTreeSet<i32>>,
    /// Whether the supervisor stays, stopped.
    spares_supervisor: bool,
}

// === impl Killing ===

impl Killing {
    fn new(guest: &Guest, supervisor: i32, command: i32, within: Duration) -> Self {
        // While it is not reaped its process id cannot be reused, and signals reach no other process.
        let supervisor = if guest.supervisors.contains(supervisor) {
            supervisor
        } else {
            0
        };
        if supervisor != 0 {
            sys::kill(supervisor, libc::SIGSTOP);
        }
        let deadline = Instant::now() + within;
        Self {
            supervisor,
            command,
            deadline,
            stop_rounds: Some(STOP_ROUNDS_MAX),
            before: None,
            spares_supervisor: false,
        }
    }

    /// One scan and its signals. Returns the delay before the next, none when done.
    fn step(&mut self) -> Option<Duration> {
        let Some(found) = descendants(self.supervisor, self.command) else {
            // Without /proc there is only the process group.
            if self.command > 1 {
                sys::kill(-self.command, libc::SIGKILL);
            }
            return self.finish();
        };
        let late = Instant::now() > self.deadline;
        match self.stop_rounds {
            Some(left) if left > 0 && !late => Some(self.stop(&found, left)),
            Some(_) | None => self.kill(&found, late),
        }
    }

    fn stop(&mut self, found: &[Stat], left: u32) -> Duration {
        let pids: BTreeSet<i32> = found.iter().map(|stat| stat.pid).collect();
        for running in found.iter().filter(|stat| !stat.is_stopped()) {
            sys::kill(running.pid, libc::SIGSTOP);
        }
        // The supervisor may be about to start the command.
        let settled = self.supervisor == 0
            || Stat::read(self.supervisor).is_none_or(|stat| stat.is_stopped() || !stat.is_live());
        let all_stopped = settled && found.iter().all(Stat::is_stopped);
        let whole = all_stopped && self.before.as_ref() == Some(&pids);
        self.before = all_stopped.then_some(pids);
        self.stop_rounds = if whole { None } else { Some(left - 1) };
        if all_stopped { Duration::ZERO } else { PAUSE }
    }

    fn kill(&mut self, found: &[Stat], late: bool) -> Option<Duration> {
        self.stop_rounds = None;
        for stat in found {
            sys::kill(stat.pid, libc::SIGKILL);
        }
        if found.is_empty() || late {
            self.finish()
        } else {
            Some(PAUSE)
        }
    }

    /// No SIGCONT to the supervisor: it may have been stopped just before it starts the command.
    fn finish(&self) -> Option<Duration> {
        if self.supervisor != 0 && !self.spares_supervisor {
            sys::kill(self.supervisor, libc::SIGKILL);
        }
        None
    }
}

/// Live processes below the supervisor, or in the command's session or group and below those.
/// None when `/proc` cannot be read.
fn descendants(supervisor: i32, command: i32) -> Option<Vec<Stat>> {
    let all = procfs::scan().ok()?;
    let me = i32::try_from(std::process::id()).unwrap_or(1);
    let mut children: HashMap<i32, Vec<&Stat>> = HashMap::new();
    for stat in &all {
        children.entry(stat.ppid).or_default().push(stat);
    }
    let own = |stat: &&Stat| command > 1 && (stat.session == command || stat.pgrp == command);
    let mut queue: Vec<&Stat> = all.iter().filter(own).collect();
    if supervisor != 0 {
        queue.extend(children.get(&supervisor).into_iter().flatten());
    }
    let mut found = BTreeSet::new();
    let mut live = Vec::new();
    while let Some(stat) = queue.pop() {
        if stat.pid == me || stat.pid == supervisor || !found.insert(stat.pid) {
            continue;
        }
        queue.extend(children.get(&stat.pid).into_iter().flatten());
        if stat.is_live() {
            live.push(stat.clone());
        }
    }
    Some(live)
}
