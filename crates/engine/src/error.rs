//! What the engine tells its callers when it cannot do what they ask.

use k8e_driver::DriverError;
use k8e_egress::EgressError;
use k8e_model::{
    ApprovalId, Code, RunId, RuntimeKind, SecretName, SessionId, SnapshotName, TenantId, TerminalId,
};
use k8e_store::StoreError;
use std::time::Duration;

/// Why the engine could not do what it was asked. `Display` is the message for users.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such session, or it is another principal's: the two must not be told apart.
    #[error("session {0} not found")]
    SessionNotFound(SessionId),
    /// It was, and its record still says why it is not.
    #[error("session {id} not found: it ended ({reason}); make a new one")]
    SessionOver {
        /// Which session.
        id: SessionId,
        /// Why it ended.
        reason: String,
    },
    /// No such run, or it is another principal's: the two must not be told apart.
    #[error("run {0} not found")]
    RunNotFound(RunId),
    /// No such terminal, or it is another principal's: the two must not be told apart.
    #[error("terminal {0} not found")]
    TerminalNotFound(TerminalId),
    /// The server is full.
    #[error("{max} terminals are open, which is all this server takes: destroy some")]
    TerminalsFull {
        /// How many may be.
        max: usize,
    },
    /// The id is taken by a session that is not over.
    #[error("session {0} exists already: choose another id or destroy it first")]
    SessionExists(SessionId),
    /// The server is full.
    #[error(
        "{max} sessions are alive, which is all this server takes: wait for a session to end or raise --max-sessions"
    )]
    SessionsFull {
        /// How many may be.
        max: usize,
    },
    /// An owner has its share of the server.
    #[error(
        "you have {max} sessions alive, which is all that this server gives one owner: destroy one, or have --max-sessions-per-owner raised"
    )]
    OwnerFull {
        /// How many may be.
        max: usize,
    },
    /// A tenant has its share of the server.
    #[error(
        "tenant {tenant} has {max} sessions alive, which is all that this server gives one tenant: destroy one, or have --max-sessions-per-tenant raised"
    )]
    TenantFull {
        /// Which.
        tenant: TenantId,
        /// How many may be.
        max: usize,
    },
    /// The caller may make no sessions for this tenant.
    #[error(
        "your API key may not use tenant {tenant}, only {allowed}: name one of those, or none for the first; or ask for a key that may (`k8e apikey create NAME --tenant {tenant}` on the server)"
    )]
    TenantDenied {
        /// Which was asked for.
        tenant: TenantId,
        /// Those that the caller may use.
        allowed: String,
    },
    /// The server does not show this machine's programs to sandboxes.
    #[error(
        "this server (--hardened) makes no sandboxes from the template `host`, which shows them all that this machine has in /usr and /opt: ask for another template, or have the server started with --allow-host-template"
    )]
    HostTemplateOff,
    /// Too many sandboxes are to be made.
    #[error(
        "so many sandboxes are being made that yours was not begun for {0:?}: try again in a moment"
    )]
    LaunchesFull(Duration),
    /// A session runs as much as it may.
    #[error("session {id} has {max} {what} under way, which is all it takes: wait for one to end")]
    SessionBusy {
        /// Which session.
        id: SessionId,
        /// What it has too many of.
        what: &'static str,
        /// How many may be.
        max: usize,
    },
    /// The session is not ready yet.
    #[error("session {0} is still being made: try again in a moment")]
    SessionNotReady(SessionId),
    /// Nothing in the session runs.
    #[error("session {0} is paused: resume it first")]
    SessionPaused(SessionId),
    /// Only what is active can be paused.
    #[error("session {id} is not active (phase={phase}): only an active session can be paused")]
    NotActive {
        /// Which session.
        id: SessionId,
        /// What it is.
        phase: &'static str,
    },
    /// Only what is paused can be resumed.
    #[error("session {id} is not paused (phase={phase}): there is nothing to resume")]
    NotPaused {
        /// Which session.
        id: SessionId,
        /// What it is.
        phase: &'static str,
    },
    /// It could not be paused, and goes on.
    #[error("the sandbox could not be paused and goes on: {}", chain(.0))]
    Freeze(#[source] DriverError),
    /// It could not be resumed, and stays paused.
    #[error("the sandbox could not be resumed and stays paused, try again or destroy it: {}", chain(.0))]
    Thaw(#[source] DriverError),
    /// What is wanted is not a sub-agent's to have.
    #[error(
        "session {id} is a sub-agent of {parent} and shares its {what}: do this to {parent} instead"
    )]
    SharedWithParent {
        /// Which session.
        id: SessionId,
        /// Whose sub-agent it is.
        parent: SessionId,
        /// What it shares.
        what: &'static str,
    },
    /// A sub-agent has no sub-agents.
    #[error("max depth 1 reached: {0} is a sub-agent itself and cannot have any")]
    TooDeep(SessionId),
    /// The session ended while it was used.
    #[error("session {id} not found: it ended meanwhile ({reason}); make a new one")]
    SessionEnded {
        /// Which session.
        id: SessionId,
        /// Why.
        reason: String,
    },
    /// No runtime here can do it.
    #[error("{0}")]
    Runtime(String),
    /// The interpreter of a language is missing.
    #[error("{program} is not in the sandbox's template: {hint}")]
    NoInterpreter {
        /// What is missing.
        program: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// The program to run is missing.
    #[error("program {program:?} not found in the sandbox: {}", no_program_hint(.program))]
    NoProgram {
        /// As it was asked for.
        program: String,
    },
    /// The request can never work as it is.
    #[error("{0}")]
    Invalid(String),
    /// A command that is over, or was started without input, takes none.
    #[error("the command takes no more input: {0}")]
    InputClosed(&'static str),
    /// The guest says that it could not do it, and why.
    #[error("{message}")]
    Guest {
        /// What it means to a caller.
        code: Code,
        /// Cleaned: what the guest says is not trusted.
        message: String,
    },
    /// The guest takes no more calls just now.
    #[error("the sandbox of session {0} takes no more calls just now: try again in a moment")]
    GuestBusy(SessionId),
    /// Nobody listens where the guest should.
    #[error("the agent in the sandbox of session {0} is gone")]
    GuestGone(SessionId),
    /// The guest broke the protocol, went silent, or hung up.
    #[error(
        "the sandbox's agent misbehaved: {what}; if that happens again, destroy session {id} and make a new one"
    )]
    GuestMisbehaved {
        /// Whose guest.
        id: SessionId,
        /// In words.
        what: String,
    },
    /// Making a sandbox failed, and nothing of it is left.
    #[error("the sandbox could not be made: {}", chain(.0))]
    Launch(#[source] DriverError),
    /// The way out of a sandbox could not be guarded, so it has none.
    #[error("the sandbox was made but its network could not be guarded: {}", chain(.0))]
    Network(#[source] EgressError),
    /// A new sandbox's guest did not answer.
    #[error("the sandbox was made but its agent did not answer: {0}")]
    Hello(String),
    /// Removing a sandbox failed.
    #[error("removing the sandbox failed, the next start of the server tries again: {0}")]
    Destroy(String),
    /// The records cannot be read or written.
    #[error("{}", chain(.0))]
    Store(#[from] StoreError),
    /// Only those who run the server may.
    #[error(
        "{0} only on the server itself: as root, or as a member of the socket's group, on its socket"
    )]
    NotAdministrator(&'static str),
    /// The key is none of ours, or not any more.
    #[error("invalid API key: it is unknown, deleted or expired; ask for a new one")]
    KeyInvalid,
    /// The certificate was taken back, or the key that it was given for.
    #[error("client certificate has been revoked: ask for a new API key and log in with it")]
    CertificateRevoked,
    /// The certificate's time is over.
    #[error("client certificate has expired: log in again")]
    CertificateExpired,
    /// There is no such key.
    #[error("API key {0} not found: `k8e apikey list` shows those there are")]
    KeyNotFound(String),
    /// There are as many keys as there may be.
    #[error("{max} API keys are there, which is all this server takes: delete some")]
    KeysFull {
        /// How many may be.
        max: usize,
    },
    /// There is no such secret of the caller's.
    #[error("secret {0} not found")]
    SecretNotFound(String),
    /// An owner has as many secrets as one may.
    #[error("you have {max} secrets, which is all that this server gives one owner: delete one")]
    SecretsFull {
        /// How many may be.
        max: usize,
    },
    /// A session's command cannot get a secret that it should.
    #[error(
        "secret {secret} for variable {env_var} not found: set it with `k8e secret set {secret}`, as the session's owner"
    )]
    SecretMissing {
        /// Which.
        secret: SecretName,
        /// For which variable.
        env_var: String,
    },
    /// No such approval, or it is another principal's: the two must not be told apart.
    #[error("approval {0} not found")]
    ApprovalNotFound(ApprovalId),
    /// Nobody decided in time. K8E's words.
    #[error("approval timed out after {}", crate::approvals::in_words(*.0))]
    ApprovalTimedOut(Duration),
    /// It is decided once.
    #[error(
        "approval {id} was {decision} by {by} already: a decision is not changed, have it asked again"
    )]
    ApprovalDecided {
        /// Which.
        id: ApprovalId,
        /// In a word.
        decision: &'static str,
        /// Whose it was.
        by: String,
    },
    /// Nobody can decide it any more.
    #[error(
        "approval {0} expired before anybody decided, or its session ended: have it asked again"
    )]
    ApprovalExpired(ApprovalId),
    /// Who asked does not answer.
    #[error(
        "approval {id} cannot be decided by who asked for it ({why}): use another key, or root on the server's own socket"
    )]
    SelfApproval {
        /// Which.
        id: ApprovalId,
        /// What tells that it is the same.
        why: &'static str,
    },
    /// There is no such snapshot of the caller's.
    #[error("snapshot {0} not found")]
    SnapshotNotFound(SnapshotName),
    /// An owner has as many snapshots as one may.
    #[error("you have {max} snapshots, which is all that this server gives one owner: delete one")]
    SnapshotsFull {
        /// How many may be.
        max: usize,
    },
    /// Services cannot be visited.
    #[error(
        "services cannot be exposed: this server has no listener for their visitors; restart it with an address that is free, as in `k8e server --expose-listen 127.0.0.1:50052`"
    )]
    NoExposeDoor,
    /// The runtime that was asked for, or is the default, is installed but does not work now.
    #[error(
        "runtime {kind} is installed here but does not work now, and nothing weaker is used in its place: {reason}; \
         it is tried again twice a minute{}",
        instead(.others)
    )]
    RuntimeBroken {
        /// Which.
        kind: RuntimeKind,
        /// Why, and what to do.
        reason: String,
        /// Those that work, for people; may be empty.
        others: String,
    },
    /// The server stops.
    #[error("the server is stopping: try again when it is back")]
    Stopping,
}

