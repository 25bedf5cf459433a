//! A live sandbox of this machine, held by its first process.

use super::blocking;
use super::cgroup::Cgroup;
use super::sandboxes::Sandboxes;
use super::shm;
use super::sys;
use crate::{DriverError, GuestAddress, Sandbox};
use async_trait::async_trait;
use k8e_model::{LimitEvents, Limits, SandboxId};
use rustix::process::Signal;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;

/// A killed process is gone in milliseconds unless the kernel itself is stuck.
const DEATH_WAIT: Duration = Duration::from_secs(30);

/// One sandbox: its first process (PID 1 inside, or the kernel of its own that has one) and what belongs to it.
pub(crate) struct LocalSandbox {
    sandboxes: Arc<Sandboxes>,
    id: SandboxId,
    uid_base: u32,
    guest: GuestAddress,
    cgroup: Cgroup,
    init: AsyncFd<OwnedFd>,
}

// === impl LocalSandbox ===

impl LocalSandbox {
    /// Takes over a process that already became the guest.
    pub(crate) fn new(
        sandboxes: Arc<Sandboxes>,
        id: SandboxId,
        uid_base: u32,
        init: OwnedFd,
    ) -> Result<Self, DriverError> {
        let init = sys::watch(init).map_err(DriverError::step(
            "watch",
            format!("the first process of {id}"),
        ))?;
        let guest = GuestAddress::new(sandboxes.socket(&id));
        let cgroup = sandboxes.cgroups.group(&id);
        Ok(Self {
            sandboxes,
            id,
            uid_base,
            guest,
            cgroup,
            init,
        })
    }

    /// Of its first process, as long as that lives.
    fn pid(&self) -> io::Result<i32> {
        let path = format!("/proc/self/fdinfo/{}", self.init.get_ref().as_raw_fd());
        let info = std::fs::read_to_string(path)?;
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"));
        let pid = pid.and_then(|pid| pid.trim().parse().ok());
        pid.filter(|pid| *pid > 0)
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// To a kernel of its own. A sandbox without one is not paused: its processes are the host's.
    fn signal(&self, signal: Signal) {
        if self.sandboxes.has_kernel() {
            // Whoever is dead needs no signal.
            let _ = rustix::process::pidfd_send_signal(self.init.get_ref(), signal);
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

    fn network(&self) -> Result<Option<OwnedFd>, DriverError> {
        if !self.sandboxes.machine.has_network() {
            return Ok(None);
        }
        let open = || -> io::Result<OwnedFd> {
            let namespace = std::fs::File::open(format!("/proc/{}/ns/net", self.pid()?))?;
            match self.is_over() {
                // The pid may have been somebody else's by then.
                true => Err(io::ErrorKind::NotFound.into()),
                false => Ok(namespace.into()),
            }
        };
        let step = DriverError::step("open", format!("the network of {}", self.id));
        open().map(Some).map_err(step)
    }

    fn limit_events(&self) -> LimitEvents {
        self.cgroup.limit_events()
    }

    fn set_limits(&self, limits: &Limits) -> Result<(), DriverError> {
        self.cgroup.set_limits(&self.sandboxes.around(limits))?;
        if self.sandboxes.has_kernel() {
            // Its kernel counts shared memory as memory; the size is only what `df` says.
            return Ok(());
        }
        let resized = self.pid().and_then(|pid| shm::resize(pid, limits));
        resized.map_err(DriverError::step(
            "resize",
            format!("the shared memory of {}", self.id),
        ))
    }

    /// gVisor's kernel wakes up about a thousand times a second to see how its programs fare.
    fn costs_idle(&self) -> bool {
        self.sandboxes.has_kernel()
    }

    fn pause(&self) {
        self.signal(Signal::STOP);
    }

    fn resume(&self) {
        self.signal(Signal::CONT);
    }

    async fn freeze(&self) -> Result<(), DriverError> {
        let (own, id) = (Arc::clone(&self.sandboxes), self.id.clone());
        blocking(move || own.cgroups.group(&id).freeze()).await
    }

    async fn thaw(&self) -> Result<(), DriverError> {
        self.cgroup.thaw()
    }

    async fn died(&self) {
        // Whoever asks for the first time must not have to wait for the reactor to look.
        if !self.is_over() {
            let _ = self.init.readable().await;
        }
    }

    async fn destroy(&self) -> Result<(), DriverError> {
        // With PID 1 the kernel ends every process of its namespace, and with them the mounts.
        match rustix::process::pidfd_send_signal(self.init.get_ref(), Signal::KILL) {
            Err(rustix::io::Errno::SRCH) => {}
            done => done.map_err(DriverError::step("kill", self.id.to_string()))?,
        }
        // Who is frozen in a control group of v1 dies when that is over.
        self.cgroup.thaw()?;
        if tokio::time::timeout(DEATH_WAIT, self.died()).await.is_err() {
            return Err(DriverError::step(
                "wait for the end of",
                self.id.to_string(),
            )(io::Error::from(io::ErrorKind::TimedOut)));
        }
        let (own, id, base) = (Arc::clone(&self.sandboxes), self.id.clone(), self.uid_base);
        blocking(move || own.remove(&id, Some(base))).await
    }
}
