//! Out-of-memory (OOM) killer for sandboxes with a separate kernel.
//!
//! The host's OOM killer sees gVisor's kernel (the sentry) and no process of the sandbox: what it kills
//! is the sandbox. gVisor itself has no memory limit. So the control group's hard limit lies a
//! [reserve](super::kind::oom_reserve_bytes) above what programs may use, and a task beside each such
//! sandbox has the guest kill the largest processes when they use more.
//!
//! # How the limit is noticed
//! The task polls the group's memory usage. The interval is the time in which programs, filling memory at full
//! speed, could reach the limit: twice a second far from it, 30 times a second at it, never while
//! the sandbox is in idle stop or frozen. Kernel events would not do. On v1, at the hard limit system calls of
//! the sentry fail with ENOMEM and it dies, also with the kernel's OOM killer disabled
//! (`memory.oom_control`); usage thresholds and v2's `memory.high` count page cache, which is no reason to
//! kill a process.
//!
//! # What counts
//! All memory of programs, their tmpfs and shared memory included, is in one memory file of the sentry: `shmem`
//! of the group. Page cache and the sentry's own memory are not the programs'.
//!
//! The guest is not trusted: a sandbox that is over its limit for [`FREED_WITHIN`] is killed.

use super::Machine;
use super::kind::{Kind, oom_reserve_bytes};
use super::launcher::request::Request;
use crate::GuestAddress;
use k8e_model::{Limits, SandboxId, size_text};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// Memory that one CPU can fill per second in gVisor: every page is a fault in the sentry. Measured: 1 GiB.
const FILL_BYTES_PER_SECOND: u64 = 2 << 30;

/// Divisor: this part of the reserve may be used up between two polls; the rest is for the guest's reaction.
const UNSEEN_PART: u64 = 4;

/// Poll interval. The maximum only bounds how long a wrong estimate of the rate goes unnoticed.
const LOOK_AFTER_MIN: Duration = Duration::from_millis(5);
const LOOK_AFTER_MAX: Duration = Duration::from_millis(500);

/// The sentry's own memory (its heap and those of its stubs: 15 MiB idle). What is above is charged to the
/// programs, which caused it.
const SENTRY_BYTES: u64 = 64 * 1024 * 1024;

/// Divisor: this part of the limit is freed in addition, so that the next allocation does not kill again.
const FREED_MORE_PART: u64 = 32;

/// No other process is killed while the memory of the last ones is being freed: until usage has not fallen for
/// this long. The sentry frees pages in the background, on a busy machine for more than a second.
const SETTLE_WITHIN: Duration = Duration::from_millis(300);
const SETTLE_PAUSE: Duration = Duration::from_millis(2);

/// Usage rises by this much when killed processes were still running, or the sentry allocates for itself. More
/// is another process that fills memory.
const RISE_BYTES: u64 = 64 * 1024 * 1024;

/// Delay between attempts that freed nothing.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Longest time over the limit. The guest answers in milliseconds; on a machine under load it
/// may take seconds.
const FREED_WITHIN: Duration = Duration::from_secs(10);

/// Bytes read of `memory.stat`; the fields that are used are in its first lines.
const STAT_BYTES_MAX: usize = 4096;

/// Files of the control group with its memory usage.
#[derive(Debug)]
pub(super) struct MemoryUse {
    /// v1 `memory.usage_in_bytes`, v2 `memory.current`: all, page cache included. Cheap to read.
    pub(super) total: File,
    /// `memory.stat`.
    pub(super) stat: File,
}

/// State shared with a sandbox's OOM killer task, and its kill counter.
#[derive(Debug)]
pub(super) struct Oom {
    state: watch::Sender<State>,
    kills: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct State {
    limits: Limits,
    /// In idle stop, or frozen: no process in it runs.
    idle: bool,
    frozen: bool,
}

struct Killer {
    machine: Machine,
    kind: Kind,
    id: SandboxId,
    guest: GuestAddress,
    memory: Arc<MemoryUse>,
    oom: Arc<Oom>,
}

/// Counts a kill before it has happened, so that the result of a run that ends by it includes it.
/// Undone unless it is [kept](Counted::keep).
struct Counted<'a>(&'a AtomicU64);

// === impl Oom ===

