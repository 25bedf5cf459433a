//! Path resolution below a root in a tree that hostile processes change.
//!
//! Each component is opened without following it, relative to the descriptor of the one before, so
//! a concurrent rename changes at most which file *below the root* is found.
//! `openat2` would do this in one call, but gVisor does not have it.

use crate::error::{Error, show};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Symbolic links followed for one path, as in the kernel.
const SYMLINKS_MAX: usize = 40;

/// Depth limit: each directory between the root and a file stays open while a path is resolved.
const DEPTH_MAX: usize = 256;

/// Longest path, as in the kernel.
const PATH_BYTES_MAX: usize = 4096;

/// Retries when the last component changes between stat and open.
pub(crate) const RACES_MAX: usize = 64;

/// Options of path resolution.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    /// Follow the last component if it is a symbolic link.
    pub(crate) follow: bool,
    /// Make missing parent directories.
    pub(crate) make_parents: bool,
    /// Owner of the directories that are made; none is the guest itself, root.
    pub(crate) owner: Option<Owner>,
}

/// Owner of what a file call makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Result of path resolution.
pub(crate) struct Place {
    /// The parent directory, or the root itself when there is no name.
    pub(crate) dir: OwnedFd,
    /// Name in that directory; none for the root itself.
    pub(crate) name: Option<Vec<u8>>,
    /// stat of the file, without following; none when it does not exist.
    pub(crate) stat: Option<Stat>,
    /// Absolute path, for messages.
    pub(crate) path: Vec<u8>,
}

struct Walk<'a> {
    root: &'a [u8],
    path: &'a [u8],
    /// Open directories from the root down.
    dirs: Vec<OwnedFd>,
    /// Names of `dirs`, without the root.
    names: Vec<Vec<u8>>,
    /// Remaining components, the next one last.
    todo: Vec<Vec<u8>>,
    symlinks: usize,
}

// === impl Place ===

impl Place {
    /// Resolves `path` beneath `root`.
    pub(crate) fn find(root: &[u8], path: &[u8], options: Options) -> Result<Self, Error> {
        let relative = check(root, path)?;
        let mut walk = Walk {
            root,
            path,
            dirs: vec![open_root(root, options.make_parents)?],
            names: Vec::new(),
            todo: components(relative),
            symlinks: 0,
        };
        while let Some(name) = walk.todo.pop() {
            if name == b".." {
                walk.up()?;
                continue;
            }
            let last = walk.todo.is_empty();
            match walk.open(&name) {
                Ok((fd, stat)) => match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Symlink if !last || options.follow => walk.follow(&fd, &name)?,
                    _ if last => return Ok(walk.end(name, Some(stat))),
                    FileType::Directory => walk.down(fd, name)?,
                    FileType::RegularFile
                    | FileType::Symlink
                    | FileType::Fifo
                    | FileType::Socket
                    | FileType::CharacterDevice
                    | FileType::BlockDevice
                    | FileType::Unknown => {
                        return Err(Error::NotDirectory(show(&walk.shown(&name))));
                    }
                },
                Err(Errno::NOENT) if last => return Ok(walk.end(name, None)),
                Err(Errno::NOENT) if options.make_parents => {
                    walk.make(&name, options.owner)?;
                    walk.todo.push(name);
                }
                Err(errno) => return Err(Error::os("open", &walk.shown(&name))(errno)),
            }
        }
        walk.end_at_directory()
    }

    /// The name, or an error because the call cannot be made on the root itself.
    pub(crate) fn name(&self) -> Result<&[u8], Error> {
        self.name.as_deref().ok_or_else(|| {
            Error::Invalid(format!("{:?} itself cannot be changed", show(&self.path)))
        })
    }

    /// Its stat, or an error when it does not exist.
    pub(crate) fn existing(&self) -> Result<&Stat, Error> {
        self.stat
            .as_ref()
            .ok_or_else(|| Error::os("open", &self.path)(Errno::NOENT))
    }

    /// Opens it, without following.
    pub(crate) fn open(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        rustix::fs::openat(
            &self.dir,
            self.name.as_deref().unwrap_or(b"."),
            flags,
            Mode::empty(),
        )
    }
}

