//! Execution of a command: session selection, start, streaming, outcome. A foreground run is one call: closing it
//! cancels the command.

mod foreground;
mod input;
mod outcome;
mod start;
mod stream;

pub use input::RunInput;

pub(crate) use foreground::Foreground;
pub(crate) use start::{SESSION_VARIABLE, exec, refused, shown};

use crate::background::TrackedRun;
use crate::guest::Call;
use crate::live::Live;
use crate::recorder::Transcriber;
use crate::sessions::Shared;
use bytes::Bytes;
use foreground::RunNumber;
use input::SharedInputs;
use k8e_egress::FlowMark;
use k8e_model::{LimitEvents, Outcome, RuntimeKind, SessionId};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Event of a run: `Started`, then output, then `Exited`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunEvent {
    /// First event.
    Started {
        /// Process id of the command inside the sandbox.
        pid: i32,
    },
    /// Bytes of its standard output.
    Stdout(Bytes),
    /// Bytes of its standard error.
    Stderr(Bytes),
    /// Last event.
    Exited(Outcome),
}

/// A running command. Dropping it kills the command and everything it started.
pub struct Run {
    /// Session that it runs in.
    pub session_id: SessionId,
    /// Whether the session was created for this run.
    pub session_created: bool,
    /// Runtime of the session.
    pub runtime: RuntimeKind,
    shared: Arc<Shared>,
    live: Arc<Live>,
    stage: Stage,
    /// The guest's call; none after the end.
    call: Option<Call>,
    inputs: Option<SharedInputs>,
    input: Option<RunInput>,
    /// Entry in the registry of foreground runs; none for a background run.
    foreground: Option<RunNumber>,
    stop: watch::Receiver<bool>,
    started: Instant,
    timeout: Option<Duration>,
    output_bytes_max: Option<u64>,
    limits_before: LimitEvents,
    egress_before: FlowMark,
    stdout_bytes: u64,
    stderr_bytes: u64,
    /// Output bytes after timeout and grace period, bounded by `LATE_BYTES_MAX`.
    late_bytes: u64,
    /// Start of the current wait for a guest message; none while none is waited for.
    waiting_since: Option<Instant>,
    /// Output received and not yet returned: makes [`Run::next`] cancel safe.
    at_hand: Option<(Stream, Bytes)>,
    transcriber: Transcriber,
    /// Whether output is written to the transcript.
    transcribed: bool,
    /// Set for a background run: dropping `Run` then only stops following it.
    background: Option<Arc<TrackedRun>>,
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
    /// The guest closed the connection; deadline for the driver to report the sandbox's death.
    HungUp(Instant),
    Over,
}

// === impl Run ===

impl Run {
    /// A run in an existing session.
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

    /// Leaves its output out of the transcript: for a protocol that is of no use to a reader.
    pub(crate) fn without_transcript(mut self) -> Self {
        self.transcribed = false;
        self
    }

    /// Marks the run as a background run, which the guest keeps.
    pub(crate) fn in_background(mut self, tracked: &Arc<TrackedRun>, transcribed: bool) -> Self {
        self.background = Some(Arc::clone(tracked));
        self.transcribed = transcribed;
        self
    }
}
