//! The directory that a layer is unpacked into. Every operation names its object by a descriptor of the
//! directory that it is in, which was opened without following a link or leaving the tree.

use super::path::EntryPath;
use crate::error::ImageError;
use crate::tar::Entry;
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Makes overlayfs show nothing of lower layers in a directory.
const OPAQUE_XATTR: &str = "user.overlay.opaque";

/// Attributes that are kept; those of overlayfs itself would change what it shows.
const KEPT_XATTRS: &[u8] = b"user.";
const OVERLAY_XATTRS: &[u8] = b"user.overlay.";

/// Of one attribute: what ext4 takes.
const XATTR_BYTES_MAX: usize = 4000;

const BUFFER_BYTES: usize = 128 * 1024;

/// A run of zeroes of this length, at such an offset, becomes a hole.
const HOLE_BYTES: usize = 4096;

/// What a file gets besides its content.
pub(super) struct Owner<'a> {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u32,
    pub(super) mtime: (i64, u32),
    pub(super) xattrs: &'a [(Vec<u8>, Vec<u8>)],
}

pub(super) struct Tree {
    root: OwnedFd,
    /// The directory that was used last: most entries are in the same one.
    last: Option<(EntryPath, OwnedFd)>,
    /// Times of directories, set when nothing changes in them any more.
    times: Vec<(EntryPath, Timestamps)>,
    buffer: Vec<u8>,
    /// Directories that were made because the archive leaves them out.
    implied: u64,
}

// === impl Tree ===

impl Tree {
    pub(super) fn new(root: OwnedFd) -> Self {
        Self {
            root,
            last: None,
            times: Vec::new(),
            buffer: vec![0; BUFFER_BYTES],
            implied: 0,
        }
    }

    /// How many directories were made, since this was asked last, that no entry named.
    pub(super) fn take_implied(&mut self) -> u64 {
        std::mem::take(&mut self.implied)
    }

    pub(super) fn directory(
        &mut self,
        path: &EntryPath,
        owner: &Owner<'_>,
    ) -> Result<(), ImageError> {
        if let Some(name) = path.name() {
            let name = name.to_vec();
            self.enter(&path.parent())?;
            let was = self.look(&name, path)?;
            let hidden = was.as_ref().is_some_and(is_whiteout);
            if !was
                .as_ref()
                .is_some_and(|was| kind(was) == FileType::Directory)
            {
                self.make_room(&name, path, was)?;
                let made =
                    rustix::fs::mkdirat(self.parent(), &name[..], Mode::from_raw_mode(0o755));
                made.map_err(failed("make", path))?;
            }
            self.enter(path)?;
            if hidden {
                // What lower layers have of that name was taken away before.
                set_opaque(self.parent(), path)?;
            }
        } else {
            self.enter(path)?;
        }
        let fd = self.parent();
        give(fd, owner, path)?;
        self.times.push((path.clone(), times(owner)));
        Ok(())
    }

    /// Writes a regular file; `read` gives its stored data.
    pub(super) fn file(
        &mut self,
        path: &EntryPath,
        entry: &Entry,
        owner: &Owner<'_>,
        mut read: impl FnMut(&mut [u8]) -> Result<usize, ImageError>,
    ) -> Result<(), ImageError> {
        let name = self.place(path)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened =
            rustix::fs::openat(self.parent(), &name[..], flags, Mode::from_raw_mode(0o600));
        let mut file = std::fs::File::from(opened.map_err(failed("make", path))?);
        match &entry.segments {
            None => loop {
                let filled = fill(&mut self.buffer, &mut read)?;
                write(&mut file, &self.buffer[..filled]).map_err(failed("write", path))?;
                if filled < self.buffer.len() {
                    break;
                }
            },
            Some(segments) => {
                for segment in segments {
                    let (mut at, mut left) = (segment.offset, segment.length);
                    while left > 0 {
                        let want = usize::try_from(left)
                            .unwrap_or(usize::MAX)
                            .min(self.buffer.len());
                        let got = read(&mut self.buffer[..want])?;
                        if got == 0 {
                            return Err(path.refused("its data ends early"));
                        }
                        let wrote = file.write_all_at(&self.buffer[..got], at);
                        wrote.map_err(failed("write", path))?;
                        at += got as u64;
                        left -= got as u64;
                    }
                }
            }
        }
        file.set_len(entry.size).map_err(failed("write", path))?;
        let fd = OwnedFd::from(file);
        give(&fd, owner, path)?;
        rustix::fs::futimens(&fd, &times(owner)).map_err(failed("set the time of", path))
    }

