//! `RestoreTree`: makes a tree beside what is there, then puts it in its place.
//!
//! The root itself stays: it is a mount, and processes have it as their working directory. The new tree is made in a
//! directory of the root that only root inside can enter; at the end, while all processes are stopped, what was in the
//! root is moved to another one and the new entries are moved up. That part has no `await`, so that a host that is gone
//! cannot interrupt it, and it is undone when a step fails.

use super::stop::Stopped;
use super::{DEPTH_MAX, ENTRIES_MAX, open_dir, open_root, xattrs};
use crate::error::{Error, show};
use crate::files;
use crate::{Guest, sys};
use k8e_wire::proto::input::Input;
use k8e_wire::proto::reply::Reply;
use k8e_wire::proto::{
    Remove, RestoreTree, TreeDone, TreeEntries, TreeEntry, TreeKind, TreePieces,
};
use k8e_wire::{GuestEnd, Requests};
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A directory of the root, removed with everything in it when this is dropped.
struct Temporary {
    root: Vec<u8>,
    name: String,
    dir: OwnedFd,
    removed: bool,
}

/// A tree that is being made.
struct Making {
    top: Temporary,
    /// The root's own attributes.
    root: Option<TreeEntry>,
    /// Whose attributes are set at the end: making something in them changes them.
    dirs: Vec<TreeEntry>,
    /// Files of the current batch that wait for their bytes.
    files: Vec<Option<(OwnedFd, TreeEntry)>>,
    /// The last directory that something was made in.
    parent: Option<(Vec<u8>, Arc<OwnedFd>)>,
    made: usize,
}

/// Restores the tree.
pub(crate) async fn restore(
    guest: &Guest,
    end: &mut GuestEnd,
    request: RestoreTree,
) -> Result<Reply, Error> {
    let root = open_root(&request.root)?;
    let mut making = Making {
        top: Temporary::make(&request.root, &root, "new")?,
        root: None,
        dirs: Vec::new(),
        files: Vec::new(),
        parent: None,
        made: 0,
    };
    making.receive(&mut end.requests).await?;
    let _held = guest.starts.write().await;
    let stopped = Stopped::stop(guest).await?;
    let mut old = Temporary::make(&request.root, &root, "old")?;
    exchange(&root, &making.top, &old)?;
    let elapsed = stopped.elapsed();
    // Its own mtime is set after the last change in it; meanwhile its processes have their files.
    drop(stopped);
    let top = making.root.take();
    making.top.remove().await?;
    old.remove().await?;
    if let Some(entry) = top {
        attributes(&root, &entry).map_err(Error::os("set the attributes of", &request.root))?;
    }
    Ok(Reply::TreeDone(TreeDone {
        stopped_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
        skipped: 0,
    }))
}

/// Moves what is in the root to `old`, and what is in `new` to the root; or leaves both as they were.
fn exchange(root: &OwnedFd, new: &Temporary, old: &Temporary) -> Result<(), Error> {
    let failed = || Error::os::<Errno>("exchange the content of", &new.root);
    let mut out = names(root).map_err(failed())?;
    out.retain(|name| *name != new.name.as_bytes() && *name != old.name.as_bytes());
    let into = names(&new.dir).map_err(failed())?;
    let (mut moved_out, mut moved_in) = (0, 0);
    let mut all = || -> Result<(), Errno> {
        for name in &out {
            rustix::fs::renameat(root, &name[..], &old.dir, &name[..])?;
            moved_out += 1;
        }
        for name in &into {
            rustix::fs::renameat(&new.dir, &name[..], root, &name[..])?;
            moved_in += 1;
        }
        Ok(())
    };
    all().map_err(|errno| {
        // The same moves back: what could be moved once can be moved again.
        for name in &into[..moved_in] {
            let _ = rustix::fs::renameat(root, &name[..], &new.dir, &name[..]);
        }
        for name in &out[..moved_out] {
            let _ = rustix::fs::renameat(&old.dir, &name[..], root, &name[..]);
        }
        failed()(errno)
    })
}

fn names(dir: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if !matches!(&name[..], b"." | b"..") {
            names.push(name);
        }
    }
    Ok(names)
}

