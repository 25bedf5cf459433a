#![expect(unsafe_code, reason = "system calls that no safe function offers")]
//! A mount namespace for one thread.

use rustix::thread::UnshareFlags;

/// Gives this thread, and what it starts, mounts of its own.
pub(super) fn unshare_mounts() -> rustix::io::Result<()> {
    // SAFETY: descriptors stay shared; what other threads see of the file system does not change.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
}
