//! Running a command: find or make the session, start, stream, tell how it ended. One call, closing is cancelling.

mod foreground;
mod input;
mod outcome;
mod start;
mod stream;

pub use input::RunInput;

pub(crate) use foreground::Foreground;
pub(crate) use start::{SESSION_VARIABLE, exec, refused, shown};

use crate::guest::Call;
use crate::live::Live;
use crate::recorder::Transcriber;
use crate::runs::Kept;
use crate::sessions::Shared;
use bytes::Bytes;
use foreground::RunNumber;
use input::SharedInputs;
use k8e_egress::FlowMark;
use k8e_model::{Command, LimitEvents, Outcome, RuntimeKind, SessionId, SessionSpec};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// What to run, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRequest {
    /// Where.
    pub target: RunTarget,
    /// What. Its timeout is final: the doors fill in defaults.
    pub command: Command,
}

/// Where to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunTarget {
    /// In exactly this session.
    Existing(SessionId),
    /// In the session that an earlier call with this target made for the same principal, client kind and
    /// tenant with the same options; it is made when there is none.
    Tenant(SessionSpec),
    /// In a session made for this run and destroyed after it.
    Fresh(SessionSpec),
}

/// What a run says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunEvent {
    /// First.
    Started {
        /// Of the command, inside the sandbox.
        pid: i32,
    },
    /// Bytes of its standard output.
    Stdout(Bytes),
    /// Bytes of its standard error.
    Stderr(Bytes),
    /// Last.
    Exited(Outcome),
}

/// A command under way. Dropping it ends the command and everything it started.
pub struct Run {
    /// Where it runs.
    pub session_id: SessionId,
    /// Whether the session was made for it.
    pub session_created: bool,
    /// What isolates it.
    pub runtime: RuntimeKind,
    shared: Arc<Shared>,
    live: Arc<Live>,
    stage: Stage,
    /// None when the run is over.
    call: Option<Call>,
    inputs: Option<SharedInputs>,
    input: Option<RunInput>,
    /// Of one whose caller waits for it.
    foreground: Option<RunNumber>,
    stop: watch::Receiver<bool>,
    started: Instant,
    timeout: Option<Duration>,
    output_bytes_max: Option<u64>,
    limits_before: LimitEvents,
    egress_before: FlowMark,
    stdout_bytes: u64,
    stderr_bytes: u64,
    /// What a guest sent after the command's time and grace were over.
    late_bytes: u64,
    /// Since when nothing came, while somebody waited.
    waiting_since: Option<Instant>,
    /// Output that came and is not told yet: dropping a future of [`Run::next`] loses none.
    at_hand: Option<(Stream, Bytes)>,
    transcriber: Transcriber,
    /// Whether what it writes goes into the transcript.
    transcribed: bool,
    /// Of one that its guest keeps: then dropping it is only to follow it no longer.
    background: Option<Arc<Kept>>,
}

/// A command that a guest has started.
pub(crate) struct Begun {
    pub(crate) call: Call,
    pub(crate) pid: i32,
    pub(crate) started: Instant,
    pub(crate) timeout: Option<Duration>,
    pub(crate) output_bytes_max: Option<u64>,
    pub(crate) stdin: bool,
    pub(crate) limits_before: LimitEvents,
    pub(crate) egress_before: FlowMark,
}

#[derive(Clone, Copy)]
enum Stream {
    Stdout,
    Stderr,
}

/// How far a run is.
enum Stage {
    Started(i32),
    Streaming,
    /// The guest hung up; until then its driver may say why.
    HungUp(Instant),
    Over,
}

// === impl RunTarget ===

impl RunTarget {
    /// The session, if one was named; else nothing.
    pub(crate) fn named(&self) -> &str {
        match self {
            Self::Existing(id) => id.as_str(),
            Self::Tenant(_) | Self::Fresh(_) => "",
        }
    }
}

// === impl Run ===

impl Run {
    /// In a session that was there before.
    pub(crate) fn new(shared: &Arc<Shared>, live: Arc<Live>, begun: Begun) -> Self {
        let mut call = begun.call;
        let (inputs, input) = SharedInputs::split(call.inputs.take(), begun.stdin);
        Self {
            session_id: live.record.id.clone(),
            session_created: false,
            runtime: live.record.runtime,
            shared: Arc::clone(shared),
            live,
            stage: Stage::Started(begun.pid),
            call: Some(call),
            inputs: Some(inputs),
            input: Some(input),
            foreground: None,
            stop: shared.stop_signal(),
            started: begun.started,
            timeout: begun.timeout,
            output_bytes_max: begun.output_bytes_max,
            limits_before: begun.limits_before,
            egress_before: begun.egress_before,
            stdout_bytes: 0,
            stderr_bytes: 0,
            late_bytes: 0,
            waiting_since: None,
            at_hand: None,
            transcriber: Transcriber::default(),
            transcribed: true,
            background: None,
        }
    }

    /// The same, of one that its guest keeps.
    pub(crate) fn in_background(mut self, kept: &Arc<Kept>, transcribed: bool) -> Self {
        self.background = Some(Arc::clone(kept));
        self.transcribed = transcribed;
        self
    }
}
