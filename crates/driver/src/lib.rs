//! Isolation of sandboxes by namespaces or gVisor: the [`Driver`] and [`Sandbox`] traits, and the local drivers.
//!
//! A driver owns all resources of a sandbox (processes, mounts, cgroups, uid ranges, sockets,
//! directories) and its own record of it on disk, so that after a crash of the server it can find
//! its sandboxes again ([`Driver::adopt`]) and remove orphaned ones ([`Driver::sweep`]).
//! It knows nothing of sessions, tenants or time.

pub mod checks;

mod error;
mod guest;
mod gvisor;
mod layers;
mod local;
mod native;

/// For the crate `fuzz`: the decoder of the launcher's requests.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::local::launcher::request::fuzzing::*;
}

pub use error::DriverError;
pub use guest::GuestAddress;
pub use gvisor::{GvisorDriver, Platform};
pub use layers::{LayerBlob, LayerSize, LayerStore};
pub use local::{Config as MachineConfig, DiskRate, LAUNCHER_ARG, Machine, launcher_main};
pub use native::NativeDriver;

use async_trait::async_trait;
use k8e_egress::Sockets;
use k8e_model::{Digest, LimitEvents, Limits, ResourceUsage, RuntimeKind, SandboxId, Template};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::time::Duration;

/// Specification of a sandbox: plain data, so that a separate root process can make it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Sandbox id, new for every launch.
    pub id: SandboxId,
    /// Template of its root file system.
    pub template: Template,
    /// DiffIDs of the layers of an image, the lowest first, each in the [`LayerStore`]; none for the
    /// template `host`.
    #[serde(default)]
    pub layers: Vec<Digest>,
    /// What it may use.
    pub limits: Limits,
}

/// What a restored sandbox has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restored {
    /// All that was saved: its processes continue.
    Memory,
    /// Its files only: no process of it runs.
    Files {
        /// Why the memory could not be used.
        reason: String,
    },
}

// === impl Restored ===

impl Restored {
    /// `lost` is why it has its files only, if so.
    fn of(lost: Option<String>) -> Self {
        match lost {
            None => Self::Memory,
            Some(reason) => Self::Files { reason },
        }
    }
}

/// Whether a driver can work on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Yes; `weaker` names what this machine lacks and what that costs, one sentence each.
    Usable {
        /// What is weaker than it could be, and what to do, one sentence each.
        weaker: Vec<String>,
    },
    /// Not now: what it needs is installed, but does not work. That may be repaired, or pass.
    Broken {
        /// Why, and what to do.
        reason: String,
    },
    /// No: this machine lacks what it needs.
    Unusable {
        /// What it lacks, and what to do.
        reason: String,
    },
}

/// One kind of isolation.
#[async_trait]
pub trait Driver: Send + Sync {
    /// Name of the runtime.
    fn kind(&self) -> RuntimeKind;

    /// Whether it can work here. Answers in milliseconds when it works or is not installed; finding out
    /// what is broken may take as long as a launch.
    fn probe(&self) -> Probe;

    /// Makes a sandbox whose guest listens. On failure nothing is left behind, or the error says what.
    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError>;

    /// Whether a sandbox that was launched with limits `from` can get limits `to` by
    /// [`Sandbox::set_limits`].
    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool;

    /// Finds a sandbox of an earlier server again, with the limits that it has; none when it is dead.
    async fn adopt(
        &self,
        id: &SandboxId,
        limits: &Limits,
    ) -> Result<Option<Box<dyn Sandbox>>, DriverError>;

    /// Makes a sandbox that continues from a state: of a [saved](Sandbox::save) sandbox, whose own id it has, or a
    /// [copied](Sandbox::copy_state) one. The template and layers are those of the state. The state stays as it was; on
    /// failure nothing else is left behind, or the error says what.
    async fn launch_from(
        &self,
        spec: &SandboxSpec,
        state: &SandboxId,
    ) -> Result<(Box<dyn Sandbox>, Restored), DriverError> {
        let _ = (spec, state);
        Err(DriverError::Unusable(
            "only gVisor sandboxes can be made from a state".to_owned(),
        ))
    }