impl Oom {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        let state = State {
            limits,
            idle: false,
            frozen: false,
        };
        Arc::new(Self {
            state: watch::Sender::new(state),
            kills: AtomicU64::new(0),
        })
    }

    /// OOM kills so far.
    pub(super) fn kills(&self) -> u64 {
        self.kills.load(Ordering::Acquire)
    }

    pub(super) fn set_limits(&self, limits: &Limits) {
        self.state.send_modify(|state| state.limits = *limits);
    }

    pub(super) fn limits(&self) -> Limits {
        self.state.borrow().limits
    }

    pub(super) fn set_idle(&self, idle: bool) {
        self.state.send_modify(|state| state.idle = idle);
    }

    pub(super) fn set_frozen(&self, frozen: bool) {
        self.state.send_modify(|state| state.frozen = frozen);
    }

    /// Starts the task; it ends when it is aborted.
    pub(super) fn watch(
        self: &Arc<Self>,
        machine: Machine,
        kind: Kind,
        id: SandboxId,
        guest: GuestAddress,
        memory: Arc<MemoryUse>,
    ) -> tokio::task::AbortHandle {
        let killer = Killer {
            machine,
            kind,
            id,
            guest,
            memory,
            oom: Arc::clone(self),
        };
        tokio::spawn(killer.run()).abort_handle()
    }
}

// === impl State ===

impl State {
    fn runs(&self) -> bool {
        !self.idle && !self.frozen
    }
}

// === impl Killer ===

impl Killer {
    async fn run(self) {
        let mut states = self.oom.state.subscribe();
        loop {
            // The sender is in self: it cannot be gone.
            let Ok(state) = states.wait_for(State::runs).await.map(|state| *state) else {
                return;
            };
            tokio::select! {
                () = self.look(&state.limits) => {}
                // New limits, or stopped meanwhile: the guest had no time in which to free memory.
                _ = states.changed() => {}
            }
        }
    }

    /// One poll: reads the usage, frees memory if necessary, and waits for the interval.
    async fn look(&self, limits: &Limits) {
        let used = self.memory.used_at_most(limits.memory_bytes);
        if used <= limits.memory_bytes {
            return sleep(look_after(used, limits)).await;
        }
        let deadline = Instant::now() + FREED_WITHIN;
        // Memory of killed processes that is not freed yet.
        let mut pending = 0;
        while self.memory.used() > limits.memory_bytes {
            if Instant::now() > deadline {
                self.give_up(limits).await;
                return;
            }
            match self.kill_largest(limits, pending, deadline).await {
                Some(left) => pending = left,
                None => sleep(RETRY_PAUSE).await,
            }
        }
    }

    /// Has the guest kill the largest processes, and waits until their memory is freed. Returns how much of it, and
    /// of what was `pending` before, is still to be freed; none when no process was killed.
    async fn kill_largest(&self, limits: &Limits, pending: u64, deadline: Instant) -> Option<u64> {
        let before = self.memory.used();
        let over = before.saturating_sub(limits.memory_bytes);
        let bytes = bytes_to_kill(over, pending, limits);
        let counted = Counted::new(&self.oom.kills);
        let left = deadline.saturating_duration_since(Instant::now());
        let killed = match timeout(left, self.guest.kill_largest(bytes)).await {
            Ok(Ok(killed)) if killed.processes > 0 => killed,
            Ok(Ok(_)) => return None,
            Ok(Err(error)) => {
                tracing::debug!(sandbox = %self.id, "cannot have its guest free memory: {error}");
                return None;
            }
            Err(_) => return None,
        };
        counted.keep(killed.processes);
        tracing::info!(
            sandbox = %self.id,
            processes = killed.processes,
            "over its memory limit of {} by {over} bytes: its guest killed the largest processes",
            size_text(limits.memory_bytes),
        );
        let rises = self.settle(before, limits, deadline).await;
        Some(if rises {
            pending.saturating_add(killed.rss_bytes)
        } else {
            0
        })
    }

