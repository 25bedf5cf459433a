//! What makes sandboxes: the [`Driver`] and [`Sandbox`] traits, and the drivers of one machine.
//!
//! A driver owns everything a sandbox is made of (processes, mounts, cgroups, uid ranges, sockets,
//! directories) and its own record of it on disk, so that after a crash of the server it can find
//! its sandboxes again ([`Driver::adopt`]) and remove what nobody wants ([`Driver::sweep`]).
//! It knows nothing of sessions, tenants or time.

pub mod checks;

mod error;
mod guest;
mod gvisor;
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
pub use local::{Config as MachineConfig, DiskRate, LAUNCHER_ARG, Machine, launcher_main};
pub use native::NativeDriver;

use async_trait::async_trait;
use k8e_egress::Sockets;
use k8e_model::{LimitEvents, Limits, RuntimeKind, SandboxId, Template};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// What to make: plain data, so that the part that needs root can live in a process of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Its name, new for every launch.
    pub id: SandboxId,
    /// Where its root file system comes from.
    pub template: Template,
    /// What it may use.
    pub limits: Limits,
}

/// Whether a driver can work on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Yes; `weaker` names what this machine lacks and what that costs, one sentence each.
    Usable {
        /// What is weaker than it could be.
        weaker: Vec<String>,
    },
    /// Not now: what it needs is installed, but does not work. That may be mended, or pass.
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
    /// Which kind.
    fn kind(&self) -> RuntimeKind;

    /// Whether it can work here. Answers in milliseconds when it works or is not installed; finding out
    /// what is broken may take as long as a launch.
    fn probe(&self) -> Probe;

    /// Makes a sandbox whose guest listens. On failure nothing is left behind, or the error says what.
    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError>;

    /// Whether a sandbox that was launched with limits `from` can get limits `to` by
    /// [`Sandbox::set_limits`].
    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool;

    /// Finds a sandbox of an earlier server again; none when it is dead.
    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, DriverError>;

    /// Removes every trace of sandboxes that are not in `keep`. Returns whose traces it removed.
    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError>;
}

/// A live sandbox. Dropping it leaves it alive: only [`Sandbox::destroy`] ends it.
#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Where its guest listens.
    fn guest(&self) -> &GuestAddress;

    /// Sockets in its network namespace, for a gate to listen on; none when it has no network that is
    /// ours.
    async fn network(&self) -> Result<Option<Sockets>, DriverError> {
        Ok(None)
    }

    /// How often its limits were hit so far.
    fn limit_events(&self) -> LimitEvents;

    /// Gives it other limits, before anything but its guest has run in it, as far as its driver
    /// [can](Driver::can_change_limits). A few writes to kernel files: no need to be async.
    fn set_limits(&self, limits: &Limits) -> Result<(), DriverError>;

    /// Whether it uses CPU though nothing runs in it, so that resting it is worth while.
    fn costs_idle(&self) -> bool {
        false
    }

    /// Stops what it does by itself, while nothing runs in it. It can be called and ended meanwhile;
    /// a call is answered when it is resumed.
    fn pause(&self) {}

    /// Undoes [`Sandbox::pause`].
    fn resume(&self) {}

    /// Stops every process in it where it is, whatever it is doing. When this returns nothing in it
    /// runs, and nothing will until it is [thawed](Sandbox::thaw): also when the server ends
    /// meanwhile. It can be destroyed like that. Doing so twice is no error.
    async fn freeze(&self) -> Result<(), DriverError>;

    /// Undoes [`Sandbox::freeze`]; no error when it is not frozen.
    async fn thaw(&self) -> Result<(), DriverError>;

    /// Resolves when it is dead, however it died; at its first poll when it is dead already.
    async fn died(&self);

    /// Ends it and removes every trace. Doing so twice is no error.
    async fn destroy(&self) -> Result<(), DriverError>;
}
