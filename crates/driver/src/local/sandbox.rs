//! A sandbox of this machine, as the server holds it: the pidfd of its first process, its guest's
//! address, and the launcher for everything that needs root. A saved one has no process.

use super::Machine;
use super::cgroup::{self, LimitCounters};
use super::kind::Kind;
use super::launcher::request::{Answer, IdleSignal, Passed, Request};
use super::oom::{MemoryUse, Oom};
use super::sys;
use crate::guest::CloseError;
use crate::gvisor::Platform;
use crate::{DriverError, GuestAddress, Restored, Sandbox};
use async_trait::async_trait;
use k8e_egress::Sockets;
use k8e_model::{LimitEvents, Limits, ResourceUsage, SandboxId};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// One sandbox: its first process is PID 1 inside, or the sentry that runs it.
pub(crate) struct LocalSandbox {
    machine: Machine,
    kind: Kind,
    id: SandboxId,
    guest: GuestAddress,
    oom: Arc<Oom>,
    /// gVisor platform, for the trial of saving.
    platform: Platform,
    state: watch::Sender<State>,
    /// The gate's sockets that came with a new sandbox, until [`Sandbox::network`] takes them.
    gate: Mutex<Option<Sockets>>,
}

/// Whether there is a process.
#[derive(Clone)]
enum State {
    Running(Arc<Running>),
    /// It is being saved: the end of its process means nothing yet.
    Saving(Arc<Running>),
    Saved(LimitEvents),
}

/// What a running sandbox has.
struct Running {
    init: AsyncFd<OwnedFd>,
    counters: LimitCounters,
    /// Events from before it was saved.
    earlier: LimitEvents,
    memory: Option<Arc<MemoryUse>>,
    cpu_time: Option<File>,
    /// The OOM killer task, for sandboxes with a separate kernel.
    killer: Option<AbortHandle>,
}

// === impl LocalSandbox ===

