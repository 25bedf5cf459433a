//! Domain types of k8e and their validation rules, as plain data.
//!
//! Values are validated when they are constructed, so that crates that use them check nothing again. No IO, no async, no
//! clock.

mod approval;
mod background;
mod bounded_map;
mod command;
pub mod egress;
mod error;
mod exposure;
mod fork;
mod id;
mod image;
mod key;
mod language;
mod lifetime;
mod limits;
mod origin;
mod path;
mod phase;
mod pool;
mod principal;
mod run_request;
mod runtime;
mod secret;
mod session;
mod snapshot;
mod sub_agent;
mod template;
mod tenants;
mod time_limit;

pub use approval::{
    Approval, ApprovalAction, ApprovalDecision, ApprovalParty, ApprovalReason, ApprovalState,
    ApprovalTime, Caller, Proof,
};
pub use background::{BACKGROUND_OUTPUT_BYTES_MAX, BackgroundRun, BackgroundStatus};
pub use bounded_map::{Env, Labels};
pub use command::{
    CODE_BYTES_MAX, Command, Outcome, Program, RUN_TIMEOUT_DEFAULT, RunStatus, check_argv,
    check_code,
};
pub use egress::{
    DenyList, DenyReason, EgressPolicy, Flow, FlowProtocol, FlowVerdict, HostName, HostPattern,
    Ipv4Net, RULES_MAX, Rule, Target,
};
pub use error::{Code, Error};
pub use exposure::{Exposure, Port, ServiceHost, ServiceLabel, ServiceToken};
pub use fork::{ForkCount, ForkSpec};
pub use id::{ApprovalId, KeyId, RunId, SandboxId, SessionId, TenantId, TerminalId};
pub use image::{Digest, IMAGE_LAYERS_MAX, Image, ImageConfig};
pub use key::{ApiKey, KeyHash};
pub use language::Language;
pub use lifetime::{Lifetime, LifetimeSpec};
pub use limits::{LimitEvents, LimitKind, Limits, LimitsSpec, Quantity, ResourceUsage, size_text};
pub use origin::{ClientKind, SessionOrigin};
pub use path::{GuestPath, WORKSPACE};
pub use phase::Phase;
pub use pool::{POOL_MAX, PoolDemand, PoolPlan, PoolSize, PoolState, Spare};
pub use principal::{Principal, PrincipalName};
pub use run_request::{RunRequest, RunTarget};
pub use runtime::RuntimeKind;
pub use secret::{SECRET_REFS_MAX, SecretName, SecretRef, SecretRefs, SecretValue};
pub use session::{Session, SessionSpec, UnixMillis};
pub use snapshot::{SnapshotLayers, SnapshotName};
pub use sub_agent::{SubAgent, SubAgentSpec};
pub use template::{Template, TemplateName};
pub use tenants::Tenants;
pub use time_limit::TimeLimit;
