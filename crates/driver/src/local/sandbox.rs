//! A live sandbox of this machine, held by its first process.

use super::blocking;
use super::cgroup::Cgroup;
use super::sandboxes::Sandboxes;
use super::sys;
use crate::{DriverError, GuestAddress, Sandbox};
use async_trait::async_trait;
use k8e_model::{LimitEvents, Limits, SandboxId};
use rustix::process::Signal;
use std::io;
use std::os::fd::OwnedFd;
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
    /// Processes it may have, where that is settled for good.
    pids: Option<u32>,
}

// === impl LocalSandbox ===

impl LocalSandbox {
    /// Takes over a process that already became the guest.
    pub(crate) fn new(
        sandboxes: Arc<Sandboxes>,
        id: SandboxId,
        uid_base: u32,
        init: OwnedFd,
        pids: Option<u32>,
    ) -> Result<Self, DriverError> {
        let init = sys::watch(init).map_err(DriverError::step(
            "watch",
            format!("the first process of {id}"),
        ))?;
        let guest = GuestAddress::Unix(Arc::new(sandboxes.socket(&id)));
        let cgroup = sandboxes.cgroups.group(&id);
        Ok(Self {
            sandboxes,
            id,
            uid_base,
            guest,
            cgroup,
            init,
            pids,
        })
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

    fn limit_events(&self) -> LimitEvents {
        self.cgroup.limit_events()
    }

    fn set_limits(&self, limits: &Limits) -> Result<(), DriverError> {
        if self.pids.is_some_and(|pids| pids != limits.pids) {
            return Err(DriverError::Unusable(
                "its limit of processes was settled when it was made".to_owned(),
            ));
        }
        self.cgroup.set_limits(&self.sandboxes.around(limits))
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
