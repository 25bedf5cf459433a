//! Files by descriptor (`/proc/self/fd/N`), and with that paths of Unix sockets that are short enough for an address.
//!
//! `sun_path` holds 107 bytes, and a data directory can be deeper. Through a descriptor of its directory a socket's path
//! is always short.

use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

/// Bytes of a path in the address of a Unix socket (`sun_path` without its last zero).
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// A path that fits into the address of a Unix socket, for as long as this lives.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    /// The directory, when the path goes through its descriptor.
    _dir: Option<OwnedFd>,
}

/// The path of an open file: `/proc/self/fd/N`. Valid while `fd` is open.
#[must_use]
pub fn path(fd: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

// === impl SocketPath ===

impl SocketPath {
    /// `path` itself if it is short enough, else one through a descriptor of its directory, which must exist.
    ///
    /// # Errors
    ///
    /// The directory cannot be opened, or `path` has no file name.
    pub fn new(path: &Path) -> io::Result<Self> {
        if path.as_os_str().len() <= SOCKET_PATH_BYTES_MAX {
            return Ok(Self {
                path: path.to_owned(),
                _dir: None,
            });
        }
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(dir, flags, Mode::empty())?;
        Ok(Self {
            path: self::path(&dir).join(name),
            _dir: Some(dir),
        })
    }
}

impl AsRef<Path> for SocketPath {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_socket_deeper_than_an_address_is_bound_and_reached() {
        let dir = tempfile::tempdir().unwrap();
        for depth in [1, 120] {
            let dir = dir.path().join("d".repeat(depth));
            std::fs::create_dir(&dir).unwrap();
            let socket = dir.join("s");
            let _listener = UnixListener::bind(SocketPath::new(&socket).unwrap()).unwrap();
            assert!(socket.exists());
            UnixStream::connect(SocketPath::new(&socket).unwrap()).unwrap();
        }
    }

    #[test]
    fn a_directory_that_is_missing_is_an_error() {
        let missing = Path::new("/proc/none").join("d".repeat(120)).join("s");
        let error = SocketPath::new(&missing).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn an_open_file_has_a_path() {
        let file = tempfile::tempfile().unwrap();
        std::fs::write(path(&file), "text").unwrap();
        assert_eq!(std::fs::read(path(&file)).unwrap(), b"text");
    }
}