    /// Waits until killed processes' memory is freed: usage is below the limit, or no longer falls. True when it
    /// rises instead: others fill it faster than it is freed, and there is no time to wait.
    async fn settle(&self, before: u64, limits: &Limits, deadline: Instant) -> bool {
        let mut lowest = before;
        let mut settled = Instant::now() + SETTLE_WITHIN;
        while Instant::now() < settled.min(deadline) {
            let used = self.memory.used();
            if used <= limits.memory_bytes {
                return false;
            }
            if used > before.saturating_add(RISE_BYTES) {
                return true;
            }
            if used < lowest {
                lowest = used;
                settled = Instant::now() + SETTLE_WITHIN;
            }
            sleep(SETTLE_PAUSE).await;
        }
        false
    }

    /// Kills the sandbox, as the host's OOM killer would have done.
    async fn give_up(&self, limits: &Limits) {
        tracing::warn!(
            sandbox = %self.id,
            "over its memory limit of {} for {FREED_WITHIN:?} and its guest frees none: the sandbox is killed",
            size_text(limits.memory_bytes),
        );
        let counted = Counted::new(&self.oom.kills);
        let (kind, id) = (self.kind, self.id.clone());
        match self.machine.ask(Request::Kill { kind, id }).await {
            Ok(_) => {
                counted.keep(1);
                std::future::pending().await
            }
            Err(error) => {
                tracing::warn!(sandbox = %self.id, "cannot kill it: {error}");
                sleep(FREED_WITHIN).await;
            }
        }
    }
}

// === impl MemoryUse ===

impl MemoryUse {
    /// Memory used by programs; or the total usage, if that is no more than `enough`.
    fn used_at_most(&self, enough: u64) -> u64 {
        let mut text = [0; 32];
        let total = text_of(&self.total, &mut text).trim().parse().ok();
        match total {
            Some(total) if total <= enough => total,
            _ => self.used(),
        }
    }

    /// Memory used by programs, and page cache. `has_kernel`: the group has a separate kernel too.
    pub(super) fn measure(&self, has_kernel: bool) -> (u64, u64) {
        let mut text = [0; STAT_BYTES_MAX];
        let stat = text_of(&self.stat, &mut text);
        let value = |wanted: &str| stat_value(stat, wanted);
        // v1 calls it `cache`, v2 `file`. Both contain shared memory, which cannot be reclaimed.
        let cache = value("file").or_else(|| value("cache")).unwrap_or(0);
        let cache = cache.saturating_sub(value("shmem").unwrap_or(0));
        if has_kernel {
            return (programs_bytes(stat), cache);
        }
        let mut text = [0; 32];
        let total: u64 = text_of(&self.total, &mut text).trim().parse().unwrap_or(0);
        (total.saturating_sub(cache), cache)
    }

    /// Memory used by programs. 0 when the group is gone.
    fn used(&self) -> u64 {
        let mut text = [0; STAT_BYTES_MAX];
        programs_bytes(text_of(&self.stat, &mut text))
    }
}

/// The value of a line of `memory.stat`.
fn stat_value(stat: &str, wanted: &str) -> Option<u64> {
    let mut lines = stat.lines();
    let value = lines.find_map(|line| line.strip_prefix(wanted)?.strip_prefix(' '))?;
    value.parse::<u64>().ok()
}

fn text_of<'a>(file: &File, buffer: &'a mut [u8]) -> &'a str {
    let read = file.read_at(buffer, 0).unwrap_or(0);
    let text = &buffer[..read];
    std::str::from_utf8(text).unwrap_or_default()
}

/// Memory used by programs, from `memory.stat`: v1 calls anonymous memory `rss`, v2 `anon`.
fn programs_bytes(stat: &str) -> u64 {
    let value = |wanted: &str| stat_value(stat, wanted);
    let sentry = value("anon").or_else(|| value("rss")).unwrap_or(0);
    let programs = value("shmem").unwrap_or(0);
    programs.saturating_add(sentry.saturating_sub(SENTRY_BYTES))
}

/// Resident bytes of the processes that the guest is to kill; it kills at least one. Without `pending`, memory that
/// killed processes have not given back yet would cost small processes beside them their lives.
fn bytes_to_kill(over: u64, pending: u64, limits: &Limits) -> u64 {
    over.saturating_add(limits.memory_bytes / FREED_MORE_PART)
        .saturating_sub(pending)
}

