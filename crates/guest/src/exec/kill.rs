//! Kills everything a command started.
//!
//! Whatever the command forked is a descendant of its supervisor, which is stopped first so that it
//! stays there as their parent. Then every descendant is stopped, again and again, until two looks
//! in a row show the same processes, all stopped: from then on none can fork, and the set is whole.
//! Then all are killed. Killing without stopping first would race with forks and with orphans that
//! change parents.

use crate::Guest;
use crate::procfs::{self, Stat};
use crate::sys;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// How long killing may take. A process that the kernel does not let go within that is stuck in a
/// device or a file system.
const KILL_WITHIN: Duration = Duration::from_secs(5);

/// Looks until stopping is given up and killing begins anyway: a parent inside vfork never shows as
/// stopped, and another command could wake what we stop.
const STOP_ROUNDS_MAX: u32 = 50;

/// How long killing may take when the guest itself is going away and nothing else can run.
const KILL_NOW_WITHIN: Duration = Duration::from_secs(1);

/// Pause for signals to arrive.
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

/// Asks every process under the supervisor to end.
pub(crate) fn ask(supervisor: i32) {
    for stat in descendants(supervisor, 0).unwrap_or_default() {
        sys::kill(stat.pid, libc::SIGTERM);
        // One that is stopped cannot do as it is told.
        sys::kill(stat.pid, libc::SIGCONT);
    }
    hang_up(supervisor, false);
}

/// Tells processes under the supervisor that their terminal is gone: all, or those that do not care
/// for being asked. Shells at a prompt are such.
pub(crate) fn hang_up(supervisor: i32, all: bool) {
    for stat in descendants(supervisor, 0).unwrap_or_default() {
        if all || procfs::ignores(stat.pid, libc::SIGTERM) {
            sys::kill(stat.pid, libc::SIGHUP);
            sys::kill(stat.pid, libc::SIGCONT);
        }
    }
}

/// How many processes are under the supervisor.
pub(crate) fn count(supervisor: i32) -> usize {
    descendants(supervisor, 0).map_or(0, |found| found.len())
}

/// The same at once, for a call that is dropped with the runtime around it.
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
    /// Looks left until killing begins; none while killing.
    stop_rounds: Option<u32>,
    /// What the last look showed, if all of it was stopped.
    before: Option<BTreeSet<i32>>,
    /// Whether the supervisor is to stay, stopped.
    spares_supervisor: bool,
}

// === impl Killing ===

impl Killing {
    fn new(guest: &Guest, supervisor: i32, command: i32, within: Duration) -> Self {
        // While it is not reaped its process id is its own, and signals to it reach nobody else.
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

    /// One look and what follows from it. Returns the pause before the next, none when done.
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

    /// The supervisor is not continued: it may have been stopped just before it starts the command.
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
