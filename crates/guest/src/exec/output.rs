//! Output of a command: standard output and error, and the reports of its supervisor (started, exited).

use super::Outcome;
use super::report::Report;
use super::sys::Orders;
use crate::process_limit::ProcessLimit;
use crate::{Guest, sys};
use bytes::Bytes;
use k8e_wire::proto::{Started, reply::Reply};
use k8e_wire::{ReplySink, WireError};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::Notify;

/// Bytes read at once: the default capacity of a pipe.
const READ_BYTES: usize = 64 * 1024;

/// Deadline for the last report of a supervisor whose tree was killed.
const REPORT_WITHIN: Duration = Duration::from_secs(1);

/// Streams of ended commands that are drained for background processes. Beyond that a process that
/// writes gets SIGPIPE.
const DRAINS_MAX: usize = 256;

/// How a command ended.
pub(crate) struct Ended {
    /// The status of `waitpid`.
    pub(crate) status: i32,
    /// Time of its end on the monotonic clock, in nanoseconds.
    pub(crate) at_ns: u64,
    /// The supervisor ended without a report: it was killed.
    pub(crate) lost: bool,
}

/// Both streams of a command.
pub(crate) struct Output {
    /// Standard output.
    pub(crate) stdout: Stream,
    /// Standard error.
    pub(crate) stderr: Stream,
    buffer: Vec<u8>,
    /// Whether `Started` was sent to the host.
    reported_start: bool,
}

/// Handles by which a started command is monitored, beside its streams.
pub(super) struct Monitor<'a> {
    /// Reports of its supervisor.
    pub(super) reports: &'a mut Reports,
    /// Requests to its supervisor.
    pub(super) orders: &'a Orders,
    pub(super) supervisor: i32,
    /// 0 until it has one.
    pub(super) pid: &'a AtomicI32,
    /// Notified when its tree was killed: a missing report is then not waited for.
    pub(super) killed: &'a Notify,
    /// How long `Started` is delayed, to be sent with the next reply.
    pub(super) started_held: Duration,
    /// Checked with each output.
    pub(super) process_limit: &'a ProcessLimit,
}

/// One stream.
pub(crate) struct Stream {
    pipe: Option<Receiver>,
    /// All writers have closed it.
    over: bool,
    reply: fn(Bytes) -> Reply,
    /// Bytes that may still be sent (output limit).
    max: u64,
    /// Bytes written by the command.
    pub(crate) total: u64,
    sent: u64,
}

/// Reports of the supervisor, read from its pipe.
pub(crate) struct Reports(Receiver);

// === impl Reports ===

impl Reports {
    pub(crate) fn new(pipe: Receiver) -> Self {
        Self(pipe)
    }

    /// The next report; none when the supervisor is gone, or sent an invalid one. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Report> {
        loop {
            self.0.readable().await.ok()?;
            let mut bytes = [0; Report::BYTES];
            match self.0.try_read(&mut bytes) {
                Ok(Report::BYTES) => return Report::decode(&bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => return None,
            }
        }
    }

    /// Whether the supervisor is gone, and all its reports were read.
    pub(crate) fn are_over(&self) -> bool {
        has_no_writer(&self.0)
    }

    /// Whether the command has ended, although the report was not read yet.
    pub(crate) fn ended_already(&mut self) -> bool {
        let mut bytes = [0; Report::BYTES];
        while let Ok(Report::BYTES) = rustix::io::read(&self.0, &mut bytes) {
            if matches!(
                Report::decode(&bytes),
                Some(Report::Ended { .. } | Report::Failed { .. })
            ) {
                return true;
            }
        }
        false
    }
}

// === impl Output ===

impl Output {
    pub(crate) fn new(stdout: Receiver, stderr: Receiver, bytes_max: u64) -> Self {
        let max = if bytes_max == 0 { u64::MAX } else { bytes_max };
        let stream = |pipe, reply| Stream {
            pipe: Some(pipe),
            over: false,
            reply,
            max,
            total: 0,
            sent: 0,
        };
        Self {
            stdout: stream(stdout, Reply::Stdout),
            stderr: stream(stderr, Reply::Stderr),
            buffer: Vec::new(),
            reported_start: false,
        }
    }

