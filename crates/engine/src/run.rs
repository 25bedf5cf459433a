//! Running a command: find or make the session, start, stream, tell how it ended. One call, closing is cancelling.

mod input;
mod outcome;
mod start;
mod stream;

pub use input::RunInput;

use crate::guest::Call;
use crate::live::Live;
use crate::recorder::Transcriber;
use crate::sessions::{Owned, Shared};
use bytes::Bytes;
use input::SharedInputs;
use k8e_model::{Command, LimitEvents, Outcome, RuntimeKind, SessionId, SessionSpec};
use std::sync::Arc;
use std::time::Duration;
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
    /// In the tenant's active session, which is made when there is none.
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
    /// A session for this run alone: goes with it.
    owned: Option<Owned>,
    started: Instant,
    timeout: Option<Duration>,
    output_bytes_max: Option<u64>,
    limits_before: LimitEvents,
    stdout_bytes: u64,
    stderr_bytes: u64,
    /// What a guest sent after the command's time and grace were over.
    late_bytes: u64,
    /// Since when nothing came, while somebody waited.
    waiting_since: Option<Instant>,
    /// Output that came and is not told yet: dropping a future of [`Run::next`] loses none.
    at_hand: Option<(Stream, Bytes)>,
    transcriber: Transcriber,
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
