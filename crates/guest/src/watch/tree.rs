//! The watched directories: paths of watch descriptors, and with `recursive` the directories that appear, move and
//! disappear. The tree belongs to hostile processes: nothing is followed below the directory that was asked for, and
//! numbers and paths are bounded.
//!
//! No directory stays open, because one that is open does not report its removal.

use super::queue::Queue;
use super::{Event, Slot};
use crate::error::{Error, show};
use crate::files::{lstat, open_dir};
use k8e_wire::proto::{FileChange, FileEvent, WatchFiles};
use rustix::fs::inotify::{self, ReadFlags, WatchFlags};
use rustix::fs::{Dir, FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};

/// Directories of one watch, and of all watches of a guest: each costs about a kilobyte of kernel memory, and of the
/// sandbox's own limit of inotify watches, which its programs need too.
const DIRECTORIES_MAX: usize = 8192;
const DIRECTORIES_OF_ALL_MAX: usize = 16_384;

/// Levels below the watched directory, and bytes of a directory's path: both bound the memory of a watch, and the work of
/// opening a directory.
const DEPTH_MAX: usize = 64;
const PATH_BYTES_MAX: usize = 4096;

/// Entries scanned between two yields to other tasks.
const SCANNED_AT_ONCE: usize = 256;

/// Entries that were found by a scan and whose events are awaited. Of more, some are reported twice.
const FOUND_MAX: usize = 4096;

/// What is reported, and what the tree needs to know.
const FLAGS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

pub(super) struct Tree<'a> {
    slot: Slot<'a>,
    request: WatchFiles,
    /// Absolute path of the watched directory, for messages.
    path: Vec<u8>,
    /// Device and inode of the watched directory.
    identity: (u64, u64),
    /// Its watch descriptor.
    top: i32,
    /// Paths of all watched directories, relative to the watched directory.
    directories: HashMap<i32, Vec<u8>>,
    /// Directories to be scanned.
    pending: VecDeque<Pending>,
    scan: Option<Scan>,
    /// Entries that scans have reported; their own events may still be in the kernel's queue.
    found: HashSet<Vec<u8>>,
    /// Directories whose first half of a rename was read, by its cookie.
    moved: HashMap<u32, Vec<u8>>,
    /// While the whole tree is scanned again: watch descriptors that were not met yet.
    unmet: Option<HashSet<i32>>,
}

struct Pending {
    path: Vec<u8>,
    /// Report what is in it: a new directory may have been filled before it was watched.
    report: bool,
}

struct Scan {
    of: Pending,
    dir: Dir,
}

// === impl Tree ===

impl<'a> Tree<'a> {
    pub(super) fn new(
        inotify: &OwnedFd,
        slot: Slot<'a>,
        request: WatchFiles,
    ) -> Result<Self, Error> {
        let (dir, path) = open_dir("watch", &request.root, &request.path, OFlags::PATH)?;
        let identity = identity(&dir).map_err(Error::os("watch", &path))?;
        let mut tree = Self {
            slot,
            request,
            path,
            identity,
            top: 0,
            directories: HashMap::new(),
            pending: VecDeque::new(),
            scan: None,
            found: HashSet::new(),
            moved: HashMap::new(),
            unmet: None,
        };
        tree.top = tree.watch(inotify, &dir, Vec::new(), false)?;
        Ok(tree)
    }

    /// Whether directories wait to be scanned, which goes before reading events.
    pub(super) fn is_scanning(&self) -> bool {
        self.scan.is_some() || !self.pending.is_empty()
    }

    /// Scans a part of a directory.
    pub(super) fn scan(&mut self, inotify: &OwnedFd, queue: &mut Queue) -> Result<(), Error> {
        let Some(mut scan) = self.next_scan()? else {
            self.scanned(inotify);
            return Ok(());
        };
        for _ in 0..SCANNED_AT_ONCE {
            let entry = match scan.dir.read() {
                Some(Ok(entry)) => entry,
                // A directory that was removed while it was read has no more entries.
                None | Some(Err(Errno::NOENT)) => {
                    self.scanned(inotify);
                    return Ok(());
                }
                Some(Err(errno)) => {
                    return Err(Error::os("watch", &self.shown(&scan.of.path))(errno));
                }
            };
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let mut kind = entry.file_type();
            if kind == FileType::Unknown
                && let Ok(stat) = scan.dir.fd().and_then(|dir| lstat(dir, name))
            {
                kind = FileType::from_raw_mode(stat.st_mode);
            }
            let directory = kind == FileType::Directory;
            let path = joined(&scan.of.path, name);
            if scan.of.report {
                if self.found.len() < FOUND_MAX {
                    self.found.insert(path.clone());
                }
                queue.push(event(FileChange::Created, path.clone(), directory, 0));
            }
            if directory {
                self.add(inotify, path, scan.of.report)?;
            }
        }
        self.scan = Some(scan);
        Ok(())
    }

