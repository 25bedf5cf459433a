//! `SaveTree`: walks a tree and sends it.

use super::stop::Stopped;
use super::{
    BATCH_BYTES, BATCH_ENTRIES, DEPTH_MAX, ENTRIES_MAX, ctime_ns, open_dir, open_root, xattrs,
};
use crate::Guest;
use crate::error::{Error, show};
use crate::files::{lstat, mtime_ns};
use k8e_wire::proto::input::Input;
use k8e_wire::proto::reply::Reply;
use k8e_wire::proto::{
    SaveTree, TreeBegun, TreeDone, TreeEntries, TreeEntry, TreeKind, TreePiece, TreePieces,
};
use k8e_wire::{GuestEnd, Requests};
use rustix::fs::{Dir, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::SystemTime;

/// Blocks of zeroes of this size in a file with holes are sent as holes: gVisor does not tell where the holes are.
const BLOCK_BYTES: usize = 4096;

/// File systems on which every write changes the change time, also one by a mapping after `syncfs`.
const EXT4_MAGIC: i64 = 0xef53;
const XFS_MAGIC: i64 = 0x5846_5342;
const BTRFS_MAGIC: i64 = 0x9123_683e;

struct Level {
    dir: Arc<OwnedFd>,
    /// Of what is left in it; the next is the last.
    names: Vec<Vec<u8>>,
    path_bytes: usize,
}

/// A file of the current batch.
struct File {
    index: usize,
    dir: Arc<OwnedFd>,
    name: Vec<u8>,
    stat: Stat,
}

struct Save<'a> {
    end: &'a mut GuestEnd,
    /// Nothing changes: a file that does is an error.
    stopped: bool,
    batch: Vec<TreeEntry>,
    batch_bytes: usize,
    files: Vec<File>,
    /// First name of files with several.
    links: HashMap<(u64, u64), Vec<u8>>,
    seen: usize,
    skipped: u64,
    pieces: Vec<TreePiece>,
    pieces_bytes: usize,
    scratch: Vec<u8>,
}

/// Sends the tree.
pub(crate) async fn save(
    guest: &Guest,
    end: &mut GuestEnd,
    request: SaveTree,
) -> Result<Reply, Error> {
    let _held = match request.stop {
        true => Some(guest.starts.write().await),
        false => None,
    };
    let stopped = match request.stop {
        true => Some(Stopped::stop(guest).await?),
        false => None,
    };
    let root = open_root(&request.root)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let begun = TreeBegun {
        now_unix_ns: now.map_or(0, |now| i64::try_from(now.as_nanos()).unwrap_or(0)),
        ctimes: has_ctimes(&root),
    };
    end.replies.send(Reply::TreeBegun(begun)).await?;
    let mut save = Save {
        end,
        stopped: stopped.is_some(),
        batch: Vec::new(),
        batch_bytes: 0,
        files: Vec::new(),
        links: HashMap::new(),
        seen: 0,
        skipped: 0,
        pieces: Vec::new(),
        pieces_bytes: 0,
        scratch: Vec::new(),
    };
    save.walk(root).await?;
    let mut done = TreeDone {
        skipped: save.skipped,
        stopped_us: 0,
    };
    if let Some(stopped) = stopped {
        if !stopped.still(guest)? {
            return Err(changed(b"the workspace"));
        }
        done.stopped_us = u64::try_from(stopped.elapsed().as_micros()).unwrap_or(u64::MAX);
    }
    Ok(Reply::TreeDone(done))
}

/// Cleans all pages: after that, a write by a mapping is seen by the kernel, which changes the file's change time.
#[allow(
    clippy::useless_conversion,
    reason = "the type of the magic number differs between architectures"
)]
fn has_ctimes(root: &OwnedFd) -> bool {
    let known = rustix::fs::fstatfs(root)
        .is_ok_and(|stat| [EXT4_MAGIC, XFS_MAGIC, BTRFS_MAGIC].contains(&i64::from(stat.f_type)));
    known && rustix::fs::syncfs(root).is_ok()
}

// === impl Save ===

