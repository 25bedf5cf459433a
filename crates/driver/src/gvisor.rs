//! The gVisor driver: every sandbox has a kernel of its own, in user space, made by `runsc`.
//!
//! The file system, the disk, the uid range, the control group and the guest are those of the
//! native driver; what stands between the guest and the host's kernel is another.
//!
//! ```text
//! launcher ── fork: mount namespace, control group ── runsc run ─┬─ sentry: the kernel, and PID 1 of the sandbox in it
//!             (gone when the sandbox runs)   (gone too)          └─ gofer: keeps the file system mounted
//! ```
//!
//! No state of runsc's outlives the launch: a sandbox is its sentry, which is found again by its
//! record, and ended by a signal; its mounts end with it.
//!
//! The guest binds its socket itself, in a directory of the host's that is taken away from the
//! sandbox once it listens: nothing inside can then put anything there, or another in its place.

pub(crate) mod child;
pub(crate) mod launch;

mod bundle;
mod runsc;

pub use runsc::Platform;

pub(crate) use runsc::found as runsc_found;

use crate::local::kind::Kind;
use crate::{Driver, DriverError, Machine, Probe, Sandbox, SandboxSpec};
use async_trait::async_trait;
use k8e_model::{Limits, RuntimeKind, SandboxId};
use runsc::Runsc;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A broken runsc is not tried more often than this: trying is a launch.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(20);

/// Makes gVisor sandboxes.
pub struct GvisorDriver {
    machine: Machine,
    platform: Platform,
    /// What was found out last.
    found: Mutex<Option<Found>>,
}

/// Whether a runsc works.
struct Found {
    runsc: Runsc,
    probe: Probe,
    at: Instant,
}

// === impl Found ===

impl Found {
    fn holds_for(&self, runsc: &Runsc) -> bool {
        let broken = matches!(self.probe, Probe::Broken { .. });
        self.runsc == *runsc && (!broken || self.at.elapsed() < TRY_AGAIN_AFTER)
    }
}

// === impl GvisorDriver ===

impl GvisorDriver {
    /// Finds runsc and has it tried out, unless that was done before. Blocks.
    pub fn start(machine: &Machine, platform: Platform) -> Self {
        let driver = Self {
            machine: machine.clone(),
            platform,
            found: Mutex::default(),
        };
        driver.probe();
        driver
    }
}

#[async_trait]
impl Driver for GvisorDriver {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Gvisor
    }

    /// Quick unless runsc was installed or replaced since it was last tried, or was broken then.
    fn probe(&self) -> Probe {
        let runsc = match Runsc::find() {
            Ok(runsc) => runsc,
            Err(reason) => return Probe::Unusable { reason },
        };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = &*found
            && found.holds_for(&runsc)
        {
            return found.probe.clone();
        }
        let probe = match self.machine.try_gvisor(self.platform) {
            Ok(()) => Probe::Usable {
                weaker: self.machine.weaker(),
            },
            Err(error) => Probe::Broken {
                reason: runsc.broken(&error),
            },
        };
        *found = Some(Found {
            runsc,
            probe: probe.clone(),
            at: Instant::now(),
        });
        probe
    }

    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError> {
        self.machine.launch(Kind::Gvisor, spec, self.platform).await
    }

    /// A disk is made with its sandbox; processes are counted by the kernel inside, which takes no
    /// orders once it runs.
    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool {
        (from.disk_bytes, from.pids) == (to.disk_bytes, to.pids)
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        self.machine.adopt(Kind::Gvisor, id).await
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        self.machine.sweep(Kind::Gvisor, keep).await
    }
}
