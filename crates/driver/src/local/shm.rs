//! The size of a native sandbox's `/dev/shm`, changed while it lives.

use super::shm_bytes;
use k8e_model::Limits;
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_string, fspick};
use std::io;
use std::os::fd::AsFd as _;

/// Gives `/dev/shm` the size that a launch with these limits would have given it.
pub(crate) fn resize(pid: i32, limits: &Limits) -> io::Result<()> {
    let path = format!("/proc/{pid}/root/dev/shm");
    let shm = fspick(rustix::fs::CWD, path, FsPickFlags::FSPICK_CLOEXEC)?;
    fsconfig_set_string(shm.as_fd(), "size", shm_bytes(limits).to_string())?;
    Ok(fsconfig_reconfigure(shm.as_fd())?)
}
