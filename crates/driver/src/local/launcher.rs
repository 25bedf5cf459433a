//! The launcher: the privileged (root) helper process beside the server that makes sandboxes.
//!
//! The server has threads and cannot fork safely or fast, parses what clients and sandboxes send,
//! and therefore gives up root. The launcher has one thread, and parses nothing but the requests of
//! [`request`]: it forks the processes that make and remove sandboxes, signals them, writes their
//! control groups and opens sockets in their network namespaces.
//!
//! ```text
//! server (unprivileged) ──requests──▶ worker (root) ── fork ── builder: makes one sandbox, answers, ends
//!    ▲                                  ▲     └─ fork ── remover: removes one, answers, ends
//!    └── a new worker's channel ── supervisor (root): starts the worker, and another should that die
//! ```
//!
//! Each request carries a socket for its answer, so no request waits for another. The number of processes
//! the worker has forked at once is bounded ([`concurrency`]).
//!
//! All of them hold the data directory's lock together with the server: when a new server gets the
//! lock, no launch of the old one is under way. They end when the server does.

mod channel;
mod concurrency;
mod confine;
mod supervisor;
mod worker;

pub(crate) mod request;

pub use supervisor::launcher_main;

use crate::DriverError;
pub(crate) use channel::Channel;
pub(crate) use concurrency::{Class, Turns};
use request::{Answer, Ready, Request, Start};
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Hidden first argument with which the k8e binary runs as the launcher.
pub const LAUNCHER_ARG: &str = "__launcher";

/// Delay between retries of a request that the launcher refused as busy.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// Deadline of these retries. Longer than any request takes that is not stuck.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);

/// A serialized [`DriverError`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    message: String,
    kind: FailureKind,
}

#[derive(Debug, Serialize, Deserialize)]
enum FailureKind {
    Unusable,
    Refused,
    Exhausted,
    Busy,
    Step { errno: Option<i32> },
}

/// The server's end. A worker that died (the kernel may kill it for memory) is replaced by the supervisor.
#[derive(Debug)]
pub(crate) struct Launcher {
    supervisor: Channel,
    /// Locked only to clone the current channel, or to wait for the next.
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
        let (supervisor, theirs) = Channel::pair().map_err(step())?;
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
        supervisor
            .send(start, &[guest.as_fd(), lock.as_fd()])
            .map_err(step())?;
        let (worker, ready) = next_worker(&supervisor)?;
        let worker = Mutex::new(Arc::new(worker));
        Ok(Self {
            supervisor,
            worker,
            ready,
        })
    }

    /// Features of this machine.
    pub(crate) fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Sends a request and waits for the answer. Blocks.
    ///
    /// A busy launcher is retried: the processes that it counts have mostly answered
    /// and are about to end.
    pub(crate) fn ask(&self, request: &Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
        let began = Instant::now();
        loop {
            let (answer, fds) = self.with_worker(|worker| ask(worker, request))?;
            let Answer::Failed(failure) = answer else {
                return Ok((answer, fds));
            };
            let error = failure.into_error();
            if !matches!(error, DriverError::Busy) || began.elapsed() > BUSY_TIMEOUT {
                return Err(error);
            }
            std::thread::sleep(BUSY_PAUSE);
        }
    }

    /// The same, with a file that goes along.
    pub(crate) fn ask_with(&self, request: &Request, file: &File) -> Result<Answer, DriverError> {
        match self.with_worker(|worker| ask_with(worker, request, Some(file)))? {
            (Answer::Failed(failure), _) => Err(failure.into_error()),
            (answer, _) => Ok(answer),
        }
    }

    /// Has something done and does not wait. Takes microseconds.
    pub(crate) fn tell(&self, request: &Request) -> Result<(), DriverError> {
        self.with_worker(|worker| {
            let sent = worker.send(request, &[]);
            sent.map_err(|_| DriverError::LauncherGone)
        })
    }

    /// Retries once with the next worker when this one is gone.
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
            // Another thread may have replaced it already.
            if Arc::ptr_eq(&current, &first) {
                tracing::warn!("the launcher's worker is gone, waiting for another");
                *current = Arc::new(next_worker(&self.supervisor)?.0);
            }
            Arc::clone(&current)
        };
        work(&next)
    }
}

/// The channel of a worker that the supervisor has started, and its first message.
fn next_worker(supervisor: &Channel) -> Result<(Channel, Ready), DriverError> {
    let step = || DriverError::step::<io::Error>("start", "the launcher");
    let (_, fds): ((), _) = supervisor
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
    ask_with(worker, request, None)
}

fn ask_with(
    worker: &Channel,
    request: &Request,
    file: Option<&File>,
) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
    let (answer, theirs) = Channel::pair().map_err(DriverError::step("make", "a socket pair"))?;
    let file = file.map(|file| file.as_fd());
    let fds: Vec<_> = [theirs.as_fd()].into_iter().chain(file).collect();
    let sent = worker.send(request, &fds);
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

/// The message, with a source that has no errno.
fn message(error: &DriverError) -> String {
    match (error, std::error::Error::source(error)) {
        // The message contains it already.
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
            DriverError::Refused(_) => Self::Refused,
            DriverError::Exhausted(_) => Self::Exhausted,
            DriverError::Busy => Self::Busy,
            // The launcher calls no guest.
            DriverError::InUse(_) => Self::Unusable,
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
    /// An answer that does not fit the request.
    fn refused(message: String) -> Self {
        let kind = FailureKind::Unusable;
        Self { message, kind }
    }

    pub(crate) fn into_error(self) -> DriverError {
        let message = self.message;
        match self.kind {
            FailureKind::Unusable => DriverError::Unusable(message),
            FailureKind::Refused => DriverError::Refused(message),
            FailureKind::Exhausted => DriverError::Exhausted(message),
            FailureKind::Busy => DriverError::Busy,
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

/// A pidfd of a process of an earlier server.
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
            DriverError::Busy,
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