// === impl Walk ===

impl Walk<'_> {
    fn dir(&self) -> BorrowedFd<'_> {
        self.dirs.last().expect("the root is never popped").as_fd()
    }

    fn open(&self, name: &[u8]) -> Result<(OwnedFd, Stat), Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(self.dir(), name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&fd)?;
        Ok((fd, stat))
    }

    fn down(&mut self, dir: OwnedFd, name: Vec<u8>) -> Result<(), Error> {
        if self.dirs.len() > DEPTH_MAX {
            return Err(Error::Invalid(format!(
                "path {:?} is deeper than {DEPTH_MAX} directories",
                show(self.path)
            )));
        }
        self.dirs.push(dir);
        self.names.push(name);
        Ok(())
    }

    /// Back to the parent by its open descriptor, which may differ from what `..` is now.
    fn up(&mut self) -> Result<(), Error> {
        if self.names.pop().is_none() {
            return Err(self.outside());
        }
        self.dirs.pop();
        Ok(())
    }

    /// Puts the target of a symbolic link in the place of the link.
    fn follow(&mut self, link: &OwnedFd, name: &[u8]) -> Result<(), Error> {
        self.symlinks += 1;
        if self.symlinks > SYMLINKS_MAX {
            return Err(Error::os("open", &self.shown(name))(Errno::LOOP));
        }
        let target = rustix::fs::readlinkat(link, c"", Vec::new())
            .map_err(Error::os("read the symbolic link", &self.shown(name)))?
            .into_bytes();
        let relative = if target.first() == Some(&b'/') {
            let below = below_root(self.root, &target).ok_or_else(|| self.outside())?;
            self.dirs.truncate(1);
            self.names.clear();
            below
        } else {
            &target
        };
        self.todo.extend(components(relative));
        if self.todo.len() > PATH_BYTES_MAX {
            return Err(Error::os("open", &self.shown(name))(Errno::NAMETOOLONG));
        }
        Ok(())
    }

    fn make(&self, name: &[u8], owner: Option<Owner>) -> Result<(), Error> {
        match rustix::fs::mkdirat(self.dir(), name, Mode::from_raw_mode(0o755)) {
            Ok(()) => {
                give_to(self.dir(), name, owner).map_err(Error::os("chown", &self.shown(name)))
            }
            Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(Error::os("make directory", &self.shown(name))(errno)),
        }
    }

    fn end(mut self, name: Vec<u8>, stat: Option<Stat>) -> Place {
        let path = self.shown(&name);
        let dir = self.dirs.pop().expect("the root is never popped");
        Place {
            dir,
            name: Some(name),
            stat,
            path,
        }
    }

    /// The path leads back to an open directory: the root, or by `..` to another.
    fn end_at_directory(mut self) -> Result<Place, Error> {
        let stat = rustix::fs::fstat(self.dir()).map_err(Error::os("stat", self.path))?;
        match self.names.pop() {
            Some(name) => {
                self.dirs.pop();
                Ok(self.end(name, Some(stat)))
            }
            None => {
                let dir = self.dirs.pop().expect("the root is never popped");
                Ok(Place {
                    dir,
                    name: None,
                    stat: Some(stat),
                    path: self.root.to_vec(),
                })
            }
        }
    }

    fn shown(&self, name: &[u8]) -> Vec<u8> {
        let mut path = self.root.strip_suffix(b"/").unwrap_or(self.root).to_vec();
        for name in self.names.iter().map(Vec::as_slice).chain([name]) {
            path.push(b'/');
            path.extend_from_slice(name);
        }
        path
    }

    fn outside(&self) -> Error {
        Error::Outside {
            path: show(self.path),
            root: show(self.root),
        }
    }
}

