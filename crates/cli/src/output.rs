//! Writes to standard output and standard error; no other module does.

use crate::failure::Failure;
use serde::Serialize;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;

/// Prints a compact JSON object on one line.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let mut line = serde_json::to_vec(value)
        .map_err(|e| Failure::request(format!("cannot render the answer: {e}"), "internal"))?;
    line.push(b'\n');
    text(&line)
}

/// Prints bytes and flushes.
pub(crate) fn text(bytes: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(|e| Failure::io("write to standard output", &e))
}

/// Prints a line on standard error.
pub(crate) fn note(line: &str) {
    // A closed standard error cannot be reported.
    let _ = writeln!(io::stderr(), "k8e: {line}");
}

/// Prints a prompt on standard error.
pub(crate) fn prompt(text: &str) {
    let mut stderr = io::stderr();
    let _ = write!(stderr, "{text}");
    let _ = stderr.flush();
}

/// Progress of a long command, on a terminal only; each line replaces the one before, an empty one removes it.
pub(crate) fn progress(line: &str) {
    let mut stderr = io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[K{line}");
        let _ = stderr.flush();
    }
}

/// Prints `{"error":…,"detail":…}` on standard output, for programs.
pub(crate) fn error_json(error: &str, detail: &str, retry_after: Option<Duration>) {
    #[derive(Serialize)]
    struct ErrorJson<'a> {
        error: &'a str,
        detail: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        retry_after_ms: Option<u128>,
    }
    let retry_after_ms = retry_after.map(|after| after.as_millis());
    let _ = json(&ErrorJson {
        error,
        detail,
        retry_after_ms,
    });
}

/// Reports a failure and returns the exit code.
pub(crate) fn failure(failure: &Failure, as_json: bool) -> ExitCode {
    if let Failure::Told {
        error,
        detail,
        retry_after,
        ..
    } = failure
    {
        if as_json {
            error_json(error, detail, *retry_after);
        }
        note(&format!("{error} ({detail})"));
    }
    ExitCode::from(failure.exit())
}

/// Streams bytes to standard output and standard error without blocking the runtime.
pub(crate) struct Raw {
    stdout: tokio::io::Stdout,
    stderr: tokio::io::Stderr,
}

// === impl Raw ===

impl Raw {
    pub(crate) fn new() -> Self {
        Self {
            stdout: tokio::io::stdout(),
            stderr: tokio::io::stderr(),
        }
    }

    pub(crate) async fn stdout(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        write(&mut self.stdout, bytes).await
    }

    pub(crate) async fn stderr(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        write(&mut self.stderr, bytes).await
    }
}

/// Writes and flushes, so that output appears when the command prints it.
async fn write(to: &mut (impl tokio::io::AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), Failure> {
    let result = async {
        to.write_all(bytes).await?;
        to.flush().await
    };
    result
        .await
        .map_err(|e| Failure::io("write the output", &e))
}