// === impl Error ===

impl Error {
    /// What it means to a caller.
    pub fn code(&self) -> Code {
        match self {
            Self::SessionNotFound(_)
            | Self::SessionOver { .. }
            | Self::RunNotFound(_)
            | Self::TerminalNotFound(_)
            | Self::KeyNotFound(_)
            | Self::SecretNotFound(_)
            | Self::ApprovalNotFound(_)
            | Self::SnapshotNotFound(_) => Code::NotFound,
            Self::NotAdministrator(_)
            | Self::CertificateRevoked
            | Self::SelfApproval { .. }
            | Self::TenantDenied { .. }
            | Self::HostTemplateOff
            | Self::TooDeep(_) => Code::Denied,
            Self::ApprovalTimedOut(_) => Code::Timeout,
            Self::ApprovalDecided { .. } | Self::ApprovalExpired(_) => Code::Precondition,
            Self::KeyInvalid | Self::CertificateExpired => Code::Unauthenticated,
            Self::SessionExists(_) => Code::Exists,
            Self::SessionsFull { .. }
            | Self::OwnerFull { .. }
            | Self::TenantFull { .. }
            | Self::LaunchesFull(_)
            | Self::KeysFull { .. }
            | Self::SecretsFull { .. }
            | Self::SnapshotsFull { .. }
            | Self::SessionBusy { .. }
            | Self::TerminalsFull { .. }
            | Self::GuestBusy(_) => Code::Exhausted,
            Self::SessionNotReady(_)
            | Self::SessionPaused(_)
            | Self::NotActive { .. }
            | Self::NotPaused { .. }
            | Self::SharedWithParent { .. }
            | Self::InputClosed(_)
            | Self::SecretMissing { .. }
            | Self::NoExposeDoor => Code::Precondition,
            Self::Runtime(_) | Self::NoInterpreter { .. } => Code::Unsupported,
            Self::NoProgram { .. } | Self::Invalid(_) => Code::Invalid,
            Self::Guest { code, .. } => *code,
            Self::SessionEnded { .. }
            | Self::GuestGone(_)
            | Self::GuestMisbehaved { .. }
            | Self::Hello(_)
            | Self::RuntimeBroken { .. }
            | Self::Stopping => Code::Unavailable,
            Self::Launch(cause) | Self::Freeze(cause) | Self::Thaw(cause) => cause.code(),
            Self::Destroy(_) | Self::Network(_) => Code::Internal,
            Self::Store(cause) => cause.code(),
        }
    }
}

/// What else a caller can ask for.
fn instead(others: &str) -> String {
    match others {
        "" => String::new(),
        others => format!(", or ask for another with --runtime: {others}"),
    }
}

/// A whole command line given as one argument is the usual reason.
fn no_program_hint(program: &str) -> &'static str {
    if program.contains(' ') {
        "it is one argument with spaces in it; give the program and each argument as a word of its own \
         (`k8e sandbox exec SESSION -- ls -la`), or a shell command line to `k8e sandbox run`"
    } else {
        "check its name and the PATH inside"
    }
}

/// An error and what caused it, as one line. Bounded: no chain of ours is deeper.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    const DEPTH_MAX: usize = 8;
    let mut text = error.to_string();
    let mut source = error.source();
    for _ in 0..DEPTH_MAX {
        let Some(cause) = source else { break };
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