/// Interval until the next poll.
fn look_after(used: u64, limits: &Limits) -> Duration {
    let headroom = limits.memory_bytes.saturating_sub(used);
    let unseen = oom_reserve_bytes(limits) / UNSEEN_PART;
    let rate = FILL_BYTES_PER_SECOND * u64::from(limits.cpu_millis.max(1000)) / 1000;
    let micros = headroom.saturating_add(unseen).saturating_mul(1_000_000) / rate.max(1);
    Duration::from_micros(micros).clamp(LOOK_AFTER_MIN, LOOK_AFTER_MAX)
}

// === impl Counted ===

impl<'a> Counted<'a> {
    fn new(kills: &'a AtomicU64) -> Self {
        kills.fetch_add(1, Ordering::AcqRel);
        Self(kills)
    }

    /// Sets the number of processes that were killed.
    fn keep(self, processes: u32) {
        self.0.fetch_add(processes.into(), Ordering::AcqRel);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    const MIB: u64 = 1024 * 1024;

    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn memory_of_programs_excludes_page_cache_and_the_sentry() {
        let v1 =
            "cache 90000000\nrss 14774272\nrss_huge 0\nshmem 3000\nmapped_file 1\ntotal_shmem 7\n";
        assert_eq!(programs_bytes(v1), 3000);
        let bloated = format!("cache 1\nrss {}\nshmem 1000\n", SENTRY_BYTES + 5);
        assert_eq!(programs_bytes(&bloated), 1005);
        let v2 = format!("anon {}\nfile 9\nkernel 8\nshmem 50\n", SENTRY_BYTES + 1);
        assert_eq!(programs_bytes(&v2), 51);
        assert_eq!(programs_bytes(""), 0);
        // A small total is enough; otherwise `memory.stat` is read.
        let memory = MemoryUse {
            total: file("5000\n"),
            stat: file(v1),
        };
        assert_eq!(memory.used_at_most(6000), 5000);
        assert_eq!(memory.used_at_most(4000), 3000);
        assert_eq!(memory.measure(true), (3000, 89_997_000));
        let native = MemoryUse {
            total: file("20000\n"),
            stat: file("cache 9000\nrss 7000\nshmem 4000\n"),
        };
        assert_eq!(native.measure(false), (15_000, 5000));
    }

    #[test]
    fn programs_cannot_fill_the_reserve_between_two_polls() {
        for (memory, cpu_millis) in [
            (16, 10),
            (64, 1000),
            (512, 1000),
            (512, 4000),
            (64 << 10, 64_000),
        ] {
            let limits = Limits {
                memory_bytes: memory * MIB,
                cpu_millis,
                ..Limits::default()
            };
            for used in [0, limits.memory_bytes / 2, limits.memory_bytes] {
                let after = look_after(used, &limits);
                let rate = FILL_BYTES_PER_SECOND * u64::from(cpu_millis.div_ceil(1000));
                let filled = u64::try_from(after.as_micros()).unwrap() * (rate / 1000) / 1000;
                let most = limits.memory_bytes + oom_reserve_bytes(&limits);
                assert!(used + filled < most, "{limits:?} {used}: {after:?}");
            }
        }
        // Far from the limit it polls seldom.
        assert_eq!(
            look_after(
                0,
                &Limits {
                    memory_bytes: 8 << 30,
                    ..Limits::default()
                }
            ),
            LOOK_AFTER_MAX
        );
    }

    #[test]
    fn memory_that_is_about_to_be_freed_kills_nothing_more() {
        let limits = Limits {
            memory_bytes: 128 * MIB,
            ..Limits::default()
        };
        assert_eq!(bytes_to_kill(100 * MIB, 0, &limits), 104 * MIB);
        assert_eq!(bytes_to_kill(170 * MIB, 104 * MIB, &limits), 70 * MIB);
        assert_eq!(bytes_to_kill(170 * MIB, 300 * MIB, &limits), 0);
    }

    #[test]
    fn a_kill_counts_from_before_it_happens_and_one_that_did_not_counts_no_more() {
        let oom = Oom::new(Limits::default());
        let counted = Counted::new(&oom.kills);
        assert_eq!(oom.kills(), 1);
        drop(counted);
        assert_eq!(oom.kills(), 0);
        Counted::new(&oom.kills).keep(3);
        assert_eq!(oom.kills(), 3);
    }
}
