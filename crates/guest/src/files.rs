//! File calls below a root: read, write, list, stat, mkdir, rename, remove.
//!
//! The tree is controlled by processes in the sandbox, which change it while it is walked. Every call
//! resolves its path with [`resolve`] and from then on works on descriptors and single names.

mod list;
mod ops;
mod read;
mod remove;
mod resolve;
mod write;

pub(crate) use list::list;
pub(crate) use ops::{make_dir, rename, stat};
pub(crate) use read::read;
pub(crate) use remove::remove;
pub(crate) use resolve::lstat;
pub(crate) use write::write;

use crate::error::{Error, show};
use crate::users::User;
use k8e_wire::proto::{FileInfo, FileType};
use resolve::{Options, Owner, Place, RACES_MAX};
use rustix::fs::{FileType as Kind, OFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Metadata of a file for the host. `target` is the target of a symbolic link.
fn info(path: Vec<u8>, stat: &Stat, target: Vec<u8>) -> FileInfo {
    FileInfo {
        path: path.into(),
        r#type: file_type(stat).into(),
        size: stat.st_size.unsigned_abs(),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime_unix_ns: mtime_ns(stat),
        symlink_target: target.into(),
    }
}

/// Opens a directory, through symbolic links that stay below the root; returns its absolute path too. `operation` is for
/// errors.
pub(crate) fn open_dir(
    operation: &'static str,
    root: &[u8],
    path: &[u8],
    flags: OFlags,
) -> Result<(OwnedFd, Vec<u8>), Error> {
    for _ in 0..RACES_MAX {
        let options = Options {
            follow: true,
            ..Options::default()
        };
        let place = Place::find(root, path, options)?;
        let stat = place.existing()?;
        if file_type(stat) != FileType::Directory {
            return Err(Error::NotDirectory(show(&place.path)));
        }
        match place.open(flags | OFlags::DIRECTORY) {
            Err(Errno::LOOP | Errno::NOENT | Errno::NOTDIR) => {}
            opened => {
                let dir = opened.map_err(Error::os(operation, &place.path))?;
                return Ok((dir, place.path));
            }
        }
    }
    Err(Error::os(operation, path)(Errno::BUSY))
}

/// The owner that a request names; empty is none.
fn owner(user: &str) -> Result<Option<Owner>, Error> {
    if user.is_empty() {
        return Ok(None);
    }
    let User { uid, gid, .. } = User::find(user)?;
    Ok(Some(Owner { uid, gid }))
}

fn file_type(stat: &Stat) -> FileType {
    match Kind::from_raw_mode(stat.st_mode) {
        Kind::RegularFile => FileType::File,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo | Kind::Socket | Kind::CharacterDevice | Kind::BlockDevice | Kind::Unknown => {
            FileType::Other
        }
    }
}

#[allow(
    clippy::unnecessary_cast,
    reason = "the nanoseconds differ in type between architectures"
)]
pub(crate) fn mtime_ns(stat: &Stat) -> i64 {
    (stat.st_mtime as i64)
        .saturating_mul(1_000_000_000)
        .saturating_add(stat.st_mtime_nsec as i64)
}

/// The target of a symbolic link; empty for other files.
fn target(dir: impl AsFd, name: &[u8], stat: &Stat) -> Vec<u8> {
    match file_type(stat) {
        FileType::Symlink => rustix::fs::readlinkat(dir, name, Vec::new())
            .map_or_else(|_| Vec::new(), |t| t.into_bytes()),
        FileType::Unspecified | FileType::File | FileType::Directory | FileType::Other => {
            Vec::new()
        }
    }
}

/// Refuses all but regular files: opening a FIFO or a device could block, or have effects.
fn regular(path: &[u8], stat: &Stat) -> Result<(), Error> {
    match Kind::from_raw_mode(stat.st_mode) {
        Kind::RegularFile => Ok(()),
        Kind::Directory => Err(Error::IsDirectory(show(path))),
        Kind::Symlink
        | Kind::Fifo
        | Kind::Socket
        | Kind::CharacterDevice
        | Kind::BlockDevice
        | Kind::Unknown => Err(Error::Invalid(format!(
            "{:?} is neither a regular file nor a directory",
            show(path)
        ))),
    }
}
