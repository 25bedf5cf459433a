//! Process set-up of the server: logging, umask, root check.

use super::args::ServerArgs;
use super::error::Error;
use rustix::fs::Mode;

/// Starts logging, detaches from the terminal if asked, and sets the umask.
pub(super) fn set_up(args: &ServerArgs) -> Result<(), Error> {
    if !crate::log::to_stderr(&args.log) {
        return Err(Error::Log {
            filter: args.log.clone(),
        });
    }
    if args.detached {
        // Fails only for a session leader, which needs no new session.
        let _ = rustix::process::setsid();
    }
    // Not inherited: the file modes that sandboxes see must not depend on who started the server.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    Ok(())
}

/// Checks that this process is root and that the binary contains the guest.
pub(super) fn check(guest: &[u8]) -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    if guest.is_empty() {
        return Err(Error::NoGuest);
    }
    Ok(())
}

/// Total memory of this machine.
pub(super) fn machine_memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}
