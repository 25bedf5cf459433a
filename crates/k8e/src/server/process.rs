//! What the server asks of its own process before it builds anything.

use super::args::ServerArgs;
use super::error::Error;
use rustix::fs::Mode;

/// Logging, the terminal, and the permissions of what we create.
pub(super) fn set_up(args: &ServerArgs) -> Result<(), Error> {
    if !crate::log::to_stderr(&args.log) {
        return Err(Error::Log {
            filter: args.log.clone(),
        });
    }
    if args.detached {
        // Fails only when we lead a session already, and that is what we want.
        let _ = rustix::process::setsid();
    }
    // Whoever started us may have any; what sandboxes see must not depend on it.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    Ok(())
}

/// Whether this process can be a server at all.
pub(super) fn check(guest: &[u8]) -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    if guest.is_empty() {
        return Err(Error::NoGuest);
    }
    Ok(())
}

/// All of this machine's memory.
pub(super) fn machine_memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}
