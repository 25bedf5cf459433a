//! The launcher: a small single-threaded process beside the server that makes sandboxes.
//!
//! The server has threads and cannot fork safely or fast; the launcher can. It takes one request
//! at a time, forks the sandbox's first process into its namespaces and answers with its pid; what
//! that process does next runs in parallel and tells the server over a pipe of its own.
//!
//! The launcher holds the data directory's lock together with the server, and so does each child
//! until it has become a guest: when a new server gets the lock, no launch of the old one is under way.
//! It ends when the server does.

mod channel;
mod process;

pub use process::launcher_main;

use crate::DriverError;
use crate::gvisor::child::Setup as GvisorSetup;
use crate::native::child::Setup as NativeSetup;
pub(crate) use channel::Channel;
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The hidden word that makes the k8e binary a launcher.
pub const LAUNCHER_ARG: &str = "__launcher";

/// What the launcher says first.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Whether the host's layers can show root inside as their owner.
    pub(crate) idmap: bool,
    /// Why sandboxes can have no network, if so.
    pub(crate) no_network: Option<String>,
}

/// What the launcher is asked to make.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// A process that becomes the guest, whose listener comes along.
    Native(NativeSetup),
    /// A process that runs runsc, and says what became of it.
    Gvisor(GvisorSetup),
}

/// What the process that makes a sandbox says last, over its status pipe. One that became the guest
/// says nothing.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Told {
    /// The sandbox runs; its first process.
    Running {
        /// As the host numbers it.
        pid: i32,
    },
    /// What was to be tried works.
    Works,
    /// It does not.
    Failed(Failure),
}

/// What the launcher answers to an order.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Forked; the pidfd comes along. Whether it became a guest is told by the status pipe.
    Forked { pid: i32 },
    /// Not even forked.
    Failed(Failure),
}

/// A [`DriverError`] on its way between processes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    message: String,
    errno: Option<i32>,
}

/// The process that makes the sandbox, as the server holds it.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    status: OwnedFd,
}

/// The server's end. A launcher that died (the kernel may kill it for memory) is started again.
#[derive(Debug)]
pub(crate) struct Launcher {
    program: PathBuf,
    guest: OwnedFd,
    lock: OwnedFd,
    // Held for one request and its answer, about a millisecond.
    running: Mutex<Running>,
}

#[derive(Debug)]
struct Running {
    channel: Channel,
    process: Child,
}

// === impl Launcher ===

impl Launcher {
    /// Starts the process. `lock` and `guest` go along.
    pub(crate) fn start(
        program: &Path,
        guest: OwnedFd,
        lock: OwnedFd,
    ) -> Result<(Self, Ready), DriverError> {
        let (running, ready) = Running::start(program, &guest, &lock)?;
        let running = Mutex::new(running);
        Ok((
            Self {
                program: program.to_owned(),
                guest,
                lock,
                running,
            },
            ready,
        ))
    }

    /// The guest's program.
    pub(crate) fn guest(&self) -> &OwnedFd {
        &self.guest
    }

    /// Forks the process that makes a sandbox. Blocks for about a millisecond.
    pub(crate) fn fork(
        &self,
        order: &Order,
        listener: Option<&OwnedFd>,
    ) -> Result<Forked, DriverError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match running.fork(order, listener) {
            Err(DriverError::LauncherGone) => {
                tracing::warn!("the launcher is gone, starting another");
                let (another, _) = Running::start(&self.program, &self.guest, &self.lock)?;
                *running = another;
                running.fork(order, listener)
            }
            done => done,
        }
    }
}

// === impl Running ===

impl Running {
    fn start(
        program: &Path,
        guest: &OwnedFd,
        lock: &OwnedFd,
    ) -> Result<(Self, Ready), DriverError> {
        let step = || DriverError::step::<io::Error>("start", "the launcher");
        let (channel, theirs) = Channel::pair().map_err(step())?;
        let process = Command::new(program)
            .arg0("k8e-launcher")
            .arg(LAUNCHER_ARG)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .env_clear()
            .process_group(0)
            .spawn()
            .map_err(step())?;
        let running = Self { channel, process };
        running
            .channel
            .send(&(), &[guest.as_fd(), lock.as_fd()])
            .map_err(step())?;
        let answer = running
            .channel
            .receive::<Result<Ready, Failure>>()
            .map_err(step())?;
        let (ready, _) = answer.ok_or(DriverError::LauncherGone)?;
        Ok((running, ready.map_err(Failure::into_error)?))
    }

    fn fork(&self, order: &Order, listener: Option<&OwnedFd>) -> Result<Forked, DriverError> {
        let (status, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(DriverError::step("make", "a status pipe"))?;
        let mut fds = vec![theirs.as_fd()];
        fds.extend(listener.map(OwnedFd::as_fd));
        let asked = self.channel.send(order, &fds);
        asked.map_err(|_| DriverError::LauncherGone)?;
        drop(theirs);
        let answer = self.channel.receive::<Answer>();
        let (answer, mut fds) = answer
            .map_err(DriverError::step("ask", "the launcher"))?
            .ok_or(DriverError::LauncherGone)?;
        match (answer, fds.pop()) {
            (Answer::Forked { pid }, Some(pidfd)) => Ok(Forked { pid, pidfd, status }),
            (Answer::Forked { .. }, None) => Err(DriverError::LauncherGone),
            (Answer::Failed(failure), _) => Err(failure.into_error()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Of a launcher that is gone; one that lives ends with our end of the channel.
        let _ = self.process.try_wait();
    }
}

// === impl Forked ===

impl Forked {
    /// Waits until the process has become the guest, or said something else. Blocks.
    pub(crate) fn wait(&mut self) -> Result<Option<Told>, DriverError> {
        let step = || DriverError::step::<io::Error>("read", "the status pipe");
        let mut told = Vec::new();
        let pipe = fs::File::from(self.status.try_clone().map_err(step())?);
        pipe.take(channel::MESSAGE_BYTES_MAX as u64)
            .read_to_end(&mut told)
            .map_err(step())?;
        if told.is_empty() {
            return Ok(None);
        }
        let told = serde_json::from_slice(&told)
            .map_err(io::Error::other)
            .map_err(step())?;
        match told {
            Told::Failed(failure) => Err(failure.into_error()),
            Told::Running { .. } | Told::Works => Ok(Some(told)),
        }
    }
}

// === impl Failure ===

impl From<&DriverError> for Failure {
    fn from(error: &DriverError) -> Self {
        let source = std::error::Error::source(error);
        let errno = source
            .and_then(|source| source.downcast_ref::<io::Error>())
            .and_then(io::Error::raw_os_error);
        let message = match source {
            Some(source) if errno.is_none() => format!("{error}: {source}"),
            _ => error.to_string(),
        };
        Self { message, errno }
    }
}

impl Failure {
    fn into_error(self) -> DriverError {
        let source = self.errno.map_or_else(
            || io::Error::other("in the launcher"),
            io::Error::from_raw_os_error,
        );
        DriverError::Step {
            operation: "set up the sandbox:",
            object: self.message,
            source,
        }
    }
}

/// Refers to a process of an earlier server.
pub(crate) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?)
}
