//! Trees of files, for snapshots: `SaveTree` sends one, `RestoreTree` puts one in the place of what is there.
//!
//! The host stores what comes and trusts none of it; here, the tree is the work of hostile processes, so nothing is
//! followed and everything is opened relative to its directory, as in [`crate::files`].

mod restore;
mod save;
mod stop;
mod xattrs;

pub(crate) use restore::restore;
pub(crate) use save::save;

use crate::error::Error;
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Entries of one message.
const BATCH_ENTRIES: usize = 256;

/// Bytes of names, links and attributes of one message, and of content: well below the frame limit.
const BATCH_BYTES: usize = 256 * 1024;

/// Levels of directories: each is open during a walk.
const DEPTH_MAX: usize = 256;

/// Entries of a tree, as on the host's side.
const ENTRIES_MAX: usize = 1_000_000;

fn open_dir(dir: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags =
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

fn open_root(root: &[u8]) -> Result<OwnedFd, Error> {
    if root.first() != Some(&b'/') {
        return Err(Error::Invalid(
            "the root is not an absolute path".to_owned(),
        ));
    }
    open_dir(rustix::fs::CWD, root).map_err(Error::os("open", root))
}

#[allow(
    clippy::unnecessary_cast,
    reason = "the nanoseconds differ in type between architectures"
)]
fn ctime_ns(stat: &Stat) -> i64 {
    (stat.st_ctime as i64)
        .saturating_mul(1_000_000_000)
        .saturating_add(stat.st_ctime_nsec as i64)
}
