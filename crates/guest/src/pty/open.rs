//! Opens a pseudo-terminal (PTY).

use crate::error::Error;
use crate::exec::above;
use crate::sys;
use crate::users::User;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::pty::OpenptFlags;
use rustix::termios::{InputModes, OptionalActions, Winsize};
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use tokio::io::unix::AsyncFd;

/// Default size of a terminal (when the request sets none).
const ROWS: u16 = 24;
const COLS: u16 = 80;

/// Both sides of a PTY.
pub(super) struct Pair {
    /// The master, kept by the guest.
    pub(super) ours: Ours,
    /// The slave, for the command.
    pub(super) slave: OwnedFd,
}

/// The master.
pub(super) struct Ours {
    pub(super) master: AsyncFd<OwnedFd>,
    /// Path of the slave.
    pub(super) path: CString,
}

/// Checks a size; 0 is the default.
pub(super) fn size(rows: u32, cols: u32) -> Result<Winsize, Error> {
    let number = |asked: u32, usual: u16| match u16::try_from(asked) {
        Ok(0) => Ok(usual),
        Ok(number) => Ok(number),
        Err(_) => Err(Error::Invalid(format!(
            "{asked} rows or columns are more than a terminal can have"
        ))),
    };
    Ok(Winsize {
        ws_row: number(rows, ROWS)?,
        ws_col: number(cols, COLS)?,
        ws_xpixel: 0,
        ws_ypixel: 0,
    })
}

/// Opens a PTY whose slave belongs to that user.
pub(super) fn open(size: Winsize, user: &User) -> Result<Pair, Error> {
    let failed = || Error::os::<io::Error>("make", b"a terminal");
    try_open(size, user).map_err(failed())
}

fn try_open(size: Winsize, user: &User) -> io::Result<Pair> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    let path = rustix::pty::ptsname(&master, Vec::new())?;
    // TIOCGPTPEER needs no path where the kernel has it: gVisor does not.
    let slave = match rustix::pty::ioctl_tiocgptpeer(&master, flags) {
        Ok(slave) => slave,
        Err(_) => {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            rustix::fs::open(path.as_c_str(), flags, Mode::empty())?
        }
    };
    let slave = above(slave)?;
    rustix::termios::tcsetwinsize(&master, size)?;
    if let Ok(mut modes) = rustix::termios::tcgetattr(&slave) {
        // IUTF8, so that erase deletes a whole character. Optional.
        modes.input_modes |= InputModes::IUTF8;
        let _ = rustix::termios::tcsetattr(&slave, OptionalActions::Now, &modes);
    }
    if user.uid != 0 {
        // For programs that open the slave by its path; most do not.
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        let _ = rustix::fs::fchown(&slave, Some(uid), Some(gid));
    }
    rustix::fs::fcntl_setfl(&master, OFlags::NONBLOCK)?;
    let master = sys::polled(master)?;
    Ok(Pair {
        ours: Ours { master, path },
        slave,
    })
}