/// Owner first: changing it clears the setuid bit. The time last: everything else changes it.
fn attributes(file: &OwnedFd, entry: &TreeEntry) -> Result<(), Errno> {
    own(entry, |uid, gid| {
        rustix::fs::fchown(file, Some(uid), Some(gid))
    })?;
    xattrs::write(file, &entry.xattrs)?;
    rustix::fs::fchmod(file, Mode::from_raw_mode(entry.mode & 0o7777))?;
    rustix::fs::futimens(file, &times(entry))
}

fn own(entry: &TreeEntry, chown: impl FnOnce(Uid, Gid) -> Result<(), Errno>) -> Result<(), Errno> {
    // What the guest makes is root's already. -1 would mean "as it is".
    match (entry.uid, entry.gid) {
        (0, 0) | (u32::MAX, _) | (_, u32::MAX) => Ok(()),
        (uid, gid) => chown(Uid::from_raw(uid), Gid::from_raw(gid)),
    }
}

fn times(entry: &TreeEntry) -> Timestamps {
    let time = Timespec {
        tv_sec: entry.mtime_unix_ns.div_euclid(1_000_000_000),
        tv_nsec: entry.mtime_unix_ns.rem_euclid(1_000_000_000),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

// === impl Temporary ===

impl Temporary {
    fn make(root: &[u8], dir: &OwnedFd, what: &str) -> Result<Self, Error> {
        let failed = || Error::os::<Errno>("make a directory in", root);
        let random = sys::random().map_err(Error::os("make a directory in", root))?;
        let name = format!(".k8e-{what}-{random:016x}");
        rustix::fs::mkdirat(dir, name.as_str(), Mode::from_raw_mode(0o700)).map_err(failed())?;
        Ok(Self {
            root: root.to_vec(),
            dir: open_dir(dir, name.as_bytes()).map_err(failed())?,
            name,
            removed: false,
        })
    }

    async fn remove(&mut self) -> Result<(), Error> {
        self.removed = true;
        files::remove(&self.request()).await
    }

    fn request(&self) -> Remove {
        Remove {
            root: self.root.clone().into(),
            path: self.name.clone().into(),
            recursive: true,
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.removed {
            let request = self.request();
            tokio::spawn(async move { files::remove(&request).await });
        }
    }
}

// === impl Making ===

impl Making {
    async fn receive(&mut self, requests: &mut Requests) -> Result<(), Error> {
        loop {
            match requests.input().await? {
                Some(Input::TreeEntries(batch)) => {
                    self.end_files()?;
                    self.batch(batch).await?;
                }
                Some(Input::TreePieces(pieces)) => self.pieces(pieces)?,
                Some(Input::End(_)) => {
                    self.end_files()?;
                    return self.end_dirs().await;
                }
                Some(Input::Data(_) | Input::Signal(_) | Input::TreeWants(_)) => {
                    return Err(Error::Invalid(
                        "restoring a tree takes entries and their bytes".to_owned(),
                    ));
                }
                None => return Err(Error::Cancelled),
            }
            tokio::task::yield_now().await;
        }
    }

    async fn batch(&mut self, batch: TreeEntries) -> Result<(), Error> {
        self.made += batch.entries.len();
        if self.made > ENTRIES_MAX {
            return Err(Error::Exhausted("the tree has too many entries".to_owned()));
        }
        for (count, entry) in batch.entries.into_iter().enumerate() {
            let path = entry.path.clone();
            let file = self.make(entry).map_err(Error::os("restore", &path))?;
            self.files.push(file);
            if count % 64 == 63 {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Makes an entry; returns a file that waits for its bytes.
    fn make(&mut self, entry: TreeEntry) -> Result<Option<(OwnedFd, TreeEntry)>, Errno> {
        let kind = entry.kind();
        if entry.path.is_empty() && kind == TreeKind::Directory {
            self.root = Some(entry);
            return Ok(None);
        }
        let (dir, name) = self.place(&entry.path)?;
        let mode = Mode::from_raw_mode(entry.mode & 0o7777);
        match kind {
            TreeKind::File => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                let private = Mode::from_raw_mode(0o600);
                let file = rustix::fs::openat(&dir, &name[..], flags | OFlags::CLOEXEC, private)?;
                if entry.size > 0 {
                    rustix::fs::ftruncate(&file, entry.size)?;
                    return Ok(Some((file, entry)));
                }
                attributes(&file, &entry)?;
            }
            TreeKind::Directory => {
                rustix::fs::mkdirat(&dir, &name[..], Mode::from_raw_mode(0o700))?;
                self.dirs.push(entry);
            }
            TreeKind::Symlink | TreeKind::Fifo => {
                if kind == TreeKind::Symlink {
                    rustix::fs::symlinkat(&entry.target[..], &dir, &name[..])?;
                } else {
                    rustix::fs::mknodat(&dir, &name[..], FileType::Fifo, mode, 0)?;
                }
                let here = AtFlags::SYMLINK_NOFOLLOW;
                own(&entry, |uid, gid| {
                    rustix::fs::chownat(&dir, &name[..], Some(uid), Some(gid), here)
                })?;
                if kind == TreeKind::Fifo {
                    // It was just made, in a directory that only root inside can enter.
                    rustix::fs::chmodat(&dir, &name[..], mode, AtFlags::empty())?;
                }
                rustix::fs::utimensat(&dir, &name[..], &times(&entry), here)?;
            }
            TreeKind::HardLink => {
                let (from, first) = self.place(&entry.target)?;
                rustix::fs::linkat(&from, &first[..], &dir, &name[..], AtFlags::empty())?;
            }
            TreeKind::Unspecified => return Err(Errno::INVAL),
        }
        Ok(None)
    }

    /// The directory of a path, and its name there. Each directory is opened in the one above, and none is followed.
    fn place(&mut self, path: &[u8]) -> Result<(Arc<OwnedFd>, Vec<u8>), Errno> {
        let mut parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        let name = parts.pop().unwrap_or_default().to_vec();
        let valid = |part: &[u8]| !matches!(part, b"" | b"." | b"..");
        if parts.len() > DEPTH_MAX || !valid(&name) || !parts.iter().all(|part| valid(part)) {
            return Err(Errno::INVAL);
        }
        let above = &path[..path.len() - name.len()];
        if let Some((_, dir)) = self.parent.as_ref().filter(|(known, _)| known == above) {
            return Ok((Arc::clone(dir), name));
        }
        let mut dir = open_dir(&self.top.dir, b".")?;
        for part in parts {
            dir = open_dir(&dir, part)?;
        }
        let dir = Arc::new(dir);
        self.parent = Some((above.to_vec(), Arc::clone(&dir)));
        Ok((dir, name))
    }

    fn pieces(&self, pieces: TreePieces) -> Result<(), Error> {
        for piece in pieces.pieces {
            let file = self.files.get(piece.index as usize);
            let Some(Some((file, entry))) = file else {
                return Err(Error::Invalid("bytes without a file".to_owned()));
            };
            let (mut data, mut offset) = (&piece.data[..], piece.offset);
            while !data.is_empty() {
                match rustix::io::pwrite(file, data, offset) {
                    Err(Errno::INTR) => {}
                    written => {
                        let written = written.map_err(Error::os("write", &entry.path))?;
                        data = &data[written..];
                        offset += written as u64;
                    }
                }
            }
        }
        Ok(())
    }

    fn end_files(&mut self) -> Result<(), Error> {
        for (file, entry) in self.files.drain(..).flatten() {
            attributes(&file, &entry).map_err(Error::os("set the attributes of", &entry.path))?;
        }
        Ok(())
    }

    /// The deepest first: setting the attributes of one changes no other.
    async fn end_dirs(&mut self) -> Result<(), Error> {
        for (count, entry) in std::mem::take(&mut self.dirs).into_iter().rev().enumerate() {
            let set = self
                .place(&entry.path)
                .and_then(|(dir, name)| attributes(&open_dir(&*dir, &name)?, &entry));
            set.map_err(Error::os("set the attributes of", &entry.path))?;
            if count % 64 == 63 {
                tokio::task::yield_now().await;
            }
        }
        if self.root.is_none() {
            return Err(Error::Invalid(format!(
                "the tree for {:?} has no root",
                show(&self.top.root)
            )));
        }
        Ok(())
    }
}