    /// Handles one event.
    pub(super) fn handle(
        &mut self,
        inotify: &OwnedFd,
        of: Event,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let has = |flags: ReadFlags| of.flags.intersects(flags);
        if has(ReadFlags::QUEUE_OVERFLOW) {
            queue.overflow();
            // New directories are among what was lost.
            self.scan_again();
            return Ok(());
        }
        let gone = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT;
        if of.wd == self.top && has(gone | ReadFlags::IGNORED) {
            let path = show(&self.path);
            return Err(Error::NotFound(format!(
                "{path} any more: it was removed or moved"
            )));
        }
        if has(ReadFlags::IGNORED) {
            self.forget(of.wd);
            return Ok(());
        }
        let Some(dir) = self.directories.get(&of.wd) else {
            return Ok(());
        };
        if of.name.is_empty() {
            // About the directory itself: the one above it reports that by name.
            return Ok(());
        }
        let path = joined(dir, &of.name);
        let directory = has(ReadFlags::ISDIR);
        let follow = directory && self.request.recursive;
        let change = if has(ReadFlags::CREATE) {
            if self.found.remove(&path) {
                return Ok(());
            }
            FileChange::Created
        } else if has(ReadFlags::MODIFY) {
            FileChange::Written
        } else if has(ReadFlags::DELETE) {
            FileChange::Removed
        } else if has(ReadFlags::MOVED_FROM) {
            FileChange::MovedFrom
        } else if has(ReadFlags::MOVED_TO) {
            FileChange::MovedTo
        } else if has(ReadFlags::ATTRIB) {
            FileChange::Attributes
        } else {
            return Ok(());
        };
        queue.push(event(change, path.clone(), directory, of.cookie));
        if follow {
            self.follow(inotify, change, path, of.cookie)?;
        }
        Ok(())
    }

    /// Called when the kernel's queue is empty: no event from before is to come.
    pub(super) fn drained(&mut self, inotify: &OwnedFd) {
        self.found.clear();
        // The second half of a rename follows at once, so these went to where nothing is watched.
        for (_, path) in std::mem::take(&mut self.moved) {
            let left: Vec<i32> = self.below(&path).collect();
            self.unwatch(inotify, left);
        }
    }

    /// Keeps up with a change of a directory below.
    fn follow(
        &mut self,
        inotify: &OwnedFd,
        change: FileChange,
        path: Vec<u8>,
        cookie: u32,
    ) -> Result<(), Error> {
        match change {
            FileChange::Created => self.add(inotify, path, true),
            FileChange::MovedFrom => {
                self.moved.insert(cookie, path);
                Ok(())
            }
            FileChange::MovedTo => match self.moved.remove(&cookie) {
                Some(from) if self.rename(&from, &path) => Ok(()),
                // It was made and renamed before it could be watched.
                Some(_) => self.add(inotify, path, true),
                // It came from elsewhere, as a whole: what is in it is watched and not reported.
                None => self.add(inotify, path, false),
            },
            FileChange::Unspecified
            | FileChange::Written
            | FileChange::Removed
            | FileChange::Attributes
            | FileChange::Overflow => Ok(()),
        }
    }

    /// Changes the paths of a directory and of those below it. False when it is not watched.
    fn rename(&mut self, from: &[u8], to: &[u8]) -> bool {
        let mut watched = false;
        if self.directories.values().any(|path| path == to) {
            // Two directories were exchanged, or this one took the place of another: their events do not tell.
            self.scan_again();
        }
        for path in self.directories.values_mut() {
            if is_below(path, from) {
                watched = true;
                path.splice(..from.len(), to.iter().copied());
            }
        }
        for pending in &mut self.pending {
            if is_below(&pending.path, from) {
                pending.path.splice(..from.len(), to.iter().copied());
            }
        }
        watched
    }

    /// Watches a directory by its path, without following anything. One that is not there any more is no error.
    fn add(&mut self, inotify: &OwnedFd, path: Vec<u8>, report: bool) -> Result<(), Error> {
        let levels = path.split(|byte| *byte == b'/').count();
        if levels > DEPTH_MAX || path.len() > PATH_BYTES_MAX {
            return Err(Error::Exhausted(format!(
                "{:?} is deeper than {DEPTH_MAX} directories or {PATH_BYTES_MAX} bytes: watch a directory further down",
                show(&self.shown(&path)),
            )));
        }
        let Some(dir) = self.open(&path)? else {
            return Ok(());
        };
        match identity(&dir) {
            // Another file system, such as /proc.
            Ok((device, _)) if device != self.identity.0 => return Ok(()),
            Ok(_) => {}
            Err(errno) => return Err(Error::os("watch", &self.shown(&path))(errno)),
        }
        self.watch(inotify, &dir, path, report).map(drop)
    }

