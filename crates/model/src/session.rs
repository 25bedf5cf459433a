//! Sessions: the requested specification, and the stored record.

use crate::{
    ClientKind, EgressPolicy, Env, Image, Labels, Lifetime, LifetimeSpec, Limits, LimitsSpec,
    Phase, RuntimeKind, SandboxId, SecretRefs, SessionId, SessionOrigin, SubAgent, Template,
    TenantId,
};
use serde::{Deserialize, Serialize};

/// Time in milliseconds since 1970, in every record.
pub type UnixMillis = i64;

/// What a request asks for. The engine fills in the server's defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionSpec {
    /// Requested id; `None` for a random one.
    pub id: Option<SessionId>,
    /// Tenant; `None` is the principal's default.
    pub tenant: Option<TenantId>,
    /// Kind of the client.
    pub client: ClientKind,
    /// Runtime; `None` for the server's default.
    pub runtime: Option<RuntimeKind>,
    /// Template of the root file system.
    pub template: Template,
    /// Environment of every command.
    pub env: Env,
    /// Labels, to find it.
    pub labels: Labels,
    /// Resource limits.
    pub limits: LimitsSpec,
    /// TTL and idle timeout.
    pub lifetime: LifetimeSpec,
    /// Secrets of its owner that its commands get as environment variables.
    pub secrets: SecretRefs,
    /// Egress policy; `None` for the server's default.
    pub egress: Option<EgressPolicy>,
}

/// Record of a session in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Id.
    pub id: SessionId,
    /// Owner: name of the principal that created it.
    pub owner: String,
    /// Tenant.
    pub tenant: TenantId,
    /// The kind of call that created it.
    pub origin: SessionOrigin,
    /// Kind of the client that created it.
    pub client: ClientKind,
    /// Lifecycle phase.
    pub phase: Phase,
    /// Why it ended, as text; empty before.
    pub reason: String,
    /// Runtime that it got.
    pub runtime: RuntimeKind,
    /// Id of its sandbox. A sub-agent shares its parent's sandbox: then this is only the key of its history.
    pub sandbox: SandboxId,
    /// Template of the root file system.
    pub template: Template,
    /// Environment of every command.
    pub env: Env,
    /// Labels, to find it.
    pub labels: Labels,
    /// Resource limits.
    pub limits: Limits,
    /// TTL and idle timeout.
    pub lifetime: Lifetime,
    /// Secrets of its owner that its commands get as environment variables.
    pub secrets: SecretRefs,
    /// Egress policy.
    pub egress: EgressPolicy,
    /// Time of creation.
    pub created_at: UnixMillis,
    /// Time of last use, as far as it was stored.
    pub last_used: UnixMillis,
    /// Parent and working directory of a sub-agent.
    pub sub_agent: Option<SubAgent>,
    /// The image that its template stood for when it was made; none for the template `host`.
    pub image: Option<Image>,
}
