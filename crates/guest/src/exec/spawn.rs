//! Spawns a command: pipes, the supervisor, and the guest's ends of both.
//!
//! Everything that a command without input needs can be made in advance. The guest keeps one
//! such *spare* (a pre-forked supervisor), made while the guest is idle.

use super::command::Command;
use super::output::Reports;
use super::sys::{self, Orders, Plan};
use crate::error::Error;
use crate::{Guest, error, reaper};
use rustix::fs::OFlags;
use rustix::pipe::PipeFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::unix::pipe::{Receiver, Sender};

/// Lowest descriptor of the command's ends: below are those that the supervisor overwrites.
const FD_MIN: i32 = 4;

/// A command that was started, or is about to fail.
pub(crate) struct Child<S = Streams> {
    /// Process id of its supervisor.
    pub(crate) supervisor: i32,
    /// Process id of the command; 0 until it has one.
    pub(crate) pid: Arc<AtomicI32>,
    /// Reports of the supervisor.
    pub(crate) reports: Reports,
    /// Requests to the supervisor.
    pub(crate) orders: Orders,
    /// Its standard streams.
    pub(crate) streams: S,
}

/// The guest's ends of a command's standard streams.
pub(crate) struct Streams {
    /// Standard input, if the command takes any.
    pub(crate) stdin: Option<Sender>,
    /// Standard output.
    pub(crate) stdout: Receiver,
    /// Standard error.
    pub(crate) stderr: Receiver,
}

/// A pre-forked supervisor without a command, which sleeps.
#[derive(Default)]
pub(crate) struct Spare(Mutex<Option<Child>>);

/// Delay after a command before the next spare is made: by then its end was sent, and a client that needed
/// only one command has destroyed the sandbox.
const SPARE_AFTER: Duration = Duration::from_millis(1);

// === impl Spare ===

impl Spare {
    /// Process id of its supervisor.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.child().as_ref().map(|child| child.supervisor)
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a spare unless there is one. Errors are ignored: then the next command is spawned without.
pub(crate) fn make_spare(guest: &Guest) {
    let mut spare = guest.spare.child();
    if spare.is_none() && guest.dev_null.is_some() {
        *spare = piped(guest, None, false).ok();
    }
}

/// After the end of a command was sent: frees its resources, and makes a spare after the delay.
pub(crate) fn clear_away(guest: &Arc<Guest>, left: impl Send + 'static) {
    let guest = Arc::clone(guest);
    tokio::spawn(async move {
        drop(left);
        if guest.spare.pid().is_none() {
            tokio::time::sleep(SPARE_AFTER).await;
            make_spare(&guest);
        }
    });
}

/// The spare, if it is alive: any process of root's can have killed it.
fn take_spare(guest: &Guest) -> Option<Child> {
    let spare = guest.spare.child().take()?;
    if spare.reports.are_over() {
        reaper::reap_now(guest, spare.supervisor);
        return None;
    }
    Some(spare)
}

/// Starts a command.
pub(crate) fn spawn(
    guest: &Guest,
    command: &Arc<Command>,
    with_stdin: bool,
) -> Result<Child, Error> {
    if !with_stdin && let Some(child) = take_spare(guest) {
        child.orders.give(command);
        return Ok(child);
    }
    piped(guest, Some(command), with_stdin)
}

fn piped(guest: &Guest, command: Option<&Arc<Command>>, with_stdin: bool) -> Result<Child, Error> {
    let failed = || Error::os::<io::Error>("make pipes for", name(command));
    let (stdout_read, stdout_write) = pipe_from().map_err(failed())?;
    let (stderr_read, stderr_write) = pipe_from().map_err(failed())?;
    let (stdin_read, stdin_write) = stdin(guest, with_stdin).map_err(failed())?;
    let stdin_read = stdin_read.as_ref().or(guest.dev_null.as_ref());
    let streams = [
        // A pipe or /dev/null; should neither exist, a write-only end of a pipe, which cannot be read either.
        stdin_read.map_or(stdout_write.as_fd(), AsFd::as_fd),
        stdout_write.as_fd(),
        stderr_write.as_fd(),
    ];
    let ours = || {
        Ok(Streams {
            stdin: stdin_write.map(sender).transpose()?,
            stdout: receiver(stdout_read)?,
            stderr: receiver(stderr_read)?,
        })
    };
    supervise(guest, command, streams, false, ours)
}

/// Starts a command on a terminal.
pub(crate) fn spawn_on(
    guest: &Guest,
    command: &Arc<Command>,
    terminal: &OwnedFd,
) -> Result<Child<()>, Error> {
    let streams = [terminal.as_fd(); 3];
    supervise(guest, Some(command), streams, true, || Ok(()))
}

fn name(command: Option<&Arc<Command>>) -> &[u8] {
    command.map_or(b"a command", |command| command.name())
}

fn supervise<S>(
    guest: &Guest,
    command: Option<&Arc<Command>>,
    [stdin, stdout, stderr]: [BorrowedFd<'_>; 3],
    terminal: bool,
    ours: impl FnOnce() -> io::Result<S>,
) -> Result<Child<S>, Error> {
    let failed = || Error::os::<io::Error>("make pipes for", name(command));
    let (report_read, report_write) = pipe_from().map_err(failed())?;
    let pid = Arc::new(AtomicI32::new(0));
    let (supervisor, loan, orders) = sys::spawn(&Plan {
        command,
        stdin,
        stdout,
        stderr,
        terminal,
        report: report_write.as_fd(),
        signals: &guest.signals,
        nofile: guest.config.nofile,
        pid: &pid,
    })
    .map_err(fork_error)?;
    guest.supervisors.insert(supervisor, loan);
    let child = receiver(report_read).and_then(|reports| {
        Ok(Child {
            supervisor,
            pid,
            reports: Reports::new(reports),
            orders,
            streams: ours()?,
        })
    });
    // Only when epoll takes no more descriptors. The command dies with its supervisor.
    child.map_err(|error| {
        crate::sys::kill(supervisor, libc::SIGKILL);
        failed()(error)
    })
}

/// The error when no process can be forked.
pub(crate) fn fork_error(source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EAGAIN) => Error::Exhausted(
            "the process limit of the sandbox is reached: end processes or raise the limit"
                .to_owned(),
        ),
        _ => error::Error::os("make a process for", b"the command")(source),
    }
}

fn stdin(guest: &Guest, wanted: bool) -> io::Result<(Option<OwnedFd>, Option<OwnedFd>)> {
    if !wanted && guest.dev_null.is_some() {
        return Ok((None, None));
    }
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // Without /dev/null in the sandbox, a pipe without a writer is at end of file as well.
    Ok((Some(above(read)?), wanted.then_some(write)))
}

/// A pipe whose write end is for the supervisor.
fn pipe_from() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    Ok((read, above(write)?))
}

/// Moves a descriptor out of the way of those the supervisor overwrites.
pub(crate) fn above(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() >= FD_MIN {
        Ok(fd)
    } else {
        Ok(rustix::io::fcntl_dupfd_cloexec(fd, FD_MIN)?)
    }
}

fn receiver(fd: OwnedFd) -> io::Result<Receiver> {
    rustix::fs::fcntl_setfl(&fd, OFlags::NONBLOCK)?;
    Receiver::from_owned_fd_unchecked(fd)
}

fn sender(fd: OwnedFd) -> io::Result<Sender> {
    rustix::fs::fcntl_setfl(&fd, OFlags::NONBLOCK)?;
    Sender::from_owned_fd_unchecked(fd)
}
