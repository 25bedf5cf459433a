//! Forwards the output of a terminal to its ring buffer, from the start of its command to its exit.

use super::terminal::Terminal;
use crate::exec::{Ended, Report, Reports, Running, exit_of};
use crate::sys;
use k8e_wire::proto::Exited;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;

/// Bytes read at once: more than the kernel's PTY buffer holds.
const READ_BYTES: usize = 16 * 1024;

/// Bytes read after the exit of the command: more than the PTY buffer holds, but bounded, as a background
/// process may write for ever.
const REST_BYTES_MAX: usize = 256 * 1024;

/// Retry interval while no process has the slave open; one may open it again.
const CLOSED_PAUSE: Duration = Duration::from_millis(50);

/// Forwards output until the command has exited, then marks the terminal as ended.
pub(super) async fn forward(
    terminal: Arc<Terminal>,
    mut reports: Reports,
    mut running: Running,
    begin_ns: u64,
) {
    let Some(master) = terminal.master() else {
        return;
    };
    let mut buffer = vec![0; READ_BYTES];
    let ended = loop {
        tokio::select! {
            report = reports.next() => match report {
                Some(Report::Foreground { group }) => terminal.set_foreground(group),
                Some(Report::Ended { status, at_ns }) => break Some((status, at_ns)),
                Some(Report::Started | Report::Failed { .. }) => {}
                None => break None,
            },
            () = read_some(&terminal, &master, &mut buffer) => {}
        }
    };
    if ended.is_none() {
        // The supervisor was killed.
        running.kill().await;
    }
    read_rest(&terminal, &master, &mut buffer).await;
    let Ended { status, at_ns, .. } = Ended::from_report(ended);
    let (exit_code, signal) = exit_of(status);
    let exited = Exited {
        exit_code,
        signal,
        duration_us: at_ns.saturating_sub(begin_ns) / 1000,
        ..Exited::default()
    };
    running.set_over();
    terminal.finish(exited, sys::monotonic_ns());
}

/// Reads available output, or waits for it. Cancel safe.
async fn read_some(terminal: &Terminal, master: &AsyncFd<OwnedFd>, buffer: &mut [u8]) {
    let room = terminal.room().await.min(buffer.len());
    let Ok(mut ready) = master.readable().await else {
        return tokio::time::sleep(CLOSED_PAUSE).await;
    };
    match ready.try_io(|fd| Ok(rustix::io::read(fd, &mut buffer[..room])?)) {
        Ok(Ok(read)) if read > 0 => terminal.push(&buffer[..read]),
        Ok(_) => {
            ready.clear_ready();
            drop(ready);
            tokio::time::sleep(CLOSED_PAUSE).await;
        }
        Err(_) => {}
    }
}

/// Reads output from before the exit of the command. Bypasses tokio, whose readiness may
/// be older than the report.
async fn read_rest(terminal: &Terminal, master: &AsyncFd<OwnedFd>, buffer: &mut [u8]) {
    let mut left = REST_BYTES_MAX;
    while left > 0 {
        let room = terminal.room().await.min(buffer.len()).min(left);
        match rustix::io::read(master, &mut buffer[..room]) {
            Ok(read) if read > 0 => {
                terminal.push(&buffer[..read]);
                left -= read;
            }
            Err(error) if io::Error::from(error).kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return,
        }
    }
}
