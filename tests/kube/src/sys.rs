#![expect(unsafe_code, reason = "system calls between fork and exec")]
//! The one thing that std has no safe call for: a child in a session of its own.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Gives the child its own session: a Ctrl-C at the terminal is not for it, and it leads a process
/// group that can be killed as one.
pub(crate) fn own_session(command: &mut Command) -> &mut Command {
    let enter = || {
        rustix::process::setsid()?;
        Ok(())
    };
    // SAFETY: the closure makes one system call, allocates nothing and takes no lock.
    unsafe { command.pre_exec(enter) }
}
