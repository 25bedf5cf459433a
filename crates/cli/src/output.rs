//! The one place that writes to standard output and standard error.

use crate::failure::Failure;
use serde::Serialize;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;

/// One compact JSON object, on a line.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let mut line = serde_json::to_vec(value)
        .map_err(|e| Failure::request(format!("cannot render the answer: {e}"), "internal"))?;
    line.push(b'\n');
    text(&line)
}

/// Bytes as they are, at once: for what is printed and then done.
pub(crate) fn text(bytes: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(|e| Failure::io("write to standard output", &e))
}

/// A line for the person at the terminal.
pub(crate) fn note(line: &str) {
    // Nobody reads it: nothing to be done about that.
    let _ = writeln!(io::stderr(), "k8e: {line}");
}

/// Asks the person at the terminal for something.
pub(crate) fn prompt(text: &str) {
    let mut stderr = io::stderr();
    let _ = write!(stderr, "{text}");
    let _ = stderr.flush();
}

/// Where a long command has got to, for the person at the terminal; each line takes the place of
/// the one before, and an empty one is the end of it.
pub(crate) fn progress(line: &str) {
    let mut stderr = io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[K{line}");
        let _ = stderr.flush();
    }
}

/// `{"error":…,"detail":…}` on standard output, for whoever parses it.
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

/// Tells why a command failed and gives its exit code.
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

/// Bytes as they come, without holding up the connection when nobody reads them.
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

/// Flushed every time, so that what a command prints is seen when it prints it.
async fn write(to: &mut (impl tokio::io::AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), Failure> {
    let result = async {
        to.write_all(bytes).await?;
        to.flush().await
    };
    result
        .await
        .map_err(|e| Failure::io("write the output", &e))
}
