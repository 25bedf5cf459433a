//! The native driver: Linux namespaces, a user namespace, seccomp, Landlock and control groups.

pub(crate) mod child;
pub(crate) mod seccomp;
pub(crate) mod sockets;

mod confine;
mod enter;

pub(crate) use confine::landlock_missing;

use crate::local::launcher::Order;
use crate::local::sandboxes::{Kind, Prepared, Sandboxes, Started};
use crate::{Driver, DriverError, Machine, Probe, Sandbox, SandboxSpec};
use async_trait::async_trait;
use child::Setup;
use k8e_model::{Limits, RuntimeKind, SandboxId};
use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

const SOCKET: &str = "guest.sock";

const KIND: Kind = Kind {
    name: "native",
    socket: SOCKET,
    around: |limits| *limits,
    has_kernel: false,
};

/// Makes native sandboxes.
pub struct NativeDriver {
    sandboxes: Arc<Sandboxes>,
}

// === impl NativeDriver ===

impl NativeDriver {
    /// Needs nothing but the machine.
    pub fn start(machine: &Machine) -> Result<Self, DriverError> {
        Ok(Self {
            sandboxes: Arc::new(Sandboxes::open(machine, KIND)?),
        })
    }
}

#[async_trait]
impl Driver for NativeDriver {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Native
    }

    fn probe(&self) -> Probe {
        let mut weaker: Vec<String> = landlock_missing().into_iter().collect();
        weaker.extend(self.sandboxes.weaker());
        Probe::Usable { weaker }
    }

    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError> {
        let machine = self.sandboxes.machine.clone();
        let start = move |spec: &SandboxSpec, prepared: Prepared| start(&machine, spec, prepared);
        let sandbox = self.sandboxes.launch(spec, start).await?;
        Ok(Box::new(sandbox))
    }

    /// A disk is made with its sandbox.
    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool {
        from.disk_bytes == to.disk_bytes
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        let sandbox = self.sandboxes.adopt(id)?;
        Ok(sandbox.map(|sandbox| Box::new(sandbox) as Box<dyn Sandbox>))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        self.sandboxes.sweep(keep).await
    }
}

fn start(
    machine: &Machine,
    spec: &SandboxSpec,
    prepared: Prepared,
) -> Result<Started, DriverError> {
    let dir = &prepared.dir;
    let listener =
        listen(dir).map_err(DriverError::step("listen in", dir.display().to_string()))?;
    let setup = Setup {
        join: prepared.cgroup.join(),
        rootfs: machine.rootfs(spec, prepared.disk, prepared.uid_base),
        disk_rate: machine.disk_rate(),
        network: machine.has_network(),
    };
    let mut forked = machine
        .launcher()
        .fork(&Order::Native(setup), Some(&listener))?;
    forked.wait()?;
    Ok(Started {
        pid: forked.pid,
        pidfd: forked.pidfd,
    })
}

/// Listens in the sandbox's directory, whatever the length of its path.
fn listen(dir: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    use std::os::fd::AsRawFd as _;
    let fd = rustix::fs::open(dir, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let listener =
        UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", fd.as_fd().as_raw_fd()))?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}