    pub(super) fn symlink(
        &mut self,
        path: &EntryPath,
        target: &[u8],
        owner: &Owner<'_>,
    ) -> Result<(), ImageError> {
        let name = self.place(path)?;
        rustix::fs::symlinkat(target, self.parent(), &name[..]).map_err(failed("make", path))?;
        self.give_no_follow(&name, owner, path)
    }

    pub(super) fn fifo(&mut self, path: &EntryPath, owner: &Owner<'_>) -> Result<(), ImageError> {
        let name = self.place(path)?;
        let mode = Mode::from_raw_mode(owner.mode & 0o777);
        let made = rustix::fs::mknodat(self.parent(), &name[..], FileType::Fifo, mode, 0);
        made.map_err(failed("make", path))?;
        self.give_no_follow(&name, owner, path)
    }

    /// A second name of a file of this layer. Files of lower layers cannot be linked to: no tool makes
    /// such a layer.
    pub(super) fn hard_link(
        &mut self,
        path: &EntryPath,
        target: &EntryPath,
    ) -> Result<(), ImageError> {
        if path == target {
            return Ok(());
        }
        let (Some(_), Some(target_name)) = (path.name(), target.name()) else {
            return Err(path.refused("it is a hard link to the root"));
        };
        let there = open_directory(&self.root, &target.parent())?;
        let stat = there
            .as_ref()
            .map(|dir| stat(dir, target_name, target))
            .transpose()?
            .flatten();
        let (Some(there), Some(stat)) = (there, stat) else {
            return Err(path.refused("it is a hard link to a file that this layer does not have"));
        };
        if !matches!(
            kind(&stat),
            FileType::RegularFile | FileType::Symlink | FileType::Fifo
        ) {
            return Err(path.refused("it is a hard link to what is not a file"));
        }
        let name = self.place(path)?;
        let linked = rustix::fs::linkat(
            &there,
            target_name,
            self.parent(),
            &name[..],
            AtFlags::empty(),
        );
        linked.map_err(failed("link", path))
    }

    /// Hides a name of lower layers. What this layer has under that name stays.
    pub(super) fn whiteout(&mut self, path: &EntryPath) -> Result<(), ImageError> {
        let Some(name) = path.name().map(<[u8]>::to_vec) else {
            return Err(path.refused("a whiteout of the root"));
        };
        self.enter(&path.parent())?;
        match self.look(&name, path)? {
            None => {
                let mode = Mode::empty();
                let kind = FileType::CharacterDevice;
                let made = rustix::fs::mknodat(self.parent(), &name[..], kind, mode, 0);
                made.map_err(failed("hide", path))
            }
            Some(was) if kind(&was) == FileType::Directory => self.opaque(path),
            Some(_) => Ok(()),
        }
    }

    /// Hides all that lower layers have in a directory.
    pub(super) fn opaque(&mut self, path: &EntryPath) -> Result<(), ImageError> {
        self.enter(path)?;
        set_opaque(self.parent(), path)
    }

    /// Sets the times of directories, and has everything written to the disk.
    pub(super) fn finish(&mut self) -> Result<(), ImageError> {
        for (path, times) in std::mem::take(&mut self.times) {
            // One that something else took the place of has no time any more.
            if let Ok(Some(dir)) = open_directory(&self.root, &path) {
                rustix::fs::futimens(&dir, &times).map_err(failed("set the time of", &path))?;
            }
        }
        rustix::fs::syncfs(&self.root).map_err(ImageError::io("write the layer to the disk"))
    }

