//! Makes a pseudo-terminal.

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

/// Of a terminal that does not say.
const ROWS: u16 = 24;
const COLS: u16 = 80;

/// Both sides of a terminal.
pub(super) struct Pair {
    /// What we keep.
    pub(super) ours: Ours,
    /// The command's.
    pub(super) slave: OwnedFd,
}

/// Our side of a terminal.
pub(super) struct Ours {
    pub(super) master: AsyncFd<OwnedFd>,
    /// The name of the other side.
    pub(super) path: CString,
}

/// A size that a terminal can have; 0 is the usual.
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

/// Makes a terminal that is that user's.
pub(super) fn open(size: Winsize, user: &User) -> Result<Pair, Error> {
    let failed = || Error::os::<io::Error>("make", b"a terminal");
    try_open(size, user).map_err(failed())
}

fn try_open(size: Winsize, user: &User) -> io::Result<Pair> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    let path = rustix::pty::ptsname(&master, Vec::new())?;
    // Without a look at the file system where the kernel can do so: gVisor cannot.
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
        // So that erasing a letter erases all its bytes. It works without.
        modes.input_modes |= InputModes::IUTF8;
        let _ = rustix::termios::tcsetattr(&slave, OptionalActions::Now, &modes);
    }
    if user.uid != 0 {
        // For programs that open it by its name; most do not.
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
