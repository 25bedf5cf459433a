//! Stops every process but the guest and its supervisors, and continues those that it stopped.
//!
//! By signals, because the freezer of the cgroup would stop the guest too. A process that was stopped before stays so.
//! Children are continued before their parents, so that a shell does not see its job as stopped.

use crate::error::Error;
use crate::procfs::{self, Stat};
use crate::{Guest, sys};
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Scans until it is given up: each finds the children of processes that were about to fork in the one before.
const ROUNDS_MAX: u32 = 200;

/// From this scan on, a process that waits in the kernel counts as stopped: a parent in vfork waits for its child, which
/// is stopped.
const ROUNDS_PATIENT: u32 = 20;

/// For signals to be delivered.
const PAUSE: Duration = Duration::from_millis(1);

/// Processes that are stopped until this is dropped.
pub(super) struct Stopped {
    /// With the depth below the guest, to continue the deepest first.
    pids: Vec<(usize, i32)>,
    since: Instant,
}

// === impl Stopped ===

impl Stopped {
    pub(super) async fn stop(guest: &Guest) -> Result<Self, Error> {
        let mut stopped = Self {
            pids: Vec::new(),
            since: Instant::now(),
        };
        let mut ours = BTreeSet::new();
        let mut before: Option<BTreeSet<i32>> = None;
        for round in 0..ROUNDS_MAX {
            let all = others(guest)?;
            let mut settled = true;
            for stat in &all {
                let waits = stat.state == b'D' && round >= ROUNDS_PATIENT;
                if !stat.is_stopped() && (!waits || !ours.contains(&stat.pid)) {
                    settled = false;
                    if ours.insert(stat.pid) {
                        stopped.pids.push((depth(stat.pid, &all), stat.pid));
                    }
                    sys::kill(stat.pid, libc::SIGSTOP);
                }
            }
            let pids: BTreeSet<i32> = all.iter().map(|stat| stat.pid).collect();
            if settled && before.as_ref() == Some(&pids) {
                return Ok(stopped);
            }
            before = settled.then_some(pids);
            if !settled {
                tokio::time::sleep(PAUSE).await;
            }
        }
        Err(Error::Precondition(
            "the processes of the sandbox could not be stopped: they start others all the time"
                .to_owned(),
        ))
    }

    /// Whether nothing runs still: a command may have been about to start when it was stopped.
    pub(super) fn still(&self, guest: &Guest) -> Result<bool, Error> {
        let runs = |stat: &Stat| !stat.is_stopped() && stat.state != b'D';
        Ok(!others(guest)?.iter().any(runs))
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.pids.sort_unstable_by(|a, b| b.cmp(a));
        for (_, pid) in &self.pids {
            sys::kill(*pid, libc::SIGCONT);
        }
    }
}

/// Live processes that are neither the guest nor its supervisors, which share its memory and write no files.
fn others(guest: &Guest) -> Result<Vec<Stat>, Error> {
    let me = i32::try_from(std::process::id()).unwrap_or(1);
    let mut all = procfs::scan().map_err(Error::os("read", b"/proc"))?;
    all.retain(|stat| {
        stat.is_live()
            && stat.pid != me
            && !guest.supervisors.contains(stat.pid)
            && guest.spare.pid() != Some(stat.pid)
    });
    Ok(all)
}

fn depth(pid: i32, all: &[Stat]) -> usize {
    let parents: HashMap<i32, i32> = all.iter().map(|stat| (stat.pid, stat.ppid)).collect();
    let mut depth = 0;
    let mut at = pid;
    while let Some(parent) = parents.get(&at).filter(|_| depth <= parents.len()) {
        depth += 1;
        at = *parent;
    }
    depth
}
