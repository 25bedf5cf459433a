//! User namespaces of sandboxes, made ahead of the processes that use them.

use super::sys::{self, Fork};
use super::uids::RANGE;
use crate::DriverError;
use rustix::process::{Gid, Uid};
use rustix::thread::UnshareFlags;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;

/// A new user namespace that maps 0 to `base` outside. A process must live in it to make it.
///
/// That process runs as uid `base` when it makes it: what the kernel counts per user (inotify, pending
/// signals, message queues) is then charged to the sandbox's own uid, not to the host's root.
pub(crate) fn user_namespace(base: u32) -> Result<OwnedFd, DriverError> {
    mapped_namespace(0, base)
}

/// The same, in which `inside` is `base` outside: a mount with it shows files of `inside` as `base`'s.
pub(crate) fn mapped_namespace(inside: u32, base: u32) -> Result<OwnedFd, DriverError> {
    namespace(base, &format!("{inside} {base} {RANGE}"))
}

/// The same for a disk that is written to: the host's root, whose directories overlays work in, stays itself.
pub(crate) fn disk_namespace(inside: u32, base: u32) -> Result<OwnedFd, DriverError> {
    namespace(base, &format!("{inside} {base} {RANGE}\n0 0 1"))
}

fn namespace(base: u32, map: &str) -> Result<OwnedFd, DriverError> {
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
                // Waits until the parent has opened the namespace.
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
            for file in ["uid_map", "gid_map"] {
                let path = format!("/proc/{pid}/{file}");
                fs::write(&path, map).map_err(DriverError::step("write", path.as_str()))?;
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
