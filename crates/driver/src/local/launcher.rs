//! The launcher: the root process beside the server that makes sandboxes, and all else that needs root.
//!
//! The server has threads and cannot fork safely or fast, parses what clients and sandboxes send,
//! and therefore gives up root. The launcher has one thread, and parses nothing but the requests of
//! [`request`]: it forks the processes that make and remove sandboxes, signals them, writes their
//! control groups and opens sockets in their network namespaces.
//!
//! ```text
//! server (unprivileged) ──requests──▶ worker (root) ── fork ── builder: makes one sandbox, answers, ends
//!    ▲                                  ▲     └─ fork ── remover: removes one, answers, ends
//!    └── a new worker's channel ── keeper (root): starts the worker, and another should that die
//! ```
//!
//! Each request brings a socket for its answer, so requests wait for nobody else's.
//!
//! All of them hold the data directory's lock together with the server: when a new server gets the
//! lock, no launch of the old one is under way. They end when the server does.

mod channel;
mod confine;
mod keeper;
mod worker;

pub(crate) mod request;

pub use keeper::launcher_main;

use crate::DriverError;
pub(crate) use channel::Channel;
use request::{Answer, Ready, Request, Start};
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// The hidden word that makes the k8e binary a launcher.
pub const LAUNCHER_ARG: &str = "__launcher";

/// A [`DriverError`] on its way between processes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    message: String,
    kind: FailureKind,
}

#[derive(Debug, Serialize, Deserialize)]
enum FailureKind {
    Unusable,
    Exhausted,
    Step { errno: Option<i32> },
}

/// The server's end. A worker that died (the kernel may kill it for memory) is replaced by the keeper.
#[derive(Debug)]
pub(crate) struct Launcher {
    keeper: Channel,
    /// Locked only to look which it is, or to wait for the next.
    worker: Mutex<Arc<Channel>>,
    ready: Ready,
}

// === impl Launcher ===

impl Launcher {
    /// Starts the process. `guest` and `lock` go along.
    pub(crate) fn start(
        program: &Path,
        start: &Start,
        guest: &OwnedFd,
        lock: &OwnedFd,
    ) -> Result<Self, DriverError> {
        let step = || DriverError::step::<io::Error>("start", "the launcher");
        let (keeper, theirs) = Channel::pair().map_err(step())?;
        // Not waited for: it ends with us.
        Command::new(program)
            .arg0("k8e-launcher")
            .arg(LAUNCHER_ARG)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .env_clear()
            .process_group(0)
            .spawn()
            .map_err(step())?;
        keeper
            .send(start, &[guest.as_fd(), lock.as_fd()])
            .map_err(step())?;
        let (worker, ready) = next_worker(&keeper)?;
        let worker = Mutex::new(Arc::new(worker));
        Ok(Self {
            keeper,
            worker,
            ready,
        })
    }

    /// What this machine can do.
    pub(crate) fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Has something done and waits for the answer. Blocks.
    pub(crate) fn ask(&self, request: &Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
        let answered = self.with_worker(|worker| ask(worker, request))?;
        match answered {
            (Answer::Failed(failure), _) => Err(failure.into_error()),
            answered => Ok(answered),
        }
    }

    /// Has something done and does not wait. Takes microseconds.
    pub(crate) fn tell(&self, request: &Request) -> Result<(), DriverError> {
        self.with_worker(|worker| {
            let sent = worker.send(request, &[]);
            sent.map_err(|_| DriverError::LauncherGone)
        })
    }

    /// Once more with the next worker when this one is gone.
    fn with_worker<T>(
        &self,
        work: impl Fn(&Channel) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let lock = || self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        let first = Arc::clone(&lock());
        match work(&first) {
            Err(DriverError::LauncherGone) => {}
            done => return done,
        }
        let next = {
            let mut current = lock();
            // Somebody else may have found out before us.
            if Arc::ptr_eq(&current, &first) {
                tracing::warn!("the launcher's worker is gone, waiting for another");
                *current = Arc::new(next_worker(&self.keeper)?.0);
            }
            Arc::clone(&current)
        };
        work(&next)
    }
}

