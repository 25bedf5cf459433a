//! The Unix socket's file: for root, and for the group if there is one.

use crate::Error;
use crate::auth::peer;
use rustix::fs::{Gid, Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Listens on `path`, which a dead server may have left behind.
///
/// The socket gets its name only after its permissions, so that nobody slips in between.
pub(crate) fn bind(path: &Path, group: &str) -> Result<UnixListener, Error> {
    let failed = |operation| {
        let path = path.to_owned();
        move |source| Error::Socket {
            operation,
            path,
            source,
        }
    };
    let place = Place::open(path).map_err(failed("open the directory of"))?;
    let new = place.name(".new");
    let _ = std::fs::remove_file(&new);
    let listener = UnixListener::bind(&new).map_err(failed("bind"))?;
    let (mode, gid) = match peer::group_id(group) {
        Some(gid) => (0o660, Some(Gid::from_raw(gid))),
        None => (0o600, None),
    };
    rustix::fs::chown(&new, None, gid)
        .map_err(io::Error::from)
        .map_err(failed("chown"))?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(mode))
        .map_err(failed("chmod"))?;
    std::fs::rename(&new, place.name("")).map_err(failed("rename"))?;
    listener.set_nonblocking(true).map_err(failed("set up"))?;
    Ok(listener)
}

/// A socket's address holds 107 bytes; through its directory's descriptor it is always short.
struct Place {
    dir: OwnedFd,
    name: std::ffi::OsString,
}

// === impl Place ===

impl Place {
    fn open(path: &Path) -> io::Result<Self> {
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            dir: rustix::fs::open(dir, flags, Mode::empty())?,
            name: name.to_owned(),
        })
    }

    fn name(&self, suffix: &str) -> PathBuf {
        let mut name = self.name.clone();
        name.push(suffix);
        PathBuf::from(format!("/proc/self/fd/{}", self.dir.as_raw_fd())).join(name)
    }
}