    fn give_no_follow(
        &self,
        name: &[u8],
        owner: &Owner<'_>,
        path: &EntryPath,
    ) -> Result<(), ImageError> {
        let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let given = rustix::fs::chownat(self.parent(), name, Some(uid), Some(gid), flags);
        given.map_err(failed("chown", path))?;
        let timed = rustix::fs::utimensat(self.parent(), name, &times(owner), flags);
        timed.map_err(failed("set the time of", path))
    }

    /// Enters the directory that `path` is in and takes away what has its name; the name.
    fn place(&mut self, path: &EntryPath) -> Result<Vec<u8>, ImageError> {
        let name = path.name().map(<[u8]>::to_vec);
        let name = name.ok_or_else(|| path.refused("it would take the place of the root"))?;
        self.enter(&path.parent())?;
        let was = self.look(&name, path)?;
        self.make_room(&name, path, was)?;
        Ok(name)
    }

    fn look(&self, name: &[u8], path: &EntryPath) -> Result<Option<Stat>, ImageError> {
        stat(self.parent(), name, path)
    }

    /// The later of two entries of one name stays.
    fn make_room(
        &mut self,
        name: &[u8],
        path: &EntryPath,
        was: Option<Stat>,
    ) -> Result<(), ImageError> {
        let Some(was) = was else { return Ok(()) };
        if kind(&was) == FileType::Directory {
            let parent = path.parent();
            remove_all(self.parent(), name).map_err(failed("replace", path))?;
            // A directory below it may be the one that is kept.
            self.last = None;
            return self.enter(&parent);
        }
        let removed = rustix::fs::unlinkat(self.parent(), name, AtFlags::empty());
        removed.map_err(failed("replace", path))
    }

    /// Makes a directory the one that is worked in, and makes it when it is missing.
    fn enter(&mut self, path: &EntryPath) -> Result<(), ImageError> {
        if self.last.as_ref().is_some_and(|(last, _)| last == path) {
            return Ok(());
        }
        let dir = match open_directory(&self.root, path)? {
            Some(dir) => dir,
            None => self.make_directories(path)?,
        };
        self.last = Some((path.clone(), dir));
        Ok(())
    }

    /// Archives may leave parents out; they are root's then.
    fn make_directories(&mut self, path: &EntryPath) -> Result<OwnedFd, ImageError> {
        let mut dir = open_directory(&self.root, &EntryPath::default())?
            .ok_or_else(|| path.refused("the root is gone"))?;
        for name in path.components() {
            match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => self.implied += 1,
                Err(Errno::EXIST) => {}
                Err(error) => return Err(failed("make", path)(error)),
            }
            dir = match open_in(&dir, name) {
                Err(Errno::NOTDIR) if stat(&dir, name, path)?.as_ref().is_some_and(is_whiteout) => {
                    let replaced = rustix::fs::unlinkat(&dir, name, AtFlags::empty())
                        .and_then(|()| rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755)))
                        .and_then(|()| open_in(&dir, name));
                    let made = replaced.map_err(failed("make", path))?;
                    // What lower layers have of that name was taken away before.
                    set_opaque(&made, path)?;
                    made
                }
                Err(Errno::NOTDIR) if is_symlink(&dir, name, path)? => {
                    return Err(not_a_directory(path, Errno::LOOP));
                }
                opened => opened.map_err(|error| not_a_directory(path, error))?,
            };
        }
        Ok(dir)
    }

    /// The directory that is worked in.
    fn parent(&self) -> &OwnedFd {
        self.last.as_ref().map_or(&self.root, |(_, dir)| dir)
    }
}

const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Opens a directory of the tree; none when it is not there.
fn open_directory(root: &OwnedFd, path: &EntryPath) -> Result<Option<OwnedFd>, ImageError> {
    let relative: &[u8] = match path.is_root() {
        true => b".",
        false => path.as_bytes(),
    };
    match open_in(root, relative) {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::NOENT) => Ok(None),
        // A whiteout that a directory follows is looked at where the directory is made.
        Err(Errno::NOTDIR) => Ok(None),
        Err(error) => Err(not_a_directory(path, error)),
    }
}

fn open_in(dir: &OwnedFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(dir, path, flags, Mode::empty(), BENEATH)
}

