//! Errors of the session service: message for users and status code.

use k8e_driver::DriverError;
use k8e_egress::EgressError;
use k8e_model::{
    ApprovalId, Code, Digest, RunId, RuntimeKind, SecretName, SessionId, SnapshotName, Template,
    TemplateName, TenantId, TerminalId,
};
use k8e_store::StoreError;
use std::time::Duration;

/// Error of an operation. `Display` is the message for users, [`Error::code`] its status code.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such session, or it is another principal's: the two must not be told apart.
    #[error("session {0} not found")]
    SessionNotFound(SessionId),
    /// The session has ended; its record, kept for the retention time, has the reason.
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
    /// No such kept command, or it has ended.
    #[error("no running command {0} in this session")]
    CommandNotFound(String),
    /// Too many readers of one command.
    #[error("{max} clients read this command already: disconnect one")]
    CommandReadersFull {
        /// The limit.
        max: usize,
    },
    /// The driver has no counters, or the sandbox does not run any more.
    #[error("the runtime of this session does not count what it uses")]
    NoMetrics,
    /// No such context of the code interpreter.
    #[error("context {0} not found")]
    ContextNotFound(String),
    /// Too many contexts in one session.
    #[error("this session has {max} code contexts, which is all it takes: remove one")]
    ContextsFull {
        /// The limit.
        max: usize,
    },
    /// Too many executions wait in one context.
    #[error(
        "{max} executions wait for this context already: wait for one to end, or use another context"
    )]
    ContextBusy {
        /// The limit.
        max: usize,
    },
    /// A kernel of the code interpreter did not start.
    #[error("the {language} kernel did not start: {reason}")]
    KernelFailed {
        /// Its language.
        language: &'static str,
        /// Why.
        reason: String,
    },
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
        /// The tenant at its limit.
        tenant: TenantId,
        /// How many may be.
        max: usize,
    },
    /// The caller may make no sessions for this tenant.
    #[error(
        "your API key may not use tenant {tenant}, only {allowed}: name one of those, or none for the first; or ask for a key that may (`k8e apikey create NAME --tenant {tenant}` on the server)"
    )]
    TenantDenied {
        /// The tenant that the request names.
        tenant: TenantId,
        /// Tenants that the caller may use, for people.
        allowed: String,
    },
    /// The server does not show this machine's programs to sandboxes.
    #[error(
        "this server (--hardened) makes no sandboxes from the template `host`, which shows them all that this machine has in /usr and /opt: ask for another template, or have the server started with --allow-host-template"
    )]
    HostTemplateOff,
    /// No such template.
    #[error(
        "template {0} is not known here: `k8e template list` shows what is, `k8e template create` makes one"
    )]
    TemplateNotFound(Template),
    /// Sessions stand on it.
    #[error(
        "template {name} is used by {sessions} sessions: destroy them first, or wait for their end"
    )]
    TemplateInUse {
        /// Which.
        name: TemplateName,
        /// How many.
        sessions: usize,
    },
    /// There are as many as there may be.
    #[error("this server has {max} templates, which is all it keeps: delete one first")]
    TemplatesFull {
        /// How many may be.
        max: usize,
    },
    /// The disk space for templates is used up.
    #[error(
        "the templates of this server take all of the {max} bytes that they may: delete one first, or have the server started with a larger --templates-disk"
    )]
    TemplatesDiskFull {
        /// How many bytes may be.
        max: u64,
    },
    /// Nothing here unpacks layers.
    #[error("this server has no place for images: there is no template but `host`")]
    NoImages,
    /// The image cannot be fetched or read.
    #[error("{0}")]
    Image(#[from] k8e_image::ImageError),
    /// A layer cannot be unpacked.
    #[error("layer {diff_id}: {}", chain(.source))]
    Layer {
        /// Which.
        diff_id: Digest,
        /// Why.
        source: k8e_driver::DriverError,
    },
    /// It took too long.
    #[error("the template was not made within {0:?}: the registry or the connection is too slow")]
    TemplateTimeout(Duration),
    /// Too many sandboxes are to be made.
    #[error(
        "so many sandboxes are being made that yours was not begun for {0:?}: try again in a moment"
    )]
    LaunchesFull(Duration),
    /// A per-session concurrency limit is reached.
    #[error("session {id} has {max} {what} under way, which is all it takes: wait for one to end")]
    SessionBusy {
        /// Which session.
        id: SessionId,
        /// What it has too many of, in the plural.
        what: &'static str,
        /// How many may be.
        max: usize,
    },
    /// The session is not ready yet.
    #[error("session {0} is still being made: try again in a moment")]
    SessionNotReady(SessionId),
    /// The session is paused and takes no calls.
    #[error("session {0} is paused: resume it first")]
    SessionPaused(SessionId),
    /// Pause of a session that is not active.
    #[error("session {id} is not active (phase={phase}): only an active session can be paused")]
    NotActive {
        /// Which session.
        id: SessionId,
        /// Its current phase.
        phase: &'static str,
    },
    /// Resume of a session that is not paused.
    #[error("session {id} is not paused (phase={phase}): there is nothing to resume")]
    NotPaused {
        /// Which session.
        id: SessionId,
        /// Its current phase.
        phase: &'static str,
    },
    /// Fork of a session with open streams, which cannot be in two places.
    #[error(
        "session {id} cannot be forked now: {why}; wait for its commands, terminals and connections to end, or run them in the background (`k8e sandbox run --background`)"
    )]
    ForkBusy {
        /// Which session.
        id: SessionId,
        /// What is open.
        why: String,
    },
    /// Fork of a paused session whose memory is not on disk.
    #[error(
        "session {0} is paused with its memory kept, which cannot be copied: resume it, then fork it"
    )]
    ForkFrozen(SessionId),
    /// Freezing the sandbox failed; the session stays active.
    #[error("the sandbox could not be paused and goes on: {}", chain(.0))]
    Freeze(#[source] DriverError),
    /// Thawing the sandbox failed; the session stays paused.
    #[error("the sandbox could not be resumed and stays paused, try again or destroy it: {}", chain(.0))]
    Thaw(#[source] DriverError),
    /// The operation is on something that a sub-agent shares with its parent.
    #[error(
        "session {id} is a sub-agent of {parent} and shares its {what}: do this to {parent} instead"
    )]
    SharedWithParent {
        /// Which session.
        id: SessionId,
        /// Its parent session.
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
        /// Why it ended.
        reason: String,
    },
    /// The requested runtime is not available, or none is.
    #[error("{0}")]
    Runtime(String),
    /// The interpreter of a language is missing.
    #[error("{program} is not in the sandbox's template: {hint}")]
    NoInterpreter {
        /// The interpreter's program name.
        program: &'static str,
        /// How to get it, for people.
        hint: &'static str,
    },
    /// The program to run is missing.
    #[error("program {program:?} not found in the sandbox: {}", no_program_hint(.program))]
    NoProgram {
        /// The program's name, as requested.
        program: String,
    },
    /// Invalid argument: the request can never succeed as it is.
    #[error("{0}")]
    Invalid(String),
    /// A command that is over, or was started without input, takes none.
    #[error("the command takes no more input: {0}")]
    InputClosed(&'static str),
    /// Error reply of the guest.
    #[error("{message}")]
    Guest {
        /// Status code for the caller.
        code: Code,
        /// Sanitized: the guest is not trusted.
        message: String,
    },
    /// Backpressure: the guest's connection queue is full.
    #[error("the sandbox of session {0} takes no more calls just now: try again in a moment")]
    GuestBusy(SessionId),
    /// Connection refused: the guest does not listen any more.
    #[error("the agent in the sandbox of session {0} is gone")]
    GuestGone(SessionId),
    /// The guest broke the protocol, went silent, or hung up.
    #[error(
        "the sandbox's agent misbehaved: {what}; if that happens again, destroy session {id} and make a new one"
    )]
    GuestMisbehaved {
        /// Session of the guest.
        id: SessionId,
        /// The protocol violation, for people.
        what: String,
    },
    /// Making a sandbox failed, and nothing of it is left.
    #[error("the sandbox could not be made: {}", chain(.0))]
    Launch(#[source] DriverError),
    /// The egress proxy could not be attached; the sandbox has no network.
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
    /// API key unknown, deleted or expired: the three must not be told apart.
    #[error("invalid API key: it is unknown, deleted or expired; ask for a new one")]
    KeyInvalid,
    /// The certificate, or the key that it was issued for, was revoked.
    #[error("client certificate has been revoked: ask for a new API key and log in with it")]
    CertificateRevoked,
    /// The certificate has expired.
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
        /// Name of the secret.
        secret: SecretName,
        /// Environment variable that the secret is for.
        env_var: String,
    },
    /// No such approval, or it is another principal's: the two must not be told apart.
    #[error("approval {0} not found")]
    ApprovalNotFound(ApprovalId),
    /// The approval's deadline passed without a decision. The text is that of the Go K8E.
    #[error("approval timed out after {}", crate::approvals::in_words(*.0))]
    ApprovalTimedOut(Duration),
    /// The approval is decided already, and a decision is final.
    #[error(
        "approval {id} was {decision} by {by} already: a decision is not changed, have it asked again"
    )]
    ApprovalDecided {
        /// The approval.
        id: ApprovalId,
        /// `approved` or `rejected`.
        decision: &'static str,
        /// Principal that decided.
        by: String,
    },
    /// The approval expired, or its session ended.
    #[error("approval {0} expired without a decision, or its session ended: have it asked again")]
    ApprovalExpired(ApprovalId),
    /// Separation of duties: the requester cannot decide its own approval.
    #[error(
        "approval {id} cannot be decided by who asked for it ({why}): use another key, or root on the server's own socket"
    )]
    SelfApproval {
        /// The approval.
        id: ApprovalId,
        /// What requester and decider have in common.
        why: &'static str,
    },
    /// There is no such snapshot of the caller's.
    #[error("snapshot {0} not found")]
    SnapshotNotFound(SnapshotName),
    /// The name is taken.
    #[error("snapshot {0} exists already: choose another name, delete it, or save with --replace")]
    SnapshotExists(SnapshotName),
    /// The name is in the registry of `sandbox.v1` clients, or the other way round.
    #[error("the name {0} stands for a snapshot of another kind: choose another")]
    SnapshotNameTaken(SnapshotName),
    /// The snapshots of a tenant take as much as they may.
    #[error(
        "the snapshots of tenant {tenant} take {bytes} MiB of the {max} MiB that they may: delete some, or restart the server with a higher --snapshot-disk-per-tenant"
    )]
    TenantSnapshotsFull {
        /// The tenant.
        tenant: TenantId,
        /// What they take, in MiB.
        bytes: u64,
        /// What they may, in MiB.
        max: u64,
    },
    /// Saving, restoring or transferring took too long.
    #[error("the snapshot was not done within {0:?}")]
    SnapshotTimeout(Duration),
    /// The chunk store failed, or what was to be stored is not valid.
    #[error(transparent)]
    Snapshot(#[from] k8e_snapshot::SnapshotError),
    /// An owner has as many snapshots as one may.
    #[error("you have {max} snapshots, which is all that this server gives one owner: delete one")]
    SnapshotsFull {
        /// How many may be.
        max: usize,
    },
    /// The server has no listener for exposed services.
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
        /// The runtime.
        kind: RuntimeKind,
        /// Result of its last probe.
        reason: String,
        /// Usable runtimes, for people; may be empty.
        others: String,
    },
    /// The server is shutting down.
    #[error("the server is stopping: try again when it is back")]
    Stopping,
}

