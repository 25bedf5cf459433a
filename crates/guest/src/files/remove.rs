//! Removes a file, or a tree of any depth.

use super::resolve::{Options, Place, lstat};
use crate::error::{Error, show};
use crate::sys;
use k8e_wire::proto::Remove;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Depth limit: each level keeps a directory open. Deeper directories are first moved up.
const DEPTH_MAX: usize = 64;

/// Passes over a directory that other processes keep filling.
const PASSES_MAX: usize = 10_000;

/// Entries removed between two yields to other tasks.
const YIELD_EVERY: usize = 64;

struct Level {
    dir: Dir,
    /// Its name in the level above.
    name: Vec<u8>,
}

/// Removes the file or tree at a path, never following symbolic links.
pub(crate) async fn remove(request: &Remove) -> Result<(), Error> {
    let place = Place::find(&request.root, &request.path, Options::default())?;
    let (name, stat) = (place.name()?, place.existing()?);
    let failed = || Error::os::<Errno>("remove", &place.path);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return rustix::fs::unlinkat(&place.dir, name, AtFlags::empty()).map_err(failed());
    }
    for _ in 0..PASSES_MAX {
        match rustix::fs::unlinkat(&place.dir, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if request.recursive => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                return Err(Error::Invalid(format!(
                    "remove {:?}: the directory is not empty; remove it recursively",
                    show(&place.path)
                )));
            }
            removed => return removed.map_err(failed()),
        }
        let top = open_dir(&place.dir, name).map_err(failed())?;
        empty(top).await.map_err(failed())?;
    }
    Err(failed()(Errno::NOTEMPTY))
}

/// Empties a directory; may leave entries that were added meanwhile or were moved up from below.
async fn empty(top: OwnedFd) -> Result<(), Errno> {
    let mut levels = vec![Level {
        dir: Dir::read_from(&top)?,
        name: Vec::new(),
    }];
    let mut removed = 0usize;
    while let (depth, Some(level)) = (levels.len(), levels.last_mut()) {
        removed += 1;
        if removed.is_multiple_of(YIELD_EVERY) {
            tokio::task::yield_now().await;
        }
        let Some(entry) = level.dir.read() else {
            let emptied = levels.pop().map_or_else(Vec::new, |level| level.name);
            if let Some(above) = levels.last() {
                // ENOTEMPTY when another process adds entries: the next pass removes them.
                ignore(
                    rustix::fs::unlinkat(above.dir.fd()?, emptied, AtFlags::REMOVEDIR),
                    Errno::NOTEMPTY,
                )?;
            }
            continue;
        };
        let entry = match entry {
            Err(Errno::NOENT) => {
                levels.pop();
                continue;
            }
            entry => entry?,
        };
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        if let Some(sub) = remove_one(&top, level.dir.fd()?, name, depth)? {
            levels.push(Level {
                dir: Dir::new(sub)?,
                name: name.to_vec(),
            });
        }
    }
    Ok(())
}

/// Removes one entry; returns it as a directory to descend into when that is not empty.
fn remove_one(
    top: &OwnedFd,
    dir: impl AsFd,
    name: &[u8],
    depth: usize,
) -> Result<Option<OwnedFd>, Errno> {
    let stat = match lstat(&dir, name) {
        Err(Errno::NOENT) => return Ok(None),
        stat => stat?,
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        ignore(
            rustix::fs::unlinkat(&dir, name, AtFlags::empty()),
            Errno::ISDIR,
        )?;
        return Ok(None);
    }
    match rustix::fs::unlinkat(&dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) => {}
        removed => return ignore(removed, Errno::NOTDIR).map(|()| None),
    }
    if depth >= DEPTH_MAX {
        let random = sys::random().map_err(|_| Errno::IO)?;
        rustix::fs::renameat(&dir, name, top, format!(".k8e-rm-{random:016x}"))?;
        return Ok(None);
    }
    match open_dir(&dir, name) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        opened => opened.map(Some),
    }
}

fn open_dir(dir: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags =
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

/// No error when it is gone, or was replaced.
fn ignore(result: Result<(), Errno>, other: Errno) -> Result<(), Errno> {
    match result {
        Err(errno) if errno == Errno::NOENT || errno == other => Ok(()),
        result => result,
    }
}