    fn watch(
        &mut self,
        inotify: &OwnedFd,
        dir: &OwnedFd,
        path: Vec<u8>,
        report: bool,
    ) -> Result<i32, Error> {
        // The descriptor's own name: the path may lead elsewhere by now.
        let name = format!("/proc/self/fd/{}", dir.as_raw_fd());
        let wd = match inotify::add_watch(inotify, name, FLAGS) {
            Ok(wd) => wd,
            Err(Errno::NOSPC) => {
                return Err(Error::Exhausted(
                    "the sandbox has no more inotify watches: watch a smaller directory, or not recursively"
                        .to_owned(),
                ));
            }
            Err(errno) => return Err(Error::os("watch", &self.shown(&path))(errno)),
        };
        let met = self.unmet.as_mut().is_some_and(|unmet| unmet.remove(&wd));
        let known = self.directories.insert(wd, path.clone()).is_some();
        if !known {
            let (own, all) = self.slot.add_directory();
            if own > DIRECTORIES_MAX || all > DIRECTORIES_OF_ALL_MAX {
                return Err(Error::Exhausted(format!(
                    "{:?} has too many directories below it, at most {DIRECTORIES_MAX} are watched, by all watches \
                     {DIRECTORIES_OF_ALL_MAX}: watch a smaller directory, or not recursively",
                    show(&self.path)
                )));
            }
        }
        if self.request.recursive && (!known || met) {
            self.pending.push_back(Pending { path, report });
        }
        Ok(wd)
    }

    /// Scans everything again, to find what was missed: which directories there are, and where.
    fn scan_again(&mut self) {
        if !self.request.recursive {
            return;
        }
        self.scan = None;
        self.pending.clear();
        self.moved.clear();
        let mut unmet: HashSet<i32> = self.directories.keys().copied().collect();
        unmet.remove(&self.top);
        self.unmet = Some(unmet);
        self.pending.push_back(Pending {
            path: Vec::new(),
            report: false,
        });
    }

    /// The directory that is being scanned, or the next; none when that is gone.
    fn next_scan(&mut self) -> Result<Option<Scan>, Error> {
        if let Some(scan) = self.scan.take() {
            return Ok(Some(scan));
        }
        let Some(of) = self.pending.pop_front() else {
            return Ok(None);
        };
        let Some(dir) = self.open(&of.path)? else {
            return Ok(None);
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match openat(&dir, c".", flags, Mode::empty()).and_then(Dir::new) {
            Ok(dir) => Ok(Some(Scan { of, dir })),
            Err(errno) if is_gone(errno) => Ok(None),
            Err(errno) => Err(Error::os("watch", &self.shown(&of.path))(errno)),
        }
    }

    /// Called after each directory. At the end of a second scan, what was not met is watched no more.
    fn scanned(&mut self, inotify: &OwnedFd) {
        if !self.is_scanning()
            && let Some(unmet) = self.unmet.take()
        {
            self.unwatch(inotify, unmet);
        }
    }

    /// Opens a directory below the watched one, component by component; none when it is gone or was replaced.
    fn open(&self, path: &[u8]) -> Result<Option<OwnedFd>, Error> {
        let (root, at) = (&self.request.root, &self.request.path);
        let Ok((mut dir, _)) = open_dir("watch", root, at, OFlags::PATH) else {
            // An event says so.
            return Ok(None);
        };
        if identity(&dir) != Ok(self.identity) {
            return Ok(None);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
        {
            dir = match openat(&dir, name, flags, Mode::empty()) {
                Ok(dir) => dir,
                Err(errno) if is_gone(errno) => return Ok(None),
                Err(errno) => return Err(Error::os("watch", &self.shown(path))(errno)),
            };
        }
        Ok(Some(dir))
    }

    fn unwatch(&mut self, inotify: &OwnedFd, wds: impl IntoIterator<Item = i32>) {
        for wd in wds {
            // It may have been removed, with its watch.
            let _ = inotify::remove_watch(inotify, wd);
            self.forget(wd);
        }
    }

    fn forget(&mut self, wd: i32) {
        if self.directories.remove(&wd).is_some() {
            self.slot.remove_directory();
        }
    }

    fn below(&self, path: &[u8]) -> impl Iterator<Item = i32> {
        let all = self.directories.iter();
        all.filter(move |(_, dir)| is_below(dir, path))
            .map(|(wd, _)| *wd)
    }

    fn shown(&self, path: &[u8]) -> Vec<u8> {
        joined(&self.path, path)
    }
}

/// Device and inode.
fn identity(dir: impl AsFd) -> Result<(u64, u64), Errno> {
    let stat = fstat(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Whether a path is that directory, or below it.
fn is_below(path: &[u8], dir: &[u8]) -> bool {
    path.strip_prefix(dir)
        .is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
}

/// It was removed or replaced meanwhile, or may not be entered.
fn is_gone(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::ACCESS
    )
}

fn joined(dir: &[u8], name: &[u8]) -> Vec<u8> {
    match dir.is_empty() {
        true => name.to_vec(),
        false => [dir, name].join(&b'/'),
    }
}

fn event(change: FileChange, path: Vec<u8>, directory: bool, move_id: u32) -> FileEvent {
    FileEvent {
        change: change.into(),
        path: path.into(),
        directory,
        move_id,
    }
}