/// The channel of a worker that the keeper has started, and what it says first.
fn next_worker(keeper: &Channel) -> Result<(Channel, Ready), DriverError> {
    let step = || DriverError::step::<io::Error>("start", "the launcher");
    let (_, fds): ((), _) = keeper
        .receive()
        .map_err(step())?
        .ok_or(DriverError::LauncherGone)?;
    let worker = fds.into_iter().next().ok_or(DriverError::LauncherGone)?;
    let worker = Channel::from(worker);
    let (ready, _) = worker
        .receive::<Result<Ready, Failure>>()
        .map_err(step())?
        .ok_or(DriverError::LauncherGone)?;
    Ok((worker, ready.map_err(Failure::into_error)?))
}

fn ask(worker: &Channel, request: &Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
    let (answer, theirs) = Channel::pair().map_err(DriverError::step("make", "a socket pair"))?;
    let sent = worker.send(request, &[theirs.as_fd()]);
    sent.map_err(|_| DriverError::LauncherGone)?;
    drop(theirs);
    answer
        .receive()
        .map_err(DriverError::step("ask", "the launcher"))?
        .ok_or(DriverError::LauncherGone)
}

// === impl Failure ===

impl From<&DriverError> for Failure {
    fn from(error: &DriverError) -> Self {
        Self {
            message: message(error),
            kind: FailureKind::from(error),
        }
    }
}

/// What it says, with a cause that has no number of its own.
fn message(error: &DriverError) -> String {
    match (error, std::error::Error::source(error)) {
        // It says so already.
        (DriverError::InLauncher { .. }, _) => error.to_string(),
        (_, Some(source)) if errno(error).is_none() => format!("{error}: {source}"),
        _ => error.to_string(),
    }
}

fn errno(error: &DriverError) -> Option<i32> {
    let source = std::error::Error::source(error)?;
    source.downcast_ref::<io::Error>()?.raw_os_error()
}

impl From<&DriverError> for FailureKind {
    fn from(error: &DriverError) -> Self {
        match error {
            DriverError::Unusable(_) => Self::Unusable,
            DriverError::Exhausted(_) => Self::Exhausted,
            DriverError::Launch { launch, .. } => Self::from(launch.as_ref()),
            DriverError::Step { .. }
            | DriverError::InLauncher { .. }
            | DriverError::LauncherGone => Self::Step {
                errno: errno(error),
            },
        }
    }
}

impl Failure {
    /// A request that is none.
    fn refused(message: String) -> Self {
        let kind = FailureKind::Unusable;
        Self { message, kind }
    }

    pub(crate) fn into_error(self) -> DriverError {
        let message = self.message;
        match self.kind {
            FailureKind::Unusable => DriverError::Unusable(message),
            FailureKind::Exhausted => DriverError::Exhausted(message),
            FailureKind::Step { errno } => DriverError::InLauncher {
                message,
                source: errno.map_or_else(
                    || io::Error::other("in the launcher"),
                    io::Error::from_raw_os_error,
                ),
            },
        }
    }
}

/// Refers to a process of an earlier server.
pub(crate) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::Code;

    #[test]
    fn an_error_means_the_same_on_the_other_side() {
        let through = |error: DriverError| {
            let failure = serde_json::to_vec(&Failure::from(&error)).unwrap();
            let failure: Failure = serde_json::from_slice(&failure).unwrap();
            failure.into_error()
        };
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        let errors = [
            DriverError::Unusable("no kernel".to_owned()),
            DriverError::Exhausted("no room".to_owned()),
            DriverError::step("write", "a disk")(full()),
            DriverError::step("write", "a disk")(io::Error::other("torn")),
            DriverError::Launch {
                launch: Box::new(DriverError::step("write", "a disk")(full())),
                cleanup: Box::new(DriverError::Unusable("stuck".to_owned())),
            },
        ];
        for error in errors {
            let (code, text) = (error.code(), error.to_string());
            let other = through(error);
            if code != Code::Internal {
                assert_eq!(other.code(), code, "{text}");
            }
            assert!(other.to_string().starts_with(&text), "{other}");
        }
    }
}
