//! Reads a terminal from its command's start to its end.

use super::terminal::Terminal;
use crate::exec::{Ended, Report, Reports, Running, exit_of};
use crate::sys;
use k8e_wire::proto::Exited;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;

/// Bytes read at once: more than a terminal holds.
const READ_BYTES: usize = 16 * 1024;

/// What is read after the end of the command: more than a terminal holds, and not what a process in
/// the background writes for ever.
const REST_BYTES_MAX: usize = 256 * 1024;

/// When nobody has the other side open, somebody may open it again.
const CLOSED_PAUSE: Duration = Duration::from_millis(50);

/// Reads the terminal, and tells when it is over.
pub(super) async fn attend(
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
        // Somebody killed the supervisor.
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

/// Reads what is there, or waits for it. Cancel safe.
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

/// What was written before the command ended. Reads past tokio, whose idea of what is readable may
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