    /// Forwards until the command has ended and its output is sent.
    pub(super) async fn forward(&mut self, replies: &mut ReplySink, child: Monitor<'_>) -> Outcome {
        match self.forward_streams(replies, child).await {
            Ok(outcome) => outcome,
            Err(error) => Outcome::Cancelled(error.into()),
        }
    }

    /// Keeps reading output of background processes of the ended command: closing the pipe would kill
    /// a server by SIGPIPE at its next line of log.
    pub(crate) fn leave_to_background(&mut self, guest: &Arc<Guest>) {
        for stream in [&mut self.stdout, &mut self.stderr] {
            let Some(pipe) = stream.pipe.take_if(|_| !stream.over) else {
                continue;
            };
            if guest.drains.fetch_add(1, Ordering::Relaxed) >= DRAINS_MAX {
                guest.drains.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let guest = Arc::clone(guest);
            tokio::spawn(async move {
                discard(&pipe).await;
                guest.drains.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    async fn forward_streams(
        &mut self,
        replies: &mut ReplySink,
        mut child: Monitor<'_>,
    ) -> Result<Outcome, WireError> {
        let mut started_held = pin!(tokio::time::sleep(child.started_held));
        let mut held = true;
        let report = loop {
            let stream = tokio::select! {
                report = child.reports.next() => match report {
                    Some(Report::Started) => {
                        self.started(replies, &child).await?;
                        continue;
                    }
                    Some(Report::Failed { stage, errno }) if !self.reported_start => {
                        return Ok(Outcome::NotStarted(stage, errno));
                    }
                    report => break report,
                },
                () = child.killed.notified() => break child.last_report().await,
                () = self.stdout.readable() => &mut self.stdout,
                () = self.stderr.readable() => &mut self.stderr,
                () = &mut started_held, if held => {
                    held = false;
                    if child.orders.runs() {
                        self.started(replies, &child).await?;
                    } else {
                        // A spare supervisor may have been stopped by a signal before it got a command.
                        sys::kill(child.supervisor, libc::SIGCONT);
                    }
                    continue;
                }
            };
            child.process_limit.look();
            let some = stream.read_some(&mut self.buffer);
            if some > 0 {
                // Only a started command can have written it.
                hold_started(&mut self.reported_start, replies, &child)?;
                stream.send(&self.buffer[..some], replies).await?;
            }
        };
        // Before its background processes can end.
        child.process_limit.look();
        hold_started(&mut self.reported_start, replies, &child)?;
        for stream in [&mut self.stdout, &mut self.stderr] {
            stream.forward_rest(&mut self.buffer, replies).await?;
        }
        Ok(Outcome::Ended(Ended::from_report(match report {
            Some(Report::Ended { status, at_ns }) => Some((status, at_ns)),
            Some(Report::Started | Report::Failed { .. } | Report::Foreground { .. }) | None => {
                None
            }
        })))
    }

    /// The command has started: sends that without waiting for output.
    async fn started(
        &mut self,
        replies: &mut ReplySink,
        child: &Monitor<'_>,
    ) -> Result<(), WireError> {
        hold_started(&mut self.reported_start, replies, child)?;
        replies.flush().await
    }
}

/// Adds `Started` to the replies, once; it is sent with the next flush.
fn hold_started(
    reported: &mut bool,
    replies: &mut ReplySink,
    child: &Monitor<'_>,
) -> Result<(), WireError> {
    if std::mem::replace(reported, true) {
        return Ok(());
    }
    // A command without a process id was killed before its process was forked: then the
    // supervisor's process id is reported.
    let pid = match child.pid.load(Ordering::Relaxed) {
        0 => child.supervisor,
        made => made,
    };
    replies.hold(Reply::Started(Started { pid }))
}

// === impl Monitor ===

impl Monitor<'_> {
    /// The last report of a supervisor whose tree was killed.
    async fn last_report(&mut self) -> Option<Report> {
        let last = async {
            loop {
                match self.reports.next().await {
                    Some(Report::Started) => {}
                    other => return other,
                }
            }
        };
        tokio::time::timeout(REPORT_WITHIN, last).await.ok()?
    }
}

// === impl Stream ===

impl Stream {
    /// Whether output was dropped because of the limit.
    pub(crate) fn truncated(&self) -> bool {
        self.sent < self.total
    }

    /// Resolves when there is output or end of file.
    async fn readable(&self) {
        match &self.pipe {
            // An error shows at the read that follows.
            Some(pipe) if !self.over => drop(pipe.readable().await),
            Some(_) | None => std::future::pending().await,
        }
    }

    /// Reads what is available, at most a buffer. Returns the number of bytes.
    fn read_some(&mut self, buffer: &mut Vec<u8>) -> usize {
        let Some(pipe) = &self.pipe else {
            return 0;
        };
        buffer.resize(READ_BYTES, 0);
        match pipe.try_read(buffer) {
            Ok(read) if read > 0 => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            // Closed later, after `Exited` was sent.
            Ok(_) | Err(_) => {
                self.over = true;
                0
            }
        }
    }

    /// Sends what was in the pipe when the command ended. Not more: a background process may write
    /// without end. Reads past tokio, whose idea of what is readable may be older than the report.
    async fn forward_rest(
        &mut self,
        buffer: &mut Vec<u8>,
        replies: &mut ReplySink,
    ) -> Result<(), WireError> {
        let mut left = match &self.pipe {
            Some(pipe) if !self.over => rustix::io::ioctl_fionread(pipe).unwrap_or(0),
            Some(_) | None => return Ok(()),
        };
        while left > 0 {
            buffer.resize(READ_BYTES, 0);
            let want = usize::try_from(left).unwrap_or(READ_BYTES).min(READ_BYTES);
            let read = match &self.pipe {
                Some(pipe) => rustix::io::read(pipe, &mut buffer[..want]).unwrap_or(0),
                None => 0,
            };
            if read == 0 {
                break;
            }
            left -= read as u64;
            self.send(&buffer[..read], replies).await?;
        }
        self.over = self.pipe.as_ref().is_some_and(has_no_writer);
        Ok(())
    }

    /// Counts, and sends up to the limit.
    async fn send(&mut self, data: &[u8], replies: &mut ReplySink) -> Result<(), WireError> {
        self.total += data.len() as u64;
        let room = usize::try_from(self.max - self.sent)
            .unwrap_or(usize::MAX)
            .min(data.len());
        if room == 0 {
            // No await point otherwise: yields to other tasks.
            tokio::task::yield_now().await;
            return Ok(());
        }
        self.sent += room as u64;
        replies
            .send((self.reply)(Bytes::copy_from_slice(&data[..room])))
            .await
    }
}

// === impl Ended ===

impl Ended {
    /// From the status and time of a supervisor's report; none when there was none.
    pub(crate) fn from_report(said: Option<(i32, u64)>) -> Self {
        match said {
            Some((status, at_ns)) => Self {
                status,
                at_ns,
                lost: false,
            },
            None => Self::lost(),
        }
    }

    /// A command whose supervisor was killed counts as killed by SIGKILL.
    fn lost() -> Self {
        Self {
            status: libc::SIGKILL,
            at_ns: sys::monotonic_ns(),
            lost: true,
        }
    }
}

/// Whether the pipe is empty and has no writers.
fn has_no_writer(pipe: &Receiver) -> bool {
    let mut poll = [PollFd::new(pipe, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let polled = rustix::event::poll(&mut poll, Some(&now));
    polled.is_ok() && poll[0].revents() == PollFlags::HUP
}

/// Reads to the end of file and drops the data.
async fn discard(pipe: &Receiver) {
    let mut buffer = vec![0; READ_BYTES];
    while pipe.readable().await.is_ok() {
        match pipe.try_read(&mut buffer) {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
            Ok(_) | Err(_) => tokio::task::yield_now().await,
        }
    }
}
