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

use super::cgroup::Join;
use super::child::{self, Handles, Setup};
use super::rootfs;
use super::seccomp::Filters;
use super::skeleton;
use super::sys::{self, Fork};
use super::uids::RANGE;
use crate::DriverError;
use channel::Channel;
use rustix::mount::MountPropagationFlags;
use rustix::process::{Gid, Pid, PidfdFlags, Uid};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};

/// The hidden word that makes the k8e binary a launcher.
pub const LAUNCHER_ARG: &str = "__launcher";

/// What the launcher says first.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    /// Whether the host's layers can show root inside as their owner.
    pub(super) idmap: bool,
}

/// What the launcher answers to a request.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Forked; the pidfd comes along. Whether it became a guest is told by the status pipe.
    Forked { pid: i32 },
    /// Not even forked.
    Failed(Failure),
}

/// A [`DriverError`] on its way between processes.
#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    message: String,
    errno: Option<i32>,
}

/// A sandbox's first process, as the server holds it.
#[derive(Debug)]
pub(super) struct Forked {
    pub(super) pid: i32,
    pub(super) pidfd: OwnedFd,
    status: OwnedFd,
}

/// The server's end. A launcher that died (the kernel may kill it for memory) is started again.
#[derive(Debug)]
pub(super) struct Launcher {
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
    pub(super) fn start(
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

    /// Forks a sandbox's first process. Blocks for about a millisecond.
    pub(super) fn fork(&self, setup: &Setup, listener: &OwnedFd) -> Result<Forked, DriverError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match running.fork(setup, listener) {
            Err(DriverError::LauncherGone) => {
                tracing::warn!("the launcher is gone, starting another");
                let (another, _) = Running::start(&self.program, &self.guest, &self.lock)?;
                *running = another;
                running.fork(setup, listener)
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

    fn fork(&self, setup: &Setup, listener: &OwnedFd) -> Result<Forked, DriverError> {
        let (status, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(DriverError::step("make", "a status pipe"))?;
        let asked = self
            .channel
            .send(setup, &[listener.as_fd(), theirs.as_fd()]);
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
    /// Waits until the process has become the guest. Blocks for some milliseconds.
    pub(super) fn wait(&mut self) -> Result<(), DriverError> {
        let step = || DriverError::step::<io::Error>("read", "the status pipe");
        let mut told = Vec::new();
        let pipe = fs::File::from(self.status.try_clone().map_err(step())?);
        pipe.take(channel::MESSAGE_BYTES_MAX as u64)
            .read_to_end(&mut told)
            .map_err(step())?;
        if told.is_empty() {
            return Ok(());
        }
        let failure: Failure = serde_json::from_slice(&told)
            .map_err(io::Error::other)
            .map_err(step())?;
        Err(failure.into_error())
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

/// The launcher process: what `main` runs when its first argument is [`LAUNCHER_ARG`].
///
/// Must be called before anything starts a thread.
pub fn launcher_main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        // There is no subscriber for tracing in this process; standard error is the server's log.
        Err(error) => {
            let _ = writeln!(io::stderr(), "k8e-launcher: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("serve", "the launcher's channel");
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(step())?;
    let channel = Channel::from(sys::move_up(stdin).map_err(step())?);
    let null = fs::File::open("/dev/null").map_err(DriverError::step("open", "/dev/null"))?;
    rustix::stdio::dup2_stdin(&null).map_err(DriverError::step("set", "standard input"))?;
    drop(null);
    let Some(((), fds)) = channel.receive::<()>().map_err(step())? else {
        return Ok(());
    };
    let Ok([guest, _lock]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Ok(());
    };
    let (guest, _lock) = (
        sys::move_up(guest).map_err(step())?,
        sys::move_up(_lock).map_err(step())?,
    );
    let filters = match start() {
        Ok((filters, ready)) => {
            channel
                .send(&Ok::<_, Failure>(ready), &[])
                .map_err(step())?;
            filters
        }
        Err(error) => {
            return channel
                .send(&Err::<Ready, _>(Failure::from(&error)), &[])
                .map_err(step());
        }
    };
    while let Some((setup, fds)) = channel.receive::<Setup>().map_err(step())? {
        let Ok([listener, status]) = <[OwnedFd; 2]>::try_from(fds) else {
            continue;
        };
        match launch(&setup, &guest, listener, status, &filters) {
            Ok((pid, pidfd)) => channel.send(&Answer::Forked { pid }, &[pidfd.as_fd()]),
            Err(error) => channel.send(&Answer::Failed(Failure::from(&error)), &[]),
        }
        .map_err(step())?;
    }
    Ok(())
}

fn start() -> Result<(Filters, Ready), DriverError> {
    sys::ignore_children();
    // Sees unmounts of the host, shows it none of ours.
    sys::unshare(UnshareFlags::NEWNS).map_err(DriverError::step("make", "a mount namespace"))?;
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", slave).map_err(DriverError::step("make slave", "/"))?;
    let filters = Filters::compile()
        .map_err(|error| DriverError::step("compile", "seccomp")(io::Error::other(error)))?;
    let userns = user_namespace(1 << 30)?;
    let idmap = rootfs::overlay_takes_idmapped_layers()
        && skeleton::layers()
            .iter()
            .all(|layer| rootfs::can_idmap(userns.as_fd(), &layer.host));
    Ok((filters, Ready { idmap }))
}

fn launch(
    setup: &Setup,
    guest: &OwnedFd,
    listener: OwnedFd,
    status: OwnedFd,
    filters: &Filters,
) -> Result<(i32, OwnedFd), DriverError> {
    let step = || DriverError::step::<io::Error>("prepare", "a launch");
    let (listener, status) = (
        sys::move_up(listener).map_err(step())?,
        sys::move_up(status).map_err(step())?,
    );
    let userns = sys::move_up(user_namespace(setup.rootfs.uid_base)?).map_err(step())?;
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    let cgroup = match &setup.join {
        Join::Born(dir) => {
            let opened =
                fs::File::open(dir).map_err(DriverError::step("open", dir.display().to_string()));
            Some(OwnedFd::from(opened?))
        }
        Join::Write(_) => None,
    };
    let forked = sys::fork_into(
        u64::from(namespaces.unsigned_abs()),
        cgroup.as_ref().map(OwnedFd::as_fd),
    );
    match forked.map_err(DriverError::step("fork", "the sandbox"))? {
        Fork::Parent { pid, pidfd } => Ok((pid, pidfd)),
        Fork::Child => {
            let error = child::become_guest(
                setup,
                Handles {
                    guest,
                    listener,
                    userns,
                },
                filters,
            );
            let told = serde_json::to_vec(&Failure::from(&error)).unwrap_or_default();
            let _ = rustix::io::write(&status, &told);
            sys::exit_now(1)
        }
    }
}

/// A new user namespace in which 0 is `base` outside. A process must live in it to make it.
///
/// That process is `base` when it makes it: what the kernel counts per user (inotify, pending
/// signals, message queues) is then counted for the sandbox's own number, not for the host's root.
fn user_namespace(base: u32) -> Result<OwnedFd, DriverError> {
    let pipe = || {
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(DriverError::step("make", "a pipe"))
    };
    let ((made, say_made), (done, say_done)) = (pipe()?, pipe()?);
    match sys::fork_into(0, None).map_err(DriverError::step("fork", "for a user namespace"))? {
        Fork::Child => {
            drop((made, say_done));
            if own_user_namespace(base).is_ok() {
                let _ = rustix::io::write(&say_made, b"1");
                // Until the parent has opened the namespace.
                let _ = rustix::io::read(&done, &mut [0u8; 1]);
            }
            sys::exit_now(0)
        }
        Fork::Parent { pid, .. } => {
            drop((say_made, done));
            let said = rustix::io::read(&made, &mut [0u8; 1]);
            if said.map_err(DriverError::step("read", "a pipe"))? == 0 {
                let hint = "the kernel refuses it: check user.max_user_namespaces";
                return Err(DriverError::step("make", "a user namespace")(
                    io::Error::other(hint),
                ));
            }
            let map = format!("0 {base} {RANGE}");
            for file in ["uid_map", "gid_map"] {
                let path = format!("/proc/{pid}/{file}");
                fs::write(&path, &map).map_err(DriverError::step("write", path.as_str()))?;
            }
            let path = format!("/proc/{pid}/ns/user");
            fs::File::open(&path)
                .map(OwnedFd::from)
                .map_err(DriverError::step("open", path))
        }
    }
}

/// Becomes `base`, keeping the right to make namespaces, and makes one.
fn own_user_namespace(base: u32) -> rustix::io::Result<()> {
    let (uid, gid) = (Uid::from_raw(base), Gid::from_raw(base));
    rustix::thread::set_keep_capabilities(true)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let mut sets = rustix::thread::capabilities(None)?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets)?;
    sys::unshare(UnshareFlags::NEWUSER)
}

/// Refers to a process of an earlier server.
pub(super) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?)
}
