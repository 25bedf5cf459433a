//! Calls that are one system call: stat, mkdir, rename.

use super::resolve::{Options, Place, RACES_MAX, give_to};
use super::{info, owner, target};
use crate::error::{Error, show};
use k8e_wire::proto::{FileInfo, FileType, MakeDir, Move, Stat};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Permission bits of a new directory.
const DIR_MODE: u32 = 0o755;

/// stat; a symbolic link is followed only when the request asks for it.
pub(crate) fn stat(request: &Stat) -> Result<FileInfo, Error> {
    let options = Options {
        follow: request.follow,
        ..Options::default()
    };
    let place = Place::find(&request.root, &request.path, options)?;
    let stat = place.existing()?;
    let target = place
        .name
        .as_deref()
        .map_or_else(Vec::new, |name| target(&place.dir, name, stat));
    Ok(info(place.path.clone(), stat, target))
}

/// mkdir; with `parents` also those above it, and an existing directory is no error.
pub(crate) fn make_dir(request: &MakeDir) -> Result<(), Error> {
    let owner = owner(&request.user)?;
    let options = Options {
        follow: request.parents,
        make_parents: request.parents,
        owner,
    };
    for _ in 0..RACES_MAX {
        let place = Place::find(&request.root, &request.path, options)?;
        let exists = || Error::os("make directory", &place.path)(Errno::EXIST);
        let Some(name) = &place.name else {
            return if request.parents {
                Ok(())
            } else {
                Err(exists())
            };
        };
        match &place.stat {
            Some(stat) if request.parents && super::file_type(stat) == FileType::Directory => {
                return Ok(());
            }
            Some(_) => return Err(exists()),
            None => {}
        }
        let mode = if request.mode == 0 {
            DIR_MODE
        } else {
            request.mode & 0o7777
        };
        match rustix::fs::mkdirat(
            &place.dir,
            name.as_slice(),
            Mode::from_raw_mode(mode & 0o777),
        ) {
            // Another process made it first: look up what it made.
            Err(Errno::EXIST) => continue,
            made => made.map_err(Error::os("make directory", &place.path))?,
        }
        give_to(&place.dir, name, owner).map_err(Error::os("chown", &place.path))?;
        if request.mode != 0 {
            // chmod, regardless of the umask.
            let set = |dir| rustix::fs::fchmod(dir, Mode::from_raw_mode(mode));
            place
                .open(OFlags::RDONLY | OFlags::DIRECTORY)
                .and_then(set)
                .map_err(Error::os("chmod", &place.path))?;
        }
        return Ok(());
    }
    Err(Error::os("make directory", &request.path)(Errno::BUSY))
}

/// Renames a file or directory; the destination is replaced, as rename does.
pub(crate) fn rename(request: &Move) -> Result<(), Error> {
    let from = Place::find(&request.root, &request.from, Options::default())?;
    from.existing()?;
    let options = Options {
        make_parents: request.parents,
        owner: owner(&request.user)?,
        ..Options::default()
    };
    let to = Place::find(&request.root, &request.to, options)?;
    match rustix::fs::renameat(&from.dir, from.name()?, &to.dir, to.name()?) {
        Ok(()) => Ok(()),
        Err(Errno::XDEV) => Err(Error::Invalid(format!(
            "move {:?} to {:?}: they are on different file systems; copy it and remove it instead",
            show(&from.path),
            show(&to.path)
        ))),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Err(Error::os("move to", &to.path)(Errno::EXIST)),
        Err(errno) => Err(Error::os("move", &from.path)(errno)),
    }
}
