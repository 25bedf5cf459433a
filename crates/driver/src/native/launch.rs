//! How the launcher makes a native sandbox.

use super::child::{self, Handles, Setup};
use super::seccomp::Filters;
use super::sockets::Sockets;
use crate::local::birth::{self, Report};
use crate::local::host::Host;
use crate::local::kind::Kind;
use crate::local::launcher::Failure;
use crate::local::sandboxes::{Prepared, Started};
use crate::local::sys;
use crate::{DriverError, SandboxSpec};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

/// All but the user namespace, which is entered last.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// What confines every native sandbox, whichever it is.
#[derive(Clone, Copy)]
pub(crate) struct Confinement<'a> {
    /// The system calls it may make.
    pub(crate) filters: &'a Filters,
    /// What counts its sockets.
    pub(crate) sockets: &'a Sockets,
}

/// Makes the first process and waits until it has become the guest.
pub(crate) fn start(
    host: &Host,
    spec: &SandboxSpec,
    prepared: Prepared,
    guest: &OwnedFd,
    confinement: Confinement<'_>,
) -> Result<Started, DriverError> {
    let dir = &prepared.dir;
    let listener = listen(dir)
        .and_then(sys::move_up)
        .map_err(DriverError::step("listen in", dir.display().to_string()))?;
    let setup = Setup {
        join: prepared.cgroup.join(),
        rootfs: host.rootfs(spec, prepared.disk, prepared.uid_base),
        disk_rate: host.disk_rate(),
        network: host.has_network(),
    };
    let forked = birth::fork(NAMESPACES, &setup.join, prepared.uid_base, |userns| {
        let handles = Handles {
            guest,
            listener,
            userns,
            sockets: confinement.sockets,
        };
        Report::Failed(Failure::from(&child::become_guest(
            &setup,
            handles,
            confinement.filters,
        )))
    })?;
    forked.wait()?;
    Ok(Started {
        pid: forked.pid,
        pidfd: forked.pidfd,
    })
}

/// Listens in the sandbox's directory, whatever the length of its path.
fn listen(dir: &Path) -> io::Result<OwnedFd> {
    let fd = rustix::fs::open(dir, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let listener = UnixListener::bind(Path::new(&path).join(Kind::Native.socket()))?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}
