//! File lock (`flock`) of the data directory: one server at a time.
//!
//! The lock is held by every process that has its file open: the server, its launcher, and launches
//! in progress. It is free only when all of them have exited, so a new server never works beside
//! processes of an old one.
//!
//! An auto-started server gives way to one that was started explicitly: sandboxes keep running, and the new server
//! adopts them.

use super::data_dir::DataDir;
use super::error::Error;
use k8e_net::proc_fd::SocketPath;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait until the remaining processes of a killed server have exited.
const WAIT_FOR_REST: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);

/// Longest wait until an auto-started server that was asked to stop has drained its calls and exited.
const GIVE_WAY_WITHIN: Duration = Duration::from_secs(30);

/// The flag that clients give to a server they auto-start, and that no other server has.
const AUTOSTARTED: &[u8] = b"--detached";

/// Takes the lock, or says who has it. No server gives way to an auto-started one.
pub(super) fn take(data_dir: &DataDir, socket: &Path, autostarted: bool) -> Result<OwnedFd, Error> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(data_dir.path().join("lock"))
        .map_err(|source| data_dir.failed("lock", source))?;
    let mut deadline = Instant::now() + WAIT_FOR_REST;
    let mut gives_way = false;
    while !try_lock(&file).map_err(|source| data_dir.failed("lock", source))? {
        let pid = read_pid(&mut file);
        if !gives_way
            && !autostarted
            && let Some(pid) = pid
            && ask_to_leave(&file, pid)
        {
            tracing::info!(
                "the auto-started server (pid {pid}) was asked to stop: this one takes over"
            );
            gives_way = true;
            deadline = Instant::now() + GIVE_WAY_WITHIN;
        }
        // A server that accepts connections is not the remainder of a killed one.
        if (answers(socket) && !gives_way) || Instant::now() > deadline {
            return Err(Error::Taken {
                pid,
                path: data_dir.path().to_owned(),
            });
        }
        std::thread::sleep(PAUSE);
    }
    write_pid(&mut file).map_err(|source| data_dir.failed("write to", source))?;
    Ok(file.into())
}

/// Whether a server accepts connections on this socket.
fn answers(socket: &Path) -> bool {
    SocketPath::new(socket)
        .and_then(UnixStream::connect)
        .is_ok()
}

/// Sends SIGTERM to that process if it is an auto-started server that holds this lock; whether it did. A pidfd is opened
/// before anything is checked, so that a process that reuses the pid is not signalled.
fn ask_to_leave(lock: &File, pid: u32) -> bool {
    let Some(pid) = self::pid(pid) else {
        return false;
    };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
        return false;
    };
    holds(pid, lock) && is_autostarted(pid) && pidfd_send_signal(process, Signal::TERM).is_ok()
}

/// Whether that process has this file open.
pub(super) fn holds(pid: Pid, lock: &File) -> bool {
    let dir = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let (Ok(open), Ok(lock)) = (fs::read_dir(dir), lock.metadata()) else {
        return false;
    };
    let same = |meta: fs::Metadata| (meta.dev(), meta.ino()) == (lock.dev(), lock.ino());
    open.flatten()
        .any(|fd| fs::metadata(fd.path()).is_ok_and(same))
}

/// Whether a client started that server by itself.
pub(super) fn is_autostarted(pid: Pid) -> bool {
    let arguments = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
    arguments.is_ok_and(|text| text.split(|byte| *byte == 0).any(|one| one == AUTOSTARTED))
}

fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether a process holds the lock. Asks for a shared one, and gives it back at once.
pub(super) fn is_held(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            flock(file, FlockOperation::Unlock)?;
            Ok(false)
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// A process id as the kernel's calls take it.
pub(super) fn pid(number: u32) -> Option<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw)
}

/// The process id that the last server wrote into its lock.
pub(super) fn read_pid(file: &mut File) -> Option<u32> {
    const PID_BYTES_MAX: u64 = 16;
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(PID_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_second_server_is_told_who_is_first() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("k8e.sock");
        let data_dir = DataDir::prepare(dir.path()).unwrap();
        let first = take(&data_dir, &socket, false).unwrap();
        let _answers = UnixListener::bind(&socket).unwrap();
        let error = take(&data_dir, &socket, false).unwrap_err().to_string();
        assert!(
            error.contains(&format!("(pid {})", std::process::id())),
            "{error}"
        );
        drop(first);
        take(&data_dir, &socket, false).unwrap();
    }

    #[test]
    fn the_rest_of_a_dead_server_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::prepare(dir.path()).unwrap();
        let first = take(&data_dir, &dir.path().join("k8e.sock"), false).unwrap();
        let rest = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(first);
        });
        take(&data_dir, &dir.path().join("k8e.sock"), false).unwrap();
        rest.join().unwrap();
    }
}