impl LocalSandbox {
    /// Takes the descriptors of [`Answer::Sandbox`].
    pub(super) fn new(
        machine: Machine,
        kind: Kind,
        id: SandboxId,
        limits: Limits,
        passed: Passed,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, DriverError> {
        let sandbox = Self::saved(machine, kind, id, limits);
        sandbox.take(passed, fds)?;
        Ok(sandbox)
    }

    /// One without a process.
    pub(super) fn saved(machine: Machine, kind: Kind, id: SandboxId, limits: Limits) -> Self {
        Self {
            guest: GuestAddress::new(machine.guest_socket(kind, &id)),
            machine,
            kind,
            id,
            oom: Oom::new(limits),
            platform: Platform::default(),
            state: watch::Sender::new(State::Saved(LimitEvents::default())),
            gate: Mutex::default(),
        }
    }

    pub(super) fn set_platform(&mut self, platform: Platform) {
        self.platform = platform;
    }

    /// Takes the descriptors of a sandbox that has begun to run.
    fn take(&self, passed: Passed, fds: Vec<OwnedFd>) -> Result<(), DriverError> {
        let mut fds = fds.into_iter();
        let init = fds.next().ok_or(DriverError::LauncherGone)?;
        let mut file = |there: bool| there.then(|| fds.next().map(File::from)).flatten();
        let counters = LimitCounters {
            memory: file(passed.memory_events),
            pids: file(passed.pids_events),
        };
        let memory_use = file(passed.memory_use).zip(file(passed.memory_use));
        let memory = memory_use.map(|(total, stat)| Arc::new(MemoryUse { total, stat }));
        let cpu_time = file(passed.cpu_time);
        let gate = passed
            .gate
            .then(|| Sockets::from_descriptors(fds.collect()));
        let init = sys::watch(init).map_err(DriverError::step(
            "watch",
            format!("the first process of {}", self.id),
        ))?;
        let killed = memory.clone().filter(|_| self.kind.has_kernel());
        let killer = killed.map(|memory| {
            let (machine, guest) = (self.machine.clone(), self.guest.clone());
            let id = self.id.clone();
            self.oom.watch(machine, self.kind, id, guest, memory)
        });
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = gate.flatten();
        self.state.send_modify(|state| {
            let earlier = match state {
                State::Saved(events) => *events,
                State::Running(_) | State::Saving(_) => LimitEvents::default(),
            };
            *state = State::Running(Arc::new(Running {
                init,
                counters,
                earlier,
                memory,
                cpu_time,
                killer,
            }));
        });
        Ok(())
    }

    fn signal(&self, signal: IdleSignal) {
        if !self.kind.has_kernel() || self.is_saved() {
            return;
        }
        let (kind, id) = (self.kind, self.id.clone());
        let request = Request::Signal { kind, id, signal };
        if let Err(error) = self.machine.tell(&request) {
            tracing::warn!(sandbox = %self.id, "cannot send {signal:?}: {error}");
        }
    }

    fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Saves it, with a runsc of which that is not known to work.
    pub(super) async fn save_untried(&self) -> Result<(), DriverError> {
        let State::Running(running) = self.state() else {
            return Err(DriverError::Unusable("it does not run".to_owned()));
        };
        // The out-of-memory killer calls the guest too.
        self.oom.set_frozen(true);
        self.state.send_replace(State::Saving(Arc::clone(&running)));
        let saved = self.try_save().await;
        if let Err(error) = saved {
            let id = self.id.clone();
            let runs_on = self.machine.ask(Request::RunOn { id }).await;
            self.guest.drop_spare();
            self.oom.set_frozen(false);
            self.state.send_replace(State::Running(running));
            if let Err(error) = runs_on {
                tracing::warn!(sandbox = %self.id, %error, "a sandbox that was not saved does not run on");
            }
            return Err(error);
        }
        if let Some(killer) = &running.killer {
            killer.abort();
        }
        self.gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let mut events = running.counters.read();
        events.oom_kills = events.oom_kills.saturating_add(running.earlier.oom_kills);
        events.pids_refused = events
            .pids_refused
            .saturating_add(running.earlier.pids_refused);
        self.state.send_replace(State::Saved(events));
        Ok(())
    }

    /// Has its state written to disk under an id of its own, and goes on.
    async fn copy_running(&self, state: &SandboxId) -> Result<Duration, DriverError> {
        let closed = self.guest.close_listener().await;
        closed.map_err(|error| match error {
            CloseError::Refused(why) => DriverError::InUse(why),
            CloseError::Wire(error) => DriverError::Unusable(error.to_string()),
        })?;
        let (id, state) = (self.id.clone(), state.clone());
        match self.machine.ask(Request::CopyState { id, state }).await? {
            (Answer::Copied(micros), _) => Ok(Duration::from_micros(micros)),
            _ => Err(DriverError::LauncherGone),
        }
    }

    /// Writes it to disk; its guest has closed its socket when this returns, whether it succeeds or not.
    async fn try_save(&self) -> Result<(), DriverError> {
        let closed = self.guest.close_listener().await;
        closed.map_err(|error| DriverError::Unusable(error.to_string()))?;
        let id = self.id.clone();
        self.machine.ask(Request::Save { id }).await.map(drop)
    }
}

#[async_trait]
impl Sandbox for LocalSandbox {
    fn guest(&self) -> &GuestAddress {
        &self.guest
    }

    async fn network(&self) -> Result<Option<Sockets>, DriverError> {
        if !self.machine.has_network() {
            return Ok(None);
        }
        let came_along = {
            let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            gate.take()
        };
        if came_along.is_some() {
            return Ok(came_along);
        }
        let (kind, id) = (self.kind, self.id.clone());
        let (_, fds) = self.machine.ask(Request::OpenGate { kind, id }).await?;
        Sockets::from_descriptors(fds)
            .map(Some)
            .ok_or(DriverError::LauncherGone)
    }

    fn limit_events(&self) -> LimitEvents {
        let (mut events, earlier) = match self.state() {
            State::Running(running) | State::Saving(running) => {
                (running.counters.read(), running.earlier)
            }
            State::Saved(earlier) => (LimitEvents::default(), earlier),
        };
        events.oom_kills = events
            .oom_kills
            .saturating_add(earlier.oom_kills)
            .saturating_add(self.oom.kills());
        events.pids_refused = events.pids_refused.saturating_add(earlier.pids_refused);
        events
    }

    fn usage(&self) -> Option<ResourceUsage> {
        let (State::Running(running) | State::Saving(running)) = self.state() else {
            return None;
        };
        let (memory_bytes, cache_bytes) = running.memory.as_ref()?.measure(self.kind.has_kernel());
        Some(ResourceUsage {
            cpu_time: running.cpu_time.as_ref().and_then(cgroup::cpu_time),
            memory_bytes,
            cache_bytes,
        })
    }

