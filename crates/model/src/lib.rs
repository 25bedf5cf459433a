//! The nouns of k8e and the rules about them, as plain data.
//!
//! Everything here is checked when it is made: a value of one of these types is already
//! valid, so the crates that use it check nothing again. No IO, no async, no clock.

mod approval;
mod background;
mod bounded_map;
mod command;
pub mod egress;
mod error;
mod exposure;
mod id;
mod key;
mod language;
mod lifetime;
mod limits;
mod origin;
mod path;
mod phase;
mod pool;
mod principal;
mod runtime;
mod secret;
mod session;
mod snapshot;
mod sub_agent;
mod template;
mod tenants;

pub use approval::{
    Approval, ApprovalAction, ApprovalDecision, ApprovalParty, ApprovalReason, ApprovalState,
    ApprovalTime, Caller, Proof,
};
pub use background::{BACKGROUND_OUTPUT_BYTES_MAX, BackgroundRun, BackgroundStatus};
pub use bounded_map::{Env, Labels};
pub use command::{CODE_BYTES_MAX, Command, Outcome, Program, RUN_TIMEOUT_DEFAULT, RunStatus};
pub use egress::{
    DenyList, DenyReason, EgressPolicy, Flow, FlowProtocol, FlowVerdict, HostName, HostPattern,
    Ipv4Net, RULES_MAX, Rule, Target,
};
pub use error::{Code, Error};
pub use exposure::{Exposure, Port, ServiceHost, ServiceLabel, ServiceToken};
pub use id::{ApprovalId, KeyId, RunId, SandboxId, SessionId, TenantId, TerminalId};
pub use key::{ApiKey, KeyHash};
pub use language::Language;
pub use lifetime::Lifetime;
pub use limits::{LimitEvents, LimitKind, Limits, Quantity, size_text};
pub use origin::{ClientKind, SessionOrigin};
pub use path::{GuestPath, WORKSPACE};
pub use phase::Phase;
pub use pool::{POOL_MAX, PoolDemand, PoolPlan, PoolSize, PoolState, Spare};
pub use principal::{Principal, PrincipalName};
pub use runtime::RuntimeKind;
pub use secret::{SECRET_REFS_MAX, SecretName, SecretRef, SecretRefs, SecretValue};
pub use session::{Session, SessionSpec, UnixMillis};
pub use snapshot::{SnapshotLayers, SnapshotName};
pub use sub_agent::{SubAgent, SubAgentSpec};
pub use template::Template;
pub use tenants::Tenants;
