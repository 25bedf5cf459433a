//! The Unix socket's file: for root, and for the group if there is one.

use crate::Error;
use crate::auth::peer;
use rustix::fs::{Gid, Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// The name of a socket that we listen on.
pub(crate) struct SocketFile {
    place: Place,
    /// Device and inode.
    identity: (u64, u64),
}

/// Listens on `path`, which a dead server may have left behind.
///
/// The socket gets its name only after its permissions, so that nobody slips in between.
pub(crate) fn bind(path: &Path, group: &str) -> Result<(UnixListener, SocketFile), Error> {
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
    let identity = identity(&new).map_err(failed("look at"))?;
    std::fs::rename(&new, place.name("")).map_err(failed("rename"))?;
    Ok((listener, SocketFile { place, identity }))
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

// === impl SocketFile ===

impl SocketFile {
    /// Removes it, if it is still ours: somebody may have removed the data directory under us, and
    /// another server may have put its socket where ours was.
    pub(crate) fn remove(self) {
        let path = self.place.name("");
        if identity(&path).is_ok_and(|there| there == self.identity) {
            let _ = std::fs::remove_file(path);
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_of_another_server_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let socket = data.join("k8e.sock");
        let listen = || {
            std::fs::create_dir_all(&data).unwrap();
            bind(&socket, "no-such-group").unwrap()
        };
        let (_old, old_file) = listen();
        std::fs::remove_dir_all(&data).unwrap();
        let (_new, new_file) = listen();
        old_file.remove();
        assert!(socket.exists(), "it is the new server's");
        // In the same directory too.
        let (_newer, newer_file) = listen();
        new_file.remove();
        assert!(socket.exists(), "it is the newer server's");
        newer_file.remove();
        assert!(!socket.exists());
    }
}