    /// Removes a [copied](Sandbox::copy_state) state. Doing so twice is no error.
    async fn remove_state(&self, state: &SandboxId) -> Result<(), DriverError> {
        let _ = state;
        Ok(())
    }

    /// Removes orphaned sandboxes: all traces of those that are not in `keep`. Returns their ids.
    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError>;
}

/// A live sandbox. Dropping it leaves it alive: only [`Sandbox::destroy`] ends it.
#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Address of its guest.
    fn guest(&self) -> &GuestAddress;

    /// Listening sockets in its network namespace for the egress gate; none when it has no network that is
    /// ours.
    async fn network(&self) -> Result<Option<Sockets>, DriverError> {
        Ok(None)
    }

    /// Counters of limit events: OOM kills and refused forks.
    fn limit_events(&self) -> LimitEvents;

    /// What it uses now: reads of kernel files. None when it does not run, or its driver cannot count.
    fn usage(&self) -> Option<ResourceUsage> {
        None
    }

    /// Gives it other limits, before anything but its guest has run in it, as far as its driver
    /// [can](Driver::can_change_limits). A few writes to kernel files: no need to be async.
    fn set_limits(&self, limits: &Limits) -> Result<(), DriverError>;

    /// Whether it uses CPU while no command runs in it, so that an idle stop saves something.
    fn costs_idle(&self) -> bool {
        false
    }

    /// Idle stop: stops a separate kernel's own work while no command runs in it. It can be called and
    /// destroyed meanwhile; a call is answered after [`Sandbox::wake`].
    fn idle_stop(&self) {}

    /// Undoes [`Sandbox::idle_stop`].
    fn wake(&self) {}

    /// Stops every process in it where it is, whatever it is doing. When this returns nothing in it
    /// runs, and nothing will until it is [thawed](Sandbox::thaw): also when the server ends
    /// meanwhile. It can be destroyed like that. Doing so twice is no error.
    async fn freeze(&self) -> Result<(), DriverError>;

    /// Undoes [`Sandbox::freeze`]; no error when it is not frozen.
    async fn thaw(&self) -> Result<(), DriverError>;

    /// Writes memory and files to disk and ends every process; [`Sandbox::restore`] continues all of them. Nothing
    /// else may be called on its guest meanwhile. When it fails the sandbox runs on, and the error says why it cannot
    /// be saved.
    async fn save(&self) -> Result<(), DriverError> {
        Err(DriverError::Unusable(
            "only gVisor sandboxes can be written to disk".to_owned(),
        ))
    }

    /// Whether its memory can be copied while it runs, unless this machine lacks something for it.
    fn can_copy_state(&self) -> bool {
        false
    }

    /// Writes memory and files to disk as a state of its own, from which other sandboxes can be
    /// [launched](Driver::launch_from), and goes on. Returns how long its processes were stopped. Nothing else may be
    /// called on its guest meanwhile. `state` is a new id; a state that nobody removes is removed by
    /// [`Driver::sweep`]. When it fails the sandbox goes on too, and nothing is left:
    /// [`InUse`](DriverError::InUse) when calls to its guest are open.
    async fn copy_state(&self, state: &SandboxId) -> Result<Duration, DriverError> {
        let _ = state;
        Err(DriverError::Unusable(
            "only gVisor can copy the memory of a running session".to_owned(),
        ))
    }

    /// Whether it is saved: it has no processes then, and can be restored or destroyed.
    fn is_saved(&self) -> bool {
        false
    }

    /// Makes a saved sandbox run again. The saved state stays until it is [forgotten](Sandbox::forget_state), and is
    /// unchanged when this fails.
    async fn restore(&self) -> Result<Restored, DriverError> {
        Err(DriverError::Unusable("it is not saved".to_owned()))
    }

    /// Removes the saved state of a sandbox that runs again.
    async fn forget_state(&self) -> Result<(), DriverError> {
        Ok(())
    }

    /// Resolves when its first process has exited, unless that was for [`Sandbox::save`]; at the first poll when it has
    /// already.
    async fn died(&self);

    /// Kills it and removes every trace. Doing so twice is no error.
    async fn destroy(&self) -> Result<(), DriverError>;
}
