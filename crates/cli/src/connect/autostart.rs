//! Auto-start: starts the server of this machine in the background.
//!
//! When two clients do so at once, the second server finds the data directory locked and exits, and both clients connect
//! to the first.

use crate::Globals;
use crate::failure::Failure;
use crate::output;
use k8e_api::client::{Client, Endpoint};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for the server to answer: one that adopts many sandboxes may need seconds.
const READY_WITHIN: Duration = Duration::from_secs(20);
const POLL_PAUSE: Duration = Duration::from_millis(10);

/// Size at which the log is rotated; one older log is kept.
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The end of the log that is printed when the server did not start.
const LOG_TAIL_BYTES: u64 = 4096;
const LOG_TAIL_LINES: usize = 8;

pub(super) async fn start(globals: &Globals, endpoint: &Endpoint) -> Result<Client, Failure> {
    let log = globals.data_dir.join("server.log");
    // `--detached` starts a new process session, so that the server does not end with this terminal.
    let data_dir = std::path::absolute(&globals.data_dir);
    let spawned = data_dir.and_then(|data_dir| {
        spawn(&globals.data_dir, &log, |command| {
            let server = ["server", "--detached"];
            command.arg("--data-dir").arg(data_dir).args(server);
        })
    });
    let mut server = spawned.map_err(|e| {
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

/// Starts a server in the background with the arguments that `configure` adds, and waits until it answers at `socket`.
/// Returns its process id, or what went wrong and what to do.
pub fn start_server(
    data_dir: &Path,
    socket: &Path,
    configure: impl FnOnce(&mut Command),
) -> Result<u32, String> {
    let log = data_dir.join("server.log");
    // A process group of its own: Ctrl-C at this terminal is not meant for it.
    let spawned = spawn(data_dir, &log, |command| {
        configure(command.process_group(0));
    });
    let mut server = spawned.map_err(|e| format!("cannot start the server: {e}"))?;
    let endpoint = Endpoint::Unix(socket.to_owned());
    let ready = crate::block_on_to_the_end(async {
        wait_until_ready(&mut server, &endpoint, &log).await?;
        Ok(0)
    });
    match ready {
        Ok(_) => Ok(server.id()),
        Err(Failure::Told { error, .. }) => Err(error),
        Err(Failure::BrokenPipe) => Err("interrupted".to_owned()),
    }
}

fn spawn(data_dir: &Path, log: &Path, configure: impl FnOnce(&mut Command)) -> io::Result<Child> {
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
    let mut command = Command::new(std::env::current_exe()?);
    command.current_dir("/");
    configure(&mut command);
    command
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
        // Checked before connecting: a server that lost the race exits while another answers.
        let ended = server.try_wait().ok().flatten();
        if let Ok(client) = Client::connect(endpoint).await {
            return Ok(client);
        }
        if let Some(status) = ended {
            return Err(failed(
                &format!("the server exited at once ({status})"),
                log,
            ));
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
