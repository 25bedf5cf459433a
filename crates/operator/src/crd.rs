//! The four kinds of the agent-sandbox API, version v1beta1, and what is written on and about them.
//!
//! The Rust types are the source: `deploy/crds` is generated from them (`cargo xtask codegen`).

mod blueprint;
mod claim;
pub mod conditions;
pub mod names;
mod sandbox;
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
