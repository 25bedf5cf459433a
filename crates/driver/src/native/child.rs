//! The first process of a native sandbox, from fork to exec of the guest.
//!
//! Flow: join the control groups · build the file system and enter it · give up devices · wire the
//! network · leave the server's keyring · enter the user namespace · give up capabilities · Landlock ·
//! seccomp · have sockets counted · exec the guest.
//!
//! All namespaces but the user namespace are made by, and belong to, the host's root. Root inside
//! therefore has no capability over its own mounts, network or host name: the kernel code behind
//! those, where most escapes come from, is out of reach.

use super::seccomp::Filters;
use super::sockets::{Count, Sockets};
use super::{confine, enter};
use crate::DriverError;
use crate::local::cgroup::Join;
use crate::local::cgroup::io::DiskRate;
use crate::local::rootfs::{Owners, Rootfs};
use crate::local::{HOSTNAME, OPEN_FILES_MAX, caps, sys};
use k8e_egress::tproxy;
use rustix::process::{Gid, Resource, Rlimit, Uid};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

/// RLIMIT_MEMLOCK of processes inside: the kernel's default.
const MEMLOCK_BYTES_MAX: u64 = 8 * 1024 * 1024;

/// Everything about the new sandbox that is plain data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Control groups to join.
    pub(crate) join: Join,
    /// Its root file system.
    pub(crate) rootfs: Rootfs,
    /// Disk I/O limits.
    pub(crate) disk_rate: DiskRate,
    /// Whether a gate will serve its network.
    pub(crate) network: bool,
}

/// File descriptors that it needs.
pub(crate) struct Handles<'a> {
    /// The guest executable.
    pub(crate) guest: &'a OwnedFd,
    /// The guest's listening socket.
    pub(crate) listener: OwnedFd,
    /// The user namespace to enter.
    pub(crate) userns: OwnedFd,
    /// Show the owners of an image's files as the sandbox's own.
    pub(crate) owners: Owners,
    /// Who counts its sockets.
    pub(crate) sockets: &'a Sockets,
}

/// Executes the guest, or returns why not.
pub(crate) fn become_guest(setup: &Setup, handles: Handles<'_>, filters: &Filters) -> DriverError {
    match prepare(setup, &handles, filters) {
        Ok(()) => {
            DriverError::step("start", "the guest")(sys::exec(handles.guest.as_fd(), c"k8e-guest"))
        }
        Err(error) => error,
    }
}

fn prepare(setup: &Setup, handles: &Handles<'_>, filters: &Filters) -> Result<(), DriverError> {
    sys::reset_signals();
    rustix::process::setsid().map_err(DriverError::step("start", "a session"))?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    setup.join.enter()?;
    let (devices, sockets) = (setup.join.devices()?, Count::open(&setup.join)?);
    setup
        .rootfs
        .mount(handles.userns.as_fd(), &handles.owners)?;
    setup
        .join
        .limit_disks(setup.disk_rate, setup.rootfs.disks())?;
    enter::enter(&setup.rootfs)?;
    devices.restrict(&[])?;
    // After it has joined all groups: a cgroup namespace hides their names.
    sys::unshare(UnshareFlags::NEWCGROUP)
        .map_err(DriverError::step("make", "a cgroup namespace"))?;
    network(setup.network)?;
    enter::mask_proc()?;
    rustix::system::sethostname(HOSTNAME.as_bytes())
        .map_err(DriverError::step("set", "the host name"))?;
    sys::leave_session_keyring().map_err(DriverError::step("leave", "the session keyring"))?;
    limit_resources()?;
    descriptors(handles)?;
    drop_privileges(handles)?;
    confine::landlock()
        .map_err(|error| DriverError::step("apply", "Landlock")(io::Error::other(error)))?;
    filters
        .install()
        .map_err(|error| DriverError::step("apply", "seccomp")(io::Error::other(error)))?;
    handles.sockets.count(&sockets)
}

/// Network with the gate as its only peer. Ports below 1024 need no privilege: root inside has no capability
/// over this namespace.
fn network(gate: bool) -> Result<(), DriverError> {
    let wired = match gate {
        true => tproxy::shared_kernel(),
        false => tproxy::loopback_only(),
    };
    wired.map_err(|error| DriverError::step("wire", "the network")(io::Error::other(error)))?;
    let path = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
    fs::write(path, "0").map_err(DriverError::step("write", path))
}

fn limit_resources() -> Result<(), DriverError> {
    let files = rustix::process::getrlimit(Resource::Nofile)
        .maximum
        .unwrap_or(OPEN_FILES_MAX)
        .min(OPEN_FILES_MAX);
    // None of these may be inherited from the server. A core limit of 1, because the kernel
    // takes 0 as no limit when cores are piped to a program of the host.
    let limits = [
        (Resource::Nofile, files),
        (Resource::Core, 1),
        (Resource::Memlock, MEMLOCK_BYTES_MAX),
        (Resource::Rtprio, 0),
        (Resource::Nice, 0),
    ];
    // The server's OOM score must not be inherited.
    let _ = fs::write("/proc/self/oom_score_adj", "0");
    for (resource, limit) in limits {
        rustix::process::setrlimit(
            resource,
            Rlimit {
                current: Some(limit),
                maximum: Some(limit),
            },
        )
        .map_err(DriverError::step("limit", format!("{resource:?}")))?;
    }
    Ok(())
}

/// The guest starts with /dev/null three times and its listener; everything else closes.
fn descriptors(handles: &Handles<'_>) -> Result<(), DriverError> {
    let null = fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map_err(DriverError::step("open", "/dev/null"))?;
    for done in [
        rustix::stdio::dup2_stdin(&null),
        rustix::stdio::dup2_stdout(&null),
        rustix::stdio::dup2_stderr(&null),
    ] {
        done.map_err(DriverError::step("set", "standard streams"))?;
    }
    // The descriptor may have the number that the listener gets.
    drop(null);
    sys::place_listener(handles.listener.as_fd())
        .map_err(DriverError::step("place", "the listener"))?;
    sys::close_on_exec_from(sys::LISTENER_FD + 1).map_err(DriverError::step("close", "descriptors"))
}

fn drop_privileges(handles: &Handles<'_>) -> Result<(), DriverError> {
    rustix::thread::move_into_link_name_space(
        handles.userns.as_fd(),
        Some(LinkNameSpaceType::User),
    )
    .map_err(DriverError::step("enter", "the user namespace"))?;
    let step = || DriverError::step::<rustix::io::Errno>("become", "root inside");
    rustix::thread::set_thread_groups(&[]).map_err(step())?;
    let (uid, gid) = (Uid::ROOT, Gid::ROOT);
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(step())?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(step())?;
    caps::drop_most().map_err(DriverError::step("drop", "capabilities"))?;
    rustix::thread::set_no_new_privs(true).map_err(DriverError::step("set", "no_new_privs"))
}
