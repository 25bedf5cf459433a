//! Starting this machine's server in the background (D14).
//!
//! Two clients that do so at once are harmless: the second server finds the data directory taken
//! and exits, and both clients connect to the first.

use crate::Globals;
use crate::failure::Failure;
use crate::output;
use k8e_api::client::{Client, Endpoint};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server that has many sandboxes to find again may need seconds.
const READY_WITHIN: Duration = Duration::from_secs(20);
const POLL_PAUSE: Duration = Duration::from_millis(10);

/// Started again and again, the log would grow without end; one older one is kept.
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// What of the log is shown when the server did not start.
const LOG_TAIL_BYTES: u64 = 4096;
const LOG_TAIL_LINES: usize = 8;

pub(super) async fn start(globals: &Globals, endpoint: &Endpoint) -> Result<Client, Failure> {
    let log = globals.data_dir.join("server.log");
    let mut server = spawn(&globals.data_dir, &log).map_err(|e| {
        let dir = globals.data_dir.display();
        Failure::unreachable(
            format!(
                "cannot start a k8e server in {dir}: {e}; choose another directory with --data-dir"
            ),
            "autostart",
        )
    })?;
    output::note(&format!(
        "started a server in the background (pid {}, log {})",
        server.id(),
        log.display()
    ));
    wait_until_ready(&mut server, endpoint, &log).await
}

fn spawn(data_dir: &Path, log: &Path) -> io::Result<Child> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(data_dir)?;
    if log.metadata().is_ok_and(|log| log.len() > LOG_BYTES_MAX) {
        std::fs::rename(log, log.with_extension("log.1"))?;
    }
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(log)?;
    // `--detached` leaves our terminal session, so that our end is not the server's.
    Command::new(std::env::current_exe()?)
        .arg("--data-dir")
        .arg(std::path::absolute(data_dir)?)
        .args(["server", "--detached"])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
}

async fn wait_until_ready(
    server: &mut Child,
    endpoint: &Endpoint,
    log: &Path,
) -> Result<Client, Failure> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        // Asked before connecting: a server that lost the race exits while another answers.
        let ended = server.try_wait().ok().flatten();
        if let Ok(client) = Client::connect(endpoint).await {
            return Ok(client);
        }
        if let Some(status) = ended {
            return Err(failed(&format!("the server ended at once ({status})"), log));
        }
        if Instant::now() > deadline {
            let waited = READY_WITHIN.as_secs();
            return Err(failed(
                &format!("the server does not answer after {waited} s"),
                log,
            ));
        }
        tokio::time::sleep(POLL_PAUSE).await;
    }
}

fn failed(what: &str, log: &Path) -> Failure {
    let tail = tail(log).unwrap_or_default();
    Failure::unreachable(
        format!("{what}; its log {} ends with:\n{tail}", log.display()),
        "autostart",
    )
}

fn tail(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("server.log");
        let text: String = (0..10_000).map(|i| format!("line {i}\n")).collect();
        std::fs::write(&log, text).unwrap();
        let tail = tail(&log).unwrap();
        assert_eq!(tail.lines().count(), LOG_TAIL_LINES);
        assert!(tail.ends_with("line 9999"), "{tail}");
    }
}
