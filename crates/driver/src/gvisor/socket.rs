//! The socket that a guest binds itself, in a directory of the host that is taken away from the sandbox once it
//! listens: afterwards no process inside can create or replace files there.
//!
//! A checkpoint cannot hold such a socket, so the guest closes it before, and binds it again afterwards, under its
//! other name. Programs run then, so for these milliseconds the directory is watched: whoever makes another file in
//! it, outside of the limit of the disk, ends the sandbox.

use crate::DriverError;
use crate::local::launcher::pidfd_of;
use crate::local::sandboxes::Sandboxes;
use crate::local::share;
use k8e_model::SandboxId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{FileType, Gid, Mode, Uid};
use rustix::process::Signal;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// In a sandbox's directory: the directory in which the guest binds its socket.
const SHARED: &str = "shared";

/// The socket's two names in it, of one unusual length, by which `bind` of them is told from that of others
/// ([`super::bind_filter`]).
pub(super) const NAMES: [&str; 2] = [
    "guest-agent-socket-a.of-a-length-that-other-sockets-seldom-have",
    "guest-agent-socket-b.of-a-length-that-other-sockets-seldom-have",
];

/// Deadline for the guest to listen: some milliseconds, on a machine under load a second.
const LISTEN_WAIT: Duration = Duration::from_secs(20);
const LISTEN_PAUSE: Duration = Duration::from_millis(1);

/// Room for the events of the guest; whatever more there is was made by somebody else.
const EVENT_BYTES: usize = 4096;

/// The directory while the sandbox may write to it.
pub(super) struct Lent {
    shared: PathBuf,
    /// The name that the guest gives up; none at the first launch.
    old: Option<&'static str>,
    new: &'static str,
    events: OwnedFd,
}

/// Makes the directory of a new sandbox, and lends it. `old` is the name that a checkpoint knows.
pub(super) fn make(
    dir: &Path,
    uid_base: u32,
    old: Option<&'static str>,
) -> Result<Lent, DriverError> {
    let shared = dir.join(SHARED);
    let step = || DriverError::step::<io::Error>("make", shared.display().to_string());
    fs::create_dir(&shared).map_err(step())?;
    if let Some(old) = old {
        let path = shared.join(old);
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Socket, mode, 0)
            .and_then(|()| chown(&path, uid_base))
            .map_err(DriverError::step("make", path.display().to_string()))?;
    }
    lend(shared, uid_base, old)
}

/// Lets the guest of a running sandbox bind its socket again; waits until it listens.
pub(super) fn bind_again(
    sandboxes: &Sandboxes,
    id: &SandboxId,
    pid: i32,
    uid_base: u32,
) -> Result<(), DriverError> {
    let shared = sandboxes.sandbox(id).join(SHARED);
    let old = bound(&sandboxes.sandbox(id)).ok_or_else(|| {
        DriverError::Unusable(format!("{id} was made by an earlier version of the server"))
    })?;
    let sentry = pidfd_of(pid).map_err(DriverError::step("find", id.to_string()))?;
    lend(shared, uid_base, Some(old))?.wait(sandboxes, id, &sentry)
}

/// The name that the guest's socket has, in the directory of a sandbox.
pub(super) fn bound(dir: &Path) -> Option<&'static str> {
    let there = |name: &&str| fs::symlink_metadata(dir.join(SHARED).join(name)).is_ok();
    NAMES.into_iter().find(|name| there(name))
}

fn lend(shared: PathBuf, uid_base: u32, old: Option<&'static str>) -> Result<Lent, DriverError> {
    let step = |what| DriverError::step::<io::Error>(what, shared.display().to_string());
    let flags = CreateFlags::CLOEXEC | CreateFlags::NONBLOCK;
    let events = inotify::init(flags).map_err(|error| step("watch")(error.into()))?;
    let any = WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::MODIFY;
    inotify::add_watch(&events, &shared, any).map_err(|error| step("watch")(error.into()))?;
    // Only root inside may pass: a process that can connect can run commands as root.
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o700)).map_err(step("chmod"))?;
    chown(&shared, uid_base).map_err(|error| step("chown")(error.into()))?;
    let new = match old {
        Some(old) if old == NAMES[0] => NAMES[1],
        _ => NAMES[0],
    };
    Ok(Lent {
        shared,
        old,
        new,
        events,
    })
}

fn chown(path: &Path, owner: u32) -> rustix::io::Result<()> {
    let (uid, gid) = (Uid::from_raw(owner), Gid::from_raw(owner));
    rustix::fs::chown(path, Some(uid), Some(gid))
}

// === impl Lent ===

impl Lent {
    /// The directory of the host.
    pub(super) fn path(&self) -> &Path {
        &self.shared
    }

    /// Waits until the guest listens, takes the directory away, and gives the socket its name for the server.
    pub(super) fn wait(
        self,
        sandboxes: &Sandboxes,
        id: &SandboxId,
        sentry: &OwnedFd,
    ) -> Result<(), DriverError> {
        let listens = self.listens(sentry);
        share::directory(&self.shared, sandboxes.server_gid())?;
        listens.map_err(DriverError::step("wait for the guest of", id.to_string()))?;
        if let Err(what) = self.check() {
            let _ = rustix::process::pidfd_send_signal(sentry, Signal::KILL);
            return Err(DriverError::Refused(format!(
                "a program of {id} wrote to the directory of its agent's socket ({what}), and was killed with it"
            )));
        }
        let (socket, new) = (
            sandboxes.socket(id),
            sandboxes.sandbox(id).join("guest.new"),
        );
        let _ = fs::remove_file(&new);
        fs::hard_link(self.shared.join(self.new), &new)
            .and_then(|()| fs::rename(&new, &socket))
            .map_err(DriverError::step("link", socket.display().to_string()))?;
        share::socket(&socket, sandboxes.server_gid())
    }

    fn listens(&self, sentry: &OwnedFd) -> io::Result<()> {
        let deadline = Instant::now() + LISTEN_WAIT;
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(LISTEN_PAUSE.subsec_nanos()),
        };
        let socket = self.shared.join(self.new);
        let gone = |name| fs::symlink_metadata(self.shared.join(name)).is_err();
        loop {
            match crate::guest::is_listening(&socket) {
                Ok(()) if self.old.is_none_or(gone) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error),
                Ok(()) | Err(_) => {}
            }
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut ended = [PollFd::new(sentry, PollFlags::IN)];
            if poll(&mut ended, Some(&pause))? > 0 {
                return Err(io::Error::other("the sentry exited"));
            }
        }
    }

    /// Whether nothing but the socket was made here; otherwise what was.
    fn check(&self) -> Result<(), String> {
        let mut buffer = [MaybeUninit::uninit(); EVENT_BYTES];
        let mut events = Reader::new(&self.events, &mut buffer);
        loop {
            let event = match events.next() {
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                event => event.map_err(|error| error.to_string())?,
            };
            let name = event.file_name().map(|name| name.to_string_lossy());
            let name = name.as_deref().unwrap_or_default();
            let expected = match event.events() {
                ReadFlags::CREATE => name == self.new,
                ReadFlags::DELETE => Some(name) == self.old,
                _ => false,
            };
            if !expected {
                return Err(format!("{name:?}"));
            }
        }
    }
}