/// Sets the owner of a file by its name, without following it.
pub(crate) fn give_to(dir: impl AsFd, name: &[u8], owner: Option<Owner>) -> Result<(), Errno> {
    let Some(Owner { uid, gid }) = owner else {
        return Ok(());
    };
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
}

/// The part of the request's path below the root.
fn check<'a>(root: &[u8], path: &'a [u8]) -> Result<&'a [u8], Error> {
    if root.first() != Some(&b'/') || root.contains(&0) {
        return Err(Error::Invalid(format!(
            "root {:?} is not an absolute path",
            show(root)
        )));
    }
    if path.len() > PATH_BYTES_MAX {
        return Err(Error::Invalid(format!(
            "a path of {} bytes, at most {PATH_BYTES_MAX} are allowed",
            path.len()
        )));
    }
    if path.contains(&0) {
        return Err(Error::Invalid(format!(
            "path {:?} contains NUL, which no file name can",
            show(path)
        )));
    }
    let outside = || Error::Outside {
        path: show(path),
        root: show(root),
    };
    if path.split(|byte| *byte == b'/').any(|part| part == b"..") {
        return Err(outside());
    }
    if path.first() == Some(&b'/') {
        below_root(root, path).ok_or_else(outside)
    } else {
        Ok(path)
    }
}

/// The rest of an absolute path that begins with the root, compared by name.
fn below_root<'a>(root: &[u8], mut path: &'a [u8]) -> Option<&'a [u8]> {
    for part in components(root).into_iter().rev() {
        while let [b'/', rest @ ..] = path {
            path = rest;
        }
        let rest = path.strip_prefix(part.as_slice())?;
        if !matches!(rest.first(), None | Some(b'/')) {
            return None;
        }
        path = rest;
    }
    Some(path)
}

/// Components of a path, the first one last.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    let real = |part: &&[u8]| !matches!(*part, b"" | b".");
    path.split(|byte| *byte == b'/')
        .rev()
        .filter(real)
        .map(<[u8]>::to_vec)
        .collect()
}

fn open_root(root: &[u8], make: bool) -> Result<OwnedFd, Error> {
    // Not followed: a root that was replaced by a symbolic link would change what "below" means.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(CWD, root, flags, Mode::empty()) {
        Err(Errno::NOENT) if make => {
            use std::os::unix::ffi::OsStrExt as _;
            std::fs::create_dir_all(std::ffi::OsStr::from_bytes(root))
                .map_err(Error::os("make directory", root))?;
            rustix::fs::openat(CWD, root, flags, Mode::empty())
        }
        opened => opened,
    }
    .map_err(Error::os("open", root))
}

/// Stat of a name in a directory, not followed.
pub(crate) fn lstat(dir: impl AsFd, name: &[u8]) -> Result<Stat, Errno> {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_of_a_name_is_not_the_root() {
        assert_eq!(below_root(b"/workspace", b"/workspace/a"), Some(&b"/a"[..]));
        assert_eq!(below_root(b"/workspace/", b"//workspace"), Some(&b""[..]));
        assert_eq!(below_root(b"/workspace", b"/workspaces/a"), None);
        assert_eq!(below_root(b"/workspace", b"/etc"), None);
        assert_eq!(below_root(b"/", b"/etc"), Some(&b"/etc"[..]));
    }

    #[test]
    fn requests_that_leave_are_refused_by_name() {
        assert!(matches!(
            check(b"/w", b"a/../b"),
            Err(Error::Outside { .. })
        ));
        assert!(matches!(
            check(b"/w", b"/etc/passwd"),
            Err(Error::Outside { .. })
        ));
        assert!(matches!(check(b"/w", b"a\0"), Err(Error::Invalid(_))));
        assert!(matches!(check(b"w", b"a"), Err(Error::Invalid(_))));
        assert_eq!(check(b"/w", b"/w/a").unwrap(), b"/a");
    }
}
