//! Launches a native sandbox in the launcher.

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
use k8e_net::proc_fd::SocketPath;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// All but the user namespace, which is entered last.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// Confinement that is the same for every native sandbox.
#[derive(Clone, Copy)]
pub(crate) struct Confinement<'a> {
    /// seccomp filters.
    pub(crate) filters: &'a Filters,
    /// The process that limits numbers of sockets.
    pub(crate) sockets: &'a Sockets,
}

/// Forks the first process and waits until it has executed the guest.
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
        rootfs: host.rootfs(spec, prepared.disk, prepared.uid_base, prepared.uid_base)?,
        disk_rate: host.disk_rate(),
        network: host.has_network(),
    };
    let owners = setup.rootfs.owners()?;
    let forked = birth::fork(NAMESPACES, &setup.join, prepared.uid_base, |userns| {
        let handles = Handles {
            guest,
            listener,
            userns,
            owners,
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

/// Binds and listens in the sandbox's directory, however long its path is.
fn listen(dir: &Path) -> io::Result<OwnedFd> {
    let path = SocketPath::new(&dir.join(Kind::Native.socket()))?;
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}
