//! The gVisor driver: every sandbox has a separate (user-space) kernel, the sentry of `runsc`.
//!
//! The file system, the disk, the uid range, the control group and the guest are those of the
//! native driver; the guest's system calls go to the sentry instead of the host's kernel.
//!
//! ```text
//! launcher ── fork: mount namespace, control group ── runsc run ─┬─ sentry: the kernel, and PID 1 of the sandbox in it
//!             (gone when the sandbox runs)   (gone too)          └─ gofer: keeps the file system mounted
//! ```
//!
//! A sandbox is its sentry process, which is found again by its record, and ended by a signal; its mounts end with
//! it. runsc itself is needed again to [save](state) a sandbox: memory and files on disk, and no process.

pub(crate) mod child;
pub(crate) mod launch;
pub(crate) mod state;

mod bind_filter;
mod bundle;
mod control;
mod runsc;
mod socket;

pub use runsc::Platform;

pub(crate) use runsc::found as runsc_found;

use crate::local::kind::Kind;
use crate::{Driver, DriverError, Machine, Probe, Restored, Sandbox, SandboxSpec};
use async_trait::async_trait;
use k8e_model::{Limits, RuntimeKind, SandboxId};
use runsc::Runsc;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two trials of a runsc that does not work: a trial is a whole launch.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(20);

/// Makes gVisor sandboxes.
pub struct GvisorDriver {
    machine: Machine,
    platform: Platform,
    /// The runsc that was chosen, as it was found by root at the start: the server may not see its path later.
    chosen: Option<Result<Runsc, String>>,
    /// Result of the last trial.
    found: Mutex<Option<Found>>,
}

/// Whether an installed runsc works.
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
    /// Finds runsc and launches a trial sandbox with it, unless this build worked before. Blocks.
    pub fn start(machine: &Machine, platform: Platform) -> Self {
        let driver = Self {
            machine: machine.clone(),
            platform,
            chosen: machine.runsc().map(|path| Runsc::find(Some(path))),
            found: Mutex::default(),
        };
        driver.probe();
        driver
    }
}

impl GvisorDriver {
    /// Whether sandboxes can be saved and restored here, by a round trip.
    pub(crate) async fn try_checkpoint(&self) -> Result<(), DriverError> {
        self.machine.check_can_save(self.platform).await
    }
}

#[async_trait]
impl Driver for GvisorDriver {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Gvisor
    }

    /// Quick unless runsc was installed or replaced since it was last tried, or was broken then.
    fn probe(&self) -> Probe {
        let runsc = match self.chosen.clone() {
            Some(Ok(runsc)) => runsc,
            // Somebody wants gVisor: another runtime does not take its place.
            Some(Err(reason)) => return Probe::Broken { reason },
            None => match Runsc::find(None) {
                Ok(runsc) => runsc,
                Err(reason) => return Probe::Unusable { reason },
            },
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

    /// The disk size is fixed at launch; the process limit is RLIMIT_NPROC inside the sentry, which
    /// cannot be changed from outside.
    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool {
        (from.disk_bytes, from.pids) == (to.disk_bytes, to.pids)
    }

    async fn adopt(
        &self,
        id: &SandboxId,
        limits: &Limits,
    ) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        self.machine.adopt(Kind::Gvisor, id, limits).await
    }

    async fn launch_from(
        &self,
        spec: &SandboxSpec,
        state: &SandboxId,
    ) -> Result<(Box<dyn Sandbox>, Restored), DriverError> {
        self.machine.launch_from(spec, state, self.platform).await
    }

    async fn remove_state(&self, state: &SandboxId) -> Result<(), DriverError> {
        self.machine.remove_state(state).await
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        self.machine.sweep(Kind::Gvisor, keep).await
    }
}
