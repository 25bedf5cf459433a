//! File permissions for the unprivileged server: its group may traverse directories and
//! connect to guests. Everything else has mode root only.

use crate::DriverError;
use k8e_net::proc_fd;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use std::fs::{self, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

const DIRECTORY_MODE: u32 = 0o710;
const SOCKET_MODE: u32 = 0o660;

/// Mode of directories: the group may traverse, not list.
pub(crate) fn directory(path: &Path, gid: u32) -> Result<(), DriverError> {
    give(path, gid, FileType::Directory, DIRECTORY_MODE)
}

/// Mode of sockets: the group may connect.
pub(crate) fn socket(path: &Path, gid: u32) -> Result<(), DriverError> {
    give(path, gid, FileType::Socket, SOCKET_MODE)
}

/// Sets owner root, the group and the mode. Works on one descriptor throughout: until a moment ago a
/// sandbox may have been able to replace the file.
fn give(path: &Path, gid: u32, kind: FileType, mode: u32) -> Result<(), DriverError> {
    let step =
        |operation| DriverError::step::<std::io::Error>(operation, path.display().to_string());
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd: OwnedFd =
        rustix::fs::open(path, flags, Mode::empty()).map_err(|error| step("open")(error.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|error| step("stat")(error.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != kind {
        let error = std::io::Error::other("its file type is wrong");
        return Err(step("stat")(error));
    }
    rustix::fs::chownat(
        &fd,
        c"",
        Some(Uid::ROOT),
        Some(Gid::from_raw(gid)),
        AtFlags::EMPTY_PATH,
    )
    .map_err(|error| step("chown")(error.into()))?;
    fs::set_permissions(proc_fd::path(&fd), Permissions::from_mode(mode)).map_err(step("chmod"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_is_opened_to_the_group_and_nothing_else_is_taken_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.sock");
        let gid = rustix::process::getgid().as_raw();
        let _listener = UnixListener::bind(&path).unwrap();
        socket(&path, gid).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, SOCKET_MODE);
        let link = dir.path().join("link");
        symlink(&path, &link).unwrap();
        socket(&link, gid).unwrap_err();
        directory(&path, gid).unwrap_err();
        directory(dir.path(), gid).unwrap();
        assert_eq!(
            fs::metadata(dir.path()).unwrap().mode() & 0o777,
            DIRECTORY_MODE
        );
    }
}
