//! `StatDisk`: size and usage of a file system (statfs).

use crate::error::Error;
use k8e_wire::proto::{DiskUse, StatDisk};

/// Size and usage of the file system that a path is on, in bytes.
pub(crate) fn stat(request: &StatDisk) -> Result<DiskUse, Error> {
    let failed = Error::os("stat the file system of", &request.path);
    let stat = rustix::fs::statvfs(&request.path[..]).map_err(failed)?;
    let total_bytes = stat.f_blocks.saturating_mul(stat.f_frsize);
    let free_bytes = stat.f_bfree.saturating_mul(stat.f_frsize);
    Ok(DiskUse {
        total_bytes,
        used_bytes: total_bytes.saturating_sub(free_bytes),
    })
}