impl Save<'_> {
    async fn walk(&mut self, root: OwnedFd) -> Result<(), Error> {
        let stat = rustix::fs::fstat(&root).map_err(Error::os("stat", b"/"))?;
        let root = Arc::new(root);
        let entry = self.entry(&root, b".", Vec::new(), &stat, TreeKind::Directory)?;
        self.batch.push(entry);
        let mut levels = vec![self.level(root, 0)?];
        let mut path = Vec::new();
        while let Some(level) = levels.last_mut() {
            path.truncate(level.path_bytes);
            let Some(name) = level.names.pop() else {
                levels.pop();
                continue;
            };
            let dir = Arc::clone(&level.dir);
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            if self.look(&dir, name.clone(), &path).await? {
                if levels.len() >= DEPTH_MAX {
                    return Err(Error::Invalid(format!(
                        "{:?} is deeper than {DEPTH_MAX} directories, which is as deep as a snapshot can be",
                        show(&path[..path.len().min(200)])
                    )));
                }
                match open_dir(&dir, &name) {
                    Ok(sub) => levels.push(self.level(Arc::new(sub), path.len())?),
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) if !self.stopped => {}
                    Err(errno) => return Err(Error::os("open", &path)(errno)),
                }
            }
        }
        self.send_batch().await
    }

    /// Names in order, so that the same tree is sent in the same way every time.
    fn level(&mut self, dir: Arc<OwnedFd>, path_bytes: usize) -> Result<Level, Error> {
        let failed = || Error::os::<Errno>("list", b"a directory");
        let mut names = Vec::new();
        for entry in Dir::read_from(&dir).map_err(failed())? {
            let name = entry.map_err(failed())?.file_name().to_bytes().to_vec();
            if !matches!(&name[..], b"." | b"..") {
                names.push(name);
            }
        }
        self.seen += names.len();
        if self.seen > ENTRIES_MAX {
            return Err(Error::Exhausted(format!(
                "there are more than {ENTRIES_MAX} files, which is all that a snapshot can have"
            )));
        }
        names.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Level {
            dir,
            names,
            path_bytes,
        })
    }

    /// Adds an entry to the batch; true for a directory.
    async fn look(
        &mut self,
        dir: &Arc<OwnedFd>,
        name: Vec<u8>,
        path: &[u8],
    ) -> Result<bool, Error> {
        let stat = match lstat(dir, &name) {
            Err(Errno::NOENT) if !self.stopped => return Ok(false),
            stat => stat.map_err(Error::os("stat", path))?,
        };
        let mut target = Vec::new();
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if stat.st_nlink > 1 => {
                match self.links.get(&(stat.st_dev, stat.st_ino)) {
                    Some(first) => {
                        target.clone_from(first);
                        TreeKind::HardLink
                    }
                    None => {
                        self.links.insert((stat.st_dev, stat.st_ino), path.to_vec());
                        TreeKind::File
                    }
                }
            }
            FileType::RegularFile => TreeKind::File,
            FileType::Directory => TreeKind::Directory,
            FileType::Symlink => {
                let read = rustix::fs::readlinkat(dir, &name[..], Vec::new());
                target = read.map_err(Error::os("read", path))?.into_bytes();
                TreeKind::Symlink
            }
            FileType::Fifo => TreeKind::Fifo,
            FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => {
                self.skipped += 1;
                return Ok(false);
            }
        };
        let entry = self.entry(dir, &name, path.to_vec(), &stat, kind)?;
        let xattrs = entry.xattrs.iter().map(|x| x.name.len() + x.value.len());
        let bytes = path.len() + target.len() + xattrs.sum::<usize>();
        if self.batch.len() >= BATCH_ENTRIES || self.batch_bytes + bytes > BATCH_BYTES {
            self.send_batch().await?;
        }
        if kind == TreeKind::File && stat.st_size > 0 {
            self.files.push(File {
                index: self.batch.len(),
                dir: Arc::clone(dir),
                name,
                stat,
            });
        }
        self.batch_bytes += bytes;
        self.batch.push(TreeEntry {
            target: target.into(),
            ..entry
        });
        Ok(kind == TreeKind::Directory)
    }

    fn entry(
        &mut self,
        dir: &Arc<OwnedFd>,
        name: &[u8],
        path: Vec<u8>,
        stat: &Stat,
        kind: TreeKind,
    ) -> Result<TreeEntry, Error> {
        let xattrs = match kind {
            TreeKind::File | TreeKind::Directory => {
                match xattrs::read(dir.as_fd(), name, &mut self.scratch) {
                    Err(Errno::NOENT) if !self.stopped => Vec::new(),
                    read => read.map_err(Error::os("read the attributes of", &path))?,
                }
            }
            TreeKind::Symlink | TreeKind::HardLink | TreeKind::Fifo | TreeKind::Unspecified => {
                Vec::new()
            }
        };
        Ok(TreeEntry {
            path: path.into(),
            kind: kind.into(),
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime_unix_ns: mtime_ns(stat),
            ctime_unix_ns: ctime_ns(stat),
            ino: stat.st_ino,
            size: if kind == TreeKind::File {
                stat.st_size.unsigned_abs()
            } else {
                0
            },
            target: Vec::new().into(),
            xattrs,
        })
    }

    /// Sends the batch, and the files of it that the host wants.
    async fn send_batch(&mut self) -> Result<(), Error> {
        let entries = std::mem::take(&mut self.batch);
        let files = std::mem::take(&mut self.files);
        self.batch_bytes = 0;
        if entries.is_empty() {
            return Ok(());
        }
        let count = entries.len();
        self.end
            .replies
            .send(Reply::TreeEntries(TreeEntries { entries }))
            .await?;
        let wanted = wants(&mut self.end.requests, count).await?;
        for file in files {
            if wanted[file.index] == 1 {
                self.send_file(file).await?;
            }
        }
        self.send_pieces().await
    }

    async fn send_file(&mut self, file: File) -> Result<(), Error> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&file.dir, &file.name[..], flags, Mode::empty());
        let opened = match opened {
            Err(Errno::NOENT | Errno::LOOP) if !self.stopped => None,
            opened => Some(opened.map_err(Error::os("open", &file.name))?),
        };
        let same = |opened: &OwnedFd| {
            rustix::fs::fstat(opened).is_ok_and(|stat| {
                stat.st_ino == file.stat.st_ino
                    && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            })
        };
        let size = match opened.filter(same) {
            Some(opened) => self.send_content(&file, &opened).await?,
            None if self.stopped => return Err(changed(&file.name)),
            None => 0,
        };
        if self.stopped && size != file.stat.st_size.unsigned_abs() {
            return Err(changed(&file.name));
        }
        let index = u32::try_from(file.index).unwrap_or(u32::MAX);
        self.pieces.push(TreePiece {
            index,
            end: Some(size),
            ..TreePiece::default()
        });
        // The piece itself has bytes too.
        self.pieces_bytes += 16;
        match self.pieces_bytes >= BATCH_BYTES {
            true => self.send_pieces().await,
            false => Ok(()),
        }
    }

    /// Sends the data of a file up to the size it had; returns the size that was found.
    async fn send_content(&mut self, file: &File, opened: &OwnedFd) -> Result<u64, Error> {
        let size = file.stat.st_size.unsigned_abs();
        let sparse = file.stat.st_blocks.unsigned_abs().saturating_mul(512) < size;
        let mut offset = 0;
        while offset < size {
            let (start, stop) = match sparse {
                true => match data_at(opened, offset, size) {
                    Some(range) => range,
                    None => return Ok(size),
                },
                false => (offset, size),
            };
            offset = start;
            while offset < stop {
                let room = BATCH_BYTES
                    .saturating_sub(self.pieces_bytes)
                    .max(BLOCK_BYTES);
                let want = usize::try_from(stop - offset).unwrap_or(room).min(room);
                let mut buffer = vec![0; want];
                let read = match rustix::io::pread(opened, &mut buffer[..], offset) {
                    Err(Errno::INTR) => continue,
                    read => read.map_err(Error::os("read", &file.name))?,
                };
                if read == 0 {
                    return Ok(offset);
                }
                buffer.truncate(read);
                self.push(file.index, offset, buffer, sparse);
                offset += read as u64;
                if self.pieces_bytes >= BATCH_BYTES {
                    self.send_pieces().await?;
                }
            }
        }
        Ok(size)
    }

    fn push(&mut self, index: usize, offset: u64, data: Vec<u8>, sparse: bool) {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let data = bytes::Bytes::from(data);
        let mut add = |at: usize, part: bytes::Bytes| {
            self.pieces_bytes += part.len() + 16;
            self.pieces.push(TreePiece {
                index,
                offset: offset + at as u64,
                data: part,
                end: None,
            });
        };
        if !sparse {
            return add(0, data);
        }
        // Blocks of the file, not of what was read.
        let mut run: Option<usize> = None;
        let mut at = 0;
        while at < data.len() {
            let into = usize::try_from(offset % BLOCK_BYTES as u64).unwrap_or(0) + at;
            let next = (at + BLOCK_BYTES - into % BLOCK_BYTES).min(data.len());
            if data[at..next].iter().all(|byte| *byte == 0) {
                if let Some(from) = run.take() {
                    add(from, data.slice(from..at));
                }
            } else if run.is_none() {
                run = Some(at);
            }
            at = next;
        }
        if let Some(from) = run {
            add(from, data.slice(from..));
        }
    }

    async fn send_pieces(&mut self) -> Result<(), Error> {
        self.pieces_bytes = 0;
        let pieces = std::mem::take(&mut self.pieces);
        if !pieces.is_empty() {
            let pieces = Reply::TreePieces(TreePieces { pieces });
            self.end.replies.send(pieces).await?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

/// The next data of a file with holes, from `offset` on; none when only a hole is left.
fn data_at(file: &OwnedFd, offset: u64, size: u64) -> Option<(u64, u64)> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return None,
        // Not every file system tells.
        Err(_) => return Some((offset, size)),
    };
    let stop = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap_or(size);
    (start < size).then_some((start, stop.clamp(start + 1, size)))
}

async fn wants(requests: &mut Requests, count: usize) -> Result<bytes::Bytes, Error> {
    match requests.input().await? {
        Some(Input::TreeWants(wants)) if wants.wanted.len() == count => Ok(wants.wanted),
        Some(_) => Err(Error::Invalid(
            "saving a tree takes what is wanted of each batch".to_owned(),
        )),
        None => Err(Error::Cancelled),
    }
}

fn changed(what: &[u8]) -> Error {
    Error::Precondition(format!(
        "{:?} changed while it was saved: a command was just starting; try again",
        show(what)
    ))
}
