//! A live sandbox of this machine, as the server holds it: the pidfd of its first process, its guest's
//! address, and the launcher for everything that needs root.

use super::Machine;
use super::cgroup::LimitCounters;
use super::kind::Kind;
use super::launcher::request::{Answer, IdleSignal, Request};
use super::sys;
use crate::{DriverError, GuestAddress, Sandbox};
use async_trait::async_trait;
use k8e_egress::Sockets;
use k8e_model::{LimitEvents, Limits, SandboxId};
use std::fs::File;
use std::os::fd::OwnedFd;
use tokio::io::unix::AsyncFd;

/// One sandbox: its first process is PID 1 inside, or the separate kernel that has one.
pub(crate) struct LocalSandbox {
    machine: Machine,
    kind: Kind,
    id: SandboxId,
    guest: GuestAddress,
    counters: LimitCounters,
    init: AsyncFd<OwnedFd>,
}

// === impl LocalSandbox ===

impl LocalSandbox {
    /// From the descriptors of [`Answer::Sandbox`].
    pub(super) fn new(
        machine: Machine,
        kind: Kind,
        id: SandboxId,
        memory_events: bool,
        pids_events: bool,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, DriverError> {
        let mut fds = fds.into_iter();
        let init = fds.next().ok_or(DriverError::LauncherGone)?;
        let mut file = |there: bool| there.then(|| fds.next().map(File::from)).flatten();
        let counters = LimitCounters {
            memory: file(memory_events),
            pids: file(pids_events),
        };
        let init = sys::watch(init).map_err(DriverError::step(
            "watch",
            format!("the first process of {id}"),
        ))?;
        let guest = GuestAddress::new(machine.guest_socket(kind, &id));
        Ok(Self {
            machine,
            kind,
            id,
            guest,
            counters,
            init,
        })
    }

    fn signal(&self, signal: IdleSignal) {
        if !self.kind.has_kernel() {
            return;
        }
        let (kind, id) = (self.kind, self.id.clone());
        let request = Request::Signal { kind, id, signal };
        if let Err(error) = self.machine.tell(&request) {
            tracing::warn!(sandbox = %self.id, "cannot send {signal:?}: {error}");
        }
    }

    /// Asks the kernel itself, in a microsecond.
    fn is_over(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(self.init.get_ref(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
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
        let (kind, id) = (self.kind, self.id.clone());
        let (_, fds) = self.machine.ask(Request::OpenGate { kind, id }).await?;
        Sockets::from_descriptors(fds)
            .map(Some)
            .ok_or(DriverError::LauncherGone)
    }

    fn limit_events(&self) -> LimitEvents {
        self.counters.read()
    }

    fn set_limits(&self, limits: &Limits) -> Result<(), DriverError> {
        let request = Request::SetLimits {
            kind: self.kind,
            id: self.id.clone(),
            limits: *limits,
        };
        self.machine.ask_now(&request).map(drop)
    }

    /// gVisor's kernel wakes up about a thousand times a second to see how its programs fare.
    fn costs_idle(&self) -> bool {
        self.kind.has_kernel()
    }

    fn pause(&self) {
        self.signal(IdleSignal::Stop);
    }

    fn resume(&self) {
        self.signal(IdleSignal::Continue);
    }

    async fn freeze(&self) -> Result<(), DriverError> {
        let (kind, id) = (self.kind, self.id.clone());
        self.machine
            .ask(Request::Freeze { kind, id })
            .await
            .map(drop)
    }

    async fn thaw(&self) -> Result<(), DriverError> {
        let (kind, id) = (self.kind, self.id.clone());
        self.machine.ask(Request::Thaw { kind, id }).await.map(drop)
    }

    async fn died(&self) {
        // Whoever asks for the first time must not have to wait for the reactor to look.
        if !self.is_over() {
            let _ = self.init.readable().await;
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
