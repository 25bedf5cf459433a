//! Background runs: the record of a command that outlives the call that started it.

use crate::{Error, LimitKind, Outcome, RunId, RunStatus, SessionId, UnixMillis};
use std::str::FromStr;
use std::time::Duration;

/// Output kept of each stream of a background run, as `sandbox.v1` clients expect.
pub const BACKGROUND_OUTPUT_BYTES_MAX: u64 = 1024 * 1024;

/// A background run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackgroundRun {
    /// Random id.
    pub id: RunId,
    /// Its session, whose owner may see it.
    pub session: SessionId,
    /// Its status.
    pub status: BackgroundStatus,
    /// Reason of the status; may be empty.
    pub reason: String,
    /// Name of the program, for display.
    pub program: String,
    /// Timeout; `None` is no limit.
    pub timeout: Option<Duration>,
    /// When it started.
    pub started_at: UnixMillis,
    /// When it ended.
    pub ended_at: Option<UnixMillis>,
    /// 128+n when a signal ended it; 0 while it runs.
    pub exit_code: i32,
    /// 0 when it exited by itself.
    pub signal: i32,
    /// From start to end, or so far.
    pub duration: Duration,
    /// The beginning of its standard output.
    pub stdout: Vec<u8>,
    /// The beginning of its standard error.
    pub stderr: Vec<u8>,
    /// Whether there was more.
    pub stdout_truncated: bool,
    /// Whether there was more.
    pub stderr_truncated: bool,
    /// Limits that were hit while it ran.
    pub limits_hit: Vec<LimitKind>,
}

/// Status of a background run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackgroundStatus {
    /// In progress.
    Running,
    /// It ended by itself, whatever its exit code.
    Completed,
    /// Killed at its timeout.
    TimedOut,
    /// Killed because the sandbox reached its memory limit.
    OomKilled,
    /// Cancelled, or its session was destroyed.
    Cancelled,
    /// Its sandbox failed.
    Failed,
    /// It ended while no server was running, and its result is unknown.
    Lost,
}

// === impl BackgroundRun ===

impl BackgroundRun {
    /// A run that starts now.
    pub fn new(
        session: SessionId,
        program: String,
        timeout: Option<Duration>,
        now: UnixMillis,
    ) -> Self {
        Self {
            id: RunId::random(),
            session,
            status: BackgroundStatus::Running,
            reason: String::new(),
            program,
            timeout,
            started_at: now,
            ended_at: None,
            exit_code: 0,
            signal: 0,
            duration: Duration::ZERO,
            stdout: Vec::new(),
            stderr: Vec::new(),
            stdout_truncated: false,
            stderr_truncated: false,
            limits_hit: Vec::new(),
        }
    }

    /// Sets the result.
    pub fn end(&mut self, outcome: Outcome) {
        self.status = outcome.status.into();
        self.exit_code = outcome.exit_code;
        self.signal = outcome.signal;
        self.duration = outcome.duration;
        self.stdout_truncated = outcome.stdout_truncated;
        self.stderr_truncated = outcome.stderr_truncated;
        self.limits_hit = outcome.limits_hit;
    }

    /// A copy without its output.
    pub fn without_output(&self) -> Self {
        Self {
            stdout: Vec::new(),
            stderr: Vec::new(),
            ..self.clone()
        }
    }
}

// === impl BackgroundStatus ===

impl BackgroundStatus {
    const ALL: [Self; 7] = [
        Self::Running,
        Self::Completed,
        Self::TimedOut,
        Self::OomKilled,
        Self::Cancelled,
        Self::Failed,
        Self::Lost,
    ];

    /// As in responses and in the store.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Completed => RunStatus::Completed.as_str(),
            Self::TimedOut => RunStatus::TimedOut.as_str(),
            Self::OomKilled => RunStatus::OomKilled.as_str(),
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Lost => "lost",
        }
    }
}

impl From<RunStatus> for BackgroundStatus {
    fn from(status: RunStatus) -> Self {
        match status {
            RunStatus::Completed => Self::Completed,
            RunStatus::TimedOut => Self::TimedOut,
            RunStatus::OomKilled => Self::OomKilled,
        }
    }
}

impl FromStr for BackgroundStatus {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|status| status.as_str() == text);
        known.ok_or_else(|| Error::invalid(format!("{text:?} is no status of a run")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_is_read_as_it_is_written() {
        for status in BackgroundStatus::ALL {
            assert_eq!(status.as_str().parse::<BackgroundStatus>().unwrap(), status);
        }
        assert!("asleep".parse::<BackgroundStatus>().is_err());
    }
}
