//! A session: what was asked for, and what became of it.

use crate::{
    ClientKind, EgressPolicy, Env, Labels, Lifetime, Limits, Phase, RuntimeKind, SandboxId,
    SecretRefs, SessionId, SessionOrigin, SubAgent, Template, TenantId,
};
use serde::{Deserialize, Serialize};

/// Milliseconds since 1970, as every record keeps time.
pub type UnixMillis = i64;

/// What a caller asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionSpec {
    /// None for a random one.
    pub id: Option<SessionId>,
    /// The tenant that it is for; none is the principal's default.
    pub tenant: Option<TenantId>,
    /// What kind of client asks.
    pub client: ClientKind,
    /// None for the server's default.
    pub runtime: Option<RuntimeKind>,
    /// Where the root file system comes from.
    pub template: Template,
    /// For every command in it.
    pub env: Env,
    /// To find it again.
    pub labels: Labels,
    /// What it may use.
    pub limits: Limits,
    /// How long it lives.
    pub lifetime: Lifetime,
    /// Secrets of its owner's that its commands get.
    pub secrets: SecretRefs,
    /// What it may reach; none for the server's default.
    pub egress: Option<EgressPolicy>,
}

/// A session's record, as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Its name.
    pub id: SessionId,
    /// The principal that made it.
    pub owner: String,
    /// Whose it is among the owner's own.
    pub tenant: TenantId,
    /// What made it.
    pub origin: SessionOrigin,
    /// What kind of client asked for it.
    pub client: ClientKind,
    /// Where it is in its life.
    pub phase: Phase,
    /// Why it ended, in words; empty before.
    pub reason: String,
    /// What it really got.
    pub runtime: RuntimeKind,
    /// The driver's name for its sandbox. A sub-agent lives in its parent's: then this is a name of
    /// its own, under which its history is kept.
    pub sandbox: SandboxId,
    /// Where the root file system comes from.
    pub template: Template,
    /// For every command in it.
    pub env: Env,
    /// To find it again.
    pub labels: Labels,
    /// What it may use.
    pub limits: Limits,
    /// How long it lives.
    pub lifetime: Lifetime,
    /// Secrets of its owner's that its commands get.
    pub secrets: SecretRefs,
    /// What it may reach.
    pub egress: EgressPolicy,
    /// When it was made.
    pub created_at: UnixMillis,
    /// When a call last used it, as far as it was written down.
    pub last_used: UnixMillis,
    /// Of a sub-agent.
    pub sub_agent: Option<SubAgent>,
}