fn not_a_directory(path: &EntryPath, error: Errno) -> ImageError {
    match error {
        Errno::LOOP => path.refused("a directory above it is a symbolic link"),
        Errno::NOTDIR => path.refused("what is above it is not a directory"),
        error => failed("open", path)(error),
    }
}

fn stat(dir: &OwnedFd, name: &[u8], path: &EntryPath) -> Result<Option<Stat>, ImageError> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(failed("look at", path)(error)),
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn is_symlink(dir: &OwnedFd, name: &[u8], path: &EntryPath) -> Result<bool, ImageError> {
    let stat = stat(dir, name, path)?;
    Ok(stat.is_some_and(|stat| kind(&stat) == FileType::Symlink))
}

fn is_whiteout(stat: &Stat) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Whether an unpacked directory hides all that lower layers have in it.
pub fn is_opaque(dir: &Path) -> bool {
    let mut value = [0; 1];
    rustix::fs::lgetxattr(dir, OPAQUE_XATTR, &mut value[..])
        .is_ok_and(|read| &value[..read] == b"y")
}

fn set_opaque(dir: &OwnedFd, path: &EntryPath) -> Result<(), ImageError> {
    let set = rustix::fs::fsetxattr(dir, OPAQUE_XATTR, b"y", XattrFlags::empty());
    set.map_err(failed("hide what is below", path))
}

/// Owner first: changing it takes set-user-id bits away.
fn give(fd: &OwnedFd, owner: &Owner<'_>, path: &EntryPath) -> Result<(), ImageError> {
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    rustix::fs::fchown(fd, Some(uid), Some(gid)).map_err(failed("chown", path))?;
    rustix::fs::fchmod(fd, Mode::from_raw_mode(owner.mode)).map_err(failed("chmod", path))?;
    for (name, value) in owner.xattrs {
        if !name.starts_with(KEPT_XATTRS) || name.starts_with(OVERLAY_XATTRS) {
            continue;
        }
        if value.len() > XATTR_BYTES_MAX {
            return Err(path.refused("an extended attribute of it is too long"));
        }
        let set = rustix::fs::fsetxattr(fd, &name[..], value, XattrFlags::empty());
        set.map_err(failed("set an attribute of", path))?;
    }
    Ok(())
}

fn times(owner: &Owner<'_>) -> Timestamps {
    let time = Timespec {
        tv_sec: owner.mtime.0,
        tv_nsec: owner.mtime.1.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

/// Fills the buffer as far as there is data.
fn fill(
    buffer: &mut [u8],
    read: &mut impl FnMut(&mut [u8]) -> Result<usize, ImageError>,
) -> Result<usize, ImageError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match read(&mut buffer[filled..])? {
            0 => break,
            more => filled += more,
        }
    }
    Ok(filled)
}

/// Writes at the file's place; blocks of zeroes become holes.
fn write(file: &mut std::fs::File, bytes: &[u8]) -> io::Result<()> {
    use std::io::Seek as _;
    let is_hole = |block: &[u8]| block.len() == HOLE_BYTES && block.iter().all(|byte| *byte == 0);
    let mut start = 0;
    for (number, block) in bytes.chunks(HOLE_BYTES).enumerate() {
        if is_hole(block) {
            let at = number * HOLE_BYTES;
            file.write_all(&bytes[start..at])?;
            start = at + HOLE_BYTES;
            file.seek(io::SeekFrom::Current(HOLE_BYTES as i64))?;
        }
    }
    file.write_all(&bytes[start..])
}

/// Removes a directory and all in it. Its depth is bounded by that of paths.
fn remove_all(parent: &OwnedFd, name: &[u8]) -> rustix::io::Result<()> {
    let dir = open_in(parent, name)?;
    let mut entries = Dir::read_from(dir.as_fd())?;
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => remove_all(&dir, name)?,
            done => done?,
        }
    }
    rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

/// For `map_err`: what was done to what.
fn failed<E: Into<io::Error>>(operation: &str, path: &EntryPath) -> impl FnOnce(E) -> ImageError {
    ImageError::io(format!("{operation} {:?} of the layer", path.shown()))
}
