//! The native driver: Linux namespaces, a user namespace, seccomp, Landlock and control groups.

pub(crate) mod child;
pub(crate) mod launch;
pub(crate) mod seccomp;
pub(crate) mod sockets;

mod confine;
mod enter;

pub(crate) use confine::landlock_missing;

use crate::gvisor::Platform;
use crate::local::kind::Kind;
use crate::{Driver, DriverError, Machine, Probe, Sandbox, SandboxSpec};
use async_trait::async_trait;
use k8e_model::{Limits, RuntimeKind, SandboxId};
use std::collections::HashSet;

/// Makes native sandboxes.
pub struct NativeDriver {
    machine: Machine,
    /// Landlock features that this kernel lacks. Probed at the start: a confined server cannot.
    landlock_missing: Option<String>,
}

// === impl NativeDriver ===

impl NativeDriver {
    /// Needs no program beside the kernel.
    pub fn start(machine: &Machine) -> Self {
        Self {
            machine: machine.clone(),
            landlock_missing: landlock_missing(),
        }
    }
}

#[async_trait]
impl Driver for NativeDriver {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Native
    }

    fn probe(&self) -> Probe {
        let mut weaker: Vec<String> = self.landlock_missing.clone().into_iter().collect();
        weaker.extend(self.machine.weaker());
        Probe::Usable { weaker }
    }

    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError> {
        let platform = Platform::default();
        self.machine.launch(Kind::Native, spec, platform).await
    }

    /// The disk size is fixed at launch.
    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool {
        from.disk_bytes == to.disk_bytes
    }

    async fn adopt(
        &self,
        id: &SandboxId,
        limits: &Limits,
    ) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        self.machine.adopt(Kind::Native, id, limits).await
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        self.machine.sweep(Kind::Native, keep).await
    }
}
