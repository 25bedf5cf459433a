//! Custom resources of the agent-sandbox API, version v1beta1: the four kinds, their conditions, labels and schemas.
//!
//! The Rust types are the source: `deploy/crds` is generated from them (`UPDATE_DEPLOY=1`, see CONTRIBUTING.md), with the
//! feature `schema`, which only tests need.

mod blueprint;
mod claim;
pub mod conditions;
pub mod names;
mod sandbox;
#[cfg(feature = "schema")]
pub mod schema;
mod template;
mod warm_pool;

pub use blueprint::{PodMetadata, PodTemplate, VolumeClaimMetadata, VolumeClaimTemplate};
pub use claim::{
    BoundSandbox, ClaimEnv, ClaimLifecycle, ClaimShutdownPolicy, SandboxClaim, SandboxClaimSpec,
    SandboxClaimStatus, WarmPoolRef,
};
pub use sandbox::{OperatingMode, Sandbox, SandboxSpec, SandboxStatus, ShutdownPolicy};
pub use template::{
    InjectionPolicy, NetworkPolicyManagement, NetworkPolicyRules, SandboxTemplate,
    SandboxTemplateSpec,
};
pub use warm_pool::{
    SandboxWarmPool, SandboxWarmPoolSpec, SandboxWarmPoolStatus, TemplateRef, UpdateStrategy,
    UpdateStrategyType,
};