// === impl Error ===

impl Error {
    /// Status code for callers, as gRPC and HTTP render it.
    pub fn code(&self) -> Code {
        match self {
            Self::SessionNotFound(_)
            | Self::SessionOver { .. }
            | Self::RunNotFound(_)
            | Self::TerminalNotFound(_)
            | Self::CommandNotFound(_)
            | Self::ContextNotFound(_)
            | Self::KeyNotFound(_)
            | Self::SecretNotFound(_)
            | Self::ApprovalNotFound(_)
            | Self::SnapshotNotFound(_)
            | Self::TemplateNotFound(_) => Code::NotFound,
            Self::NotAdministrator(_)
            | Self::CertificateRevoked
            | Self::SelfApproval { .. }
            | Self::TenantDenied { .. }
            | Self::HostTemplateOff
            | Self::TooDeep(_) => Code::Denied,
            Self::ApprovalTimedOut(_) | Self::TemplateTimeout(_) | Self::SnapshotTimeout(_) => {
                Code::Timeout
            }
            Self::ApprovalDecided { .. } | Self::ApprovalExpired(_) => Code::Precondition,
            Self::KeyInvalid | Self::CertificateExpired => Code::Unauthenticated,
            Self::SessionExists(_) | Self::SnapshotExists(_) | Self::SnapshotNameTaken(_) => {
                Code::Exists
            }
            Self::Snapshot(cause) => snapshot_code(cause),
            Self::SessionsFull { .. }
            | Self::OwnerFull { .. }
            | Self::TenantFull { .. }
            | Self::LaunchesFull(_)
            | Self::KeysFull { .. }
            | Self::SecretsFull { .. }
            | Self::SnapshotsFull { .. }
            | Self::TenantSnapshotsFull { .. }
            | Self::TemplatesFull { .. }
            | Self::TemplatesDiskFull { .. }
            | Self::SessionBusy { .. }
            | Self::TerminalsFull { .. }
            | Self::CommandReadersFull { .. }
            | Self::ContextsFull { .. }
            | Self::ContextBusy { .. }
            | Self::GuestBusy(_) => Code::Exhausted,
            Self::SessionNotReady(_)
            | Self::SessionPaused(_)
            | Self::NotActive { .. }
            | Self::NotPaused { .. }
            | Self::ForkBusy { .. }
            | Self::ForkFrozen(_)
            | Self::SharedWithParent { .. }
            | Self::InputClosed(_)
            | Self::SecretMissing { .. }
            | Self::TemplateInUse { .. }
            | Self::NoExposeDoor => Code::Precondition,
            Self::Runtime(_) | Self::NoInterpreter { .. } | Self::NoImages | Self::NoMetrics => {
                Code::Unsupported
            }
            Self::Image(cause) => cause.code(),
            Self::Layer { source, .. } => source.code(),
            Self::NoProgram { .. } | Self::Invalid(_) => Code::Invalid,
            Self::Guest { code, .. } => *code,
            Self::SessionEnded { .. }
            | Self::GuestGone(_)
            | Self::GuestMisbehaved { .. }
            | Self::Hello(_)
            | Self::RuntimeBroken { .. }
            | Self::Stopping => Code::Unavailable,
            Self::Launch(cause) | Self::Freeze(cause) | Self::Thaw(cause) => cause.code(),
            Self::Destroy(_) | Self::Network(_) | Self::KernelFailed { .. } => Code::Internal,
            Self::Store(cause) => cause.code(),
        }
    }
}

fn snapshot_code(error: &k8e_snapshot::SnapshotError) -> Code {
    use k8e_snapshot::SnapshotError as E;
    match error {
        E::Full(_) | E::Quota(_) => Code::Exhausted,
        E::Invalid(_) => Code::Invalid,
        E::Source(_) => Code::Unavailable,
        // Also those that are added later.
        E::Io { .. } | E::Damaged(_) | _ => Code::Internal,
    }
}

/// Hint with the usable runtimes; empty when there are none.
fn instead(others: &str) -> String {
    match others {
        "" => String::new(),
        others => format!(", or ask for another with --runtime: {others}"),
    }
}

/// Hint for a missing program: a whole command line given as one argument is the usual cause.
fn no_program_hint(program: &str) -> &'static str {
    if program.contains(' ') {
        "it is one argument with spaces in it; give the program and each argument as a word of its own \
         (`k8e sandbox exec SESSION -- ls -la`), or a shell command line to `k8e sandbox run`"
    } else {
        "check its name and the PATH inside"
    }
}

/// An error and its chain of sources, as one line; at most `DEPTH_MAX` sources.
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