    fn set_limits(&self, limits: &Limits) -> Result<(), DriverError> {
        let request = Request::SetLimits {
            kind: self.kind,
            id: self.id.clone(),
            limits: *limits,
        };
        self.machine.ask_now(&request)?;
        self.oom.set_limits(limits);
        Ok(())
    }

    /// gVisor's sentry wakes up about a thousand times a second to watch its programs.
    fn costs_idle(&self) -> bool {
        self.kind.has_kernel()
    }

    fn idle_stop(&self) {
        self.oom.set_idle(true);
        self.signal(IdleSignal::Stop);
    }

    fn wake(&self) {
        self.signal(IdleSignal::Continue);
        self.oom.set_idle(false);
    }

    async fn freeze(&self) -> Result<(), DriverError> {
        let (kind, id) = (self.kind, self.id.clone());
        self.oom.set_frozen(true);
        let frozen = self.machine.ask(Request::Freeze { kind, id }).await;
        if frozen.is_err() {
            self.oom.set_frozen(false);
        }
        frozen.map(drop)
    }

    async fn thaw(&self) -> Result<(), DriverError> {
        let (kind, id) = (self.kind, self.id.clone());
        self.machine.ask(Request::Thaw { kind, id }).await?;
        self.oom.set_frozen(false);
        Ok(())
    }

    async fn save(&self) -> Result<(), DriverError> {
        if !self.kind.has_kernel() {
            return Err(DriverError::Unusable(
                "its runtime keeps the memory of a paused session: gVisor can write it to disk"
                    .to_owned(),
            ));
        }
        self.machine.check_can_save(self.platform).await?;
        self.save_untried().await
    }

    fn can_copy_state(&self) -> bool {
        self.kind.has_kernel()
    }

    async fn copy_state(&self, state: &SandboxId) -> Result<Duration, DriverError> {
        if !self.kind.has_kernel() {
            return Err(DriverError::Unusable(
                "only gVisor can copy the memory of a running session".to_owned(),
            ));
        }
        self.machine.check_can_save(self.platform).await?;
        // The out-of-memory killer calls the guest too.
        self.oom.set_frozen(true);
        let copied = self.copy_running(state).await;
        if copied.is_err() {
            let id = self.id.clone();
            if let Err(error) = self.machine.ask(Request::RunOn { id }).await {
                tracing::warn!(sandbox = %self.id, %error, "a sandbox that was not copied does not run on");
            }
        }
        self.guest.drop_spare();
        self.oom.set_frozen(false);
        copied
    }

    fn is_saved(&self) -> bool {
        matches!(*self.state.borrow(), State::Saved(_))
    }

    async fn restore(&self) -> Result<Restored, DriverError> {
        let request = Request::Restore {
            id: self.id.clone(),
            limits: self.oom.limits(),
        };
        let (Answer::Restored(passed, lost), fds) = self.machine.ask(request).await? else {
            return Err(DriverError::LauncherGone);
        };
        self.take(passed, fds)?;
        self.oom.set_frozen(false);
        Ok(Restored::of(lost))
    }

    async fn forget_state(&self) -> Result<(), DriverError> {
        let id = self.id.clone();
        self.machine
            .ask(Request::ForgetState { id })
            .await
            .map(drop)
    }

    async fn died(&self) {
        let mut states = self.state.subscribe();
        loop {
            let state = states.borrow_and_update().clone();
            if let State::Running(running) = &state {
                // The first poll must not have to wait for tokio's reactor.
                if running.is_over() {
                    return;
                }
                tokio::select! {
                    _ = running.init.readable() => {}
                    _ = states.changed() => continue,
                }
                // It may be on its way to be saved.
                if !states.has_changed().unwrap_or(false) {
                    return;
                }
            } else if states.changed().await.is_err() {
                return;
            }
        }
    }

    async fn destroy(&self) -> Result<(), DriverError> {
        let (kind, id) = (self.kind, self.id.clone());
        match self.machine.ask(Request::Remove { kind, id }).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(DriverError::LauncherGone),
        }
    }
}

// === impl Running ===

impl Running {
    /// Polls the pidfd, which takes a microsecond.
    fn is_over(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(self.init.get_ref(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(killer) = &self.killer {
            killer.abort();
        }
    }
}
