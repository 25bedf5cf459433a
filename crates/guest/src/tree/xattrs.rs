//! Extended attributes of files and directories.

use k8e_wire::proto::TreeXattr;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

/// Bytes of all names, and of one value: what Linux allows.
const BYTES_MAX: usize = 64 * 1024;

/// Those of a name in a directory, which is not opened: a pipe would block. `buffer` is scratch space.
pub(super) fn read(
    dir: BorrowedFd<'_>,
    name: &[u8],
    buffer: &mut Vec<u8>,
) -> Result<Vec<TreeXattr>, Errno> {
    let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
    path.extend_from_slice(name);
    // One call for most files: they have none.
    buffer.resize(BYTES_MAX, 0);
    let length = match rustix::fs::llistxattr(path.as_slice(), &mut buffer[..]) {
        // The file system has none.
        Err(Errno::NOTSUP | Errno::NOSYS) => return Ok(Vec::new()),
        length => length?,
    };
    let names = buffer[..length].to_vec();
    let mut xattrs = Vec::new();
    for name in names
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        match rustix::fs::lgetxattr(path.as_slice(), name, &mut buffer[..]) {
            Ok(length) => xattrs.push(TreeXattr {
                name: name.to_vec().into(),
                value: buffer[..length].to_vec().into(),
            }),
            // Listed, but not for everybody to read; or gone.
            Err(Errno::NODATA | Errno::PERM | Errno::NOTSUP) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(xattrs)
}

/// Sets them. What only the host's root may set, or this file system has not, is left out.
pub(super) fn write(file: impl AsFd, xattrs: &[TreeXattr]) -> Result<(), Errno> {
    for xattr in xattrs {
        let set = rustix::fs::fsetxattr(&file, &xattr.name[..], &xattr.value, XattrFlags::empty());
        match set {
            Err(Errno::PERM | Errno::NOTSUP) if !xattr.name.starts_with(b"user.") => {}
            set => set?,
        }
    }
    Ok(())
}
