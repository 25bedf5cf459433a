#![expect(unsafe_code, reason = "rustix asks who unshares about descriptors")]
//! The one system call that has no safe function.

use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Puts the calling thread into a network namespace of its own.
pub(super) fn leave_the_network() -> rustix::io::Result<()> {
    // SAFETY: descriptors stay shared, FILES is not among the flags.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
}
