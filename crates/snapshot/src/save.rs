//! Saving a tree: entries and the bytes of files, in the order in which a guest sends them, become chunks and a manifest.
//!
//! A tree is walked once or twice. A first pass, while its processes run, stores the chunks and remembers which file had
//! which; a second one, while they are stopped, reads only what has changed since and writes the manifest.

use crate::chunker::{Chunker, FILE_CHUNKS, Hash};
use crate::entry::{Entry, Extent, Kind};
use crate::manifest::{self, ENTRIES_MAX, ManifestWriter};
use crate::{Owner, Root, SnapshotError, read_manifest};
use bytes::Bytes;
use prost::Message as _;
use std::collections::{HashMap, HashSet};

/// Change times are ticks of a coarse clock: a file whose change time is this close to the beginning of a pass may have
/// changed after it was read.
const TICK_NS: i64 = 100_000_000;

/// Chunks of all files of a tree together: they are in memory while it is saved, and small ones between holes are many.
const EXTENTS_MAX: usize = 2_000_000;

/// Files of an earlier pass, by path.
#[derive(Debug, Default)]
pub struct Known {
    files: HashMap<Bytes, KnownFile>,
    unchanged_before_ns: i64,
}

#[derive(Debug)]
struct KnownFile {
    ino: u64,
    size: u64,
    mtime_ns: i64,
    ctime_ns: i64,
    content: Vec<Extent>,
}

/// What is said about a snapshot beside its tree.
#[derive(Clone, Debug, Default)]
pub struct Meta {
    /// The sandbox it is saved from.
    pub sandbox: String,
    /// Time of saving, in milliseconds.
    pub created_at_ms: i64,
}

/// One walk over the tree.
pub struct Pass {
    known: Known,
    /// What this pass found out, for the next.
    found: Known,
    manifest: Option<ManifestWriter>,
    /// Entries of the current batch; files wait for their content.
    batch: Vec<Entry>,
    wanted: Vec<bool>,
    /// Of the file that is being sent.
    current: Option<Current>,
    chunks: HashSet<Hash>,
    entries: u64,
    extents: usize,
    files: u64,
    bytes: u64,
}

struct Current {
    index: usize,
    chunker: Chunker,
    content: Vec<Extent>,
    /// Before the next chunk.
    hole: u64,
    /// End of the bytes that came.
    end: u64,
}

// === impl Known ===

impl Known {
    /// What an earlier snapshot of the same sandbox has.
    pub fn of(owner: &mut Owner, root: &Root) -> Result<Self, SnapshotError> {
        let mut known = Self {
            files: HashMap::new(),
            unchanged_before_ns: root.unchanged_before_ns,
        };
        read_manifest(owner, root, |_, entry| {
            known.remember(&entry);
            Ok(())
        })?;
        Ok(known)
    }

    fn remember(&mut self, entry: &Entry) {
        if entry.kind() == Kind::File
            && entry.ctime_ns.saturating_add(TICK_NS) < self.unchanged_before_ns
        {
            let file = KnownFile {
                ino: entry.ino,
                size: entry.size,
                mtime_ns: entry.mtime_ns,
                ctime_ns: entry.ctime_ns,
                content: entry.content.clone(),
            };
            self.files.insert(entry.path.clone(), file);
        }
    }

    /// The content of a file that has not changed.
    fn content(&self, entry: &Entry) -> Option<&Vec<Extent>> {
        let file = self.files.get(&entry.path)?;
        let same = file.ino == entry.ino
            && file.size == entry.size
            && file.mtime_ns == entry.mtime_ns
            && file.ctime_ns == entry.ctime_ns;
        same.then_some(&file.content)
    }
}

// === impl Pass ===

impl Pass {
    /// Begins a pass; `keeps` when it is the one that writes the manifest. `unchanged_before_ns` is the guest's clock.
    pub fn new(known: Known, keeps: bool, unchanged_before_ns: i64) -> Self {
        Self {
            known,
            found: Known {
                files: HashMap::new(),
                unchanged_before_ns,
            },
            manifest: keeps.then(ManifestWriter::new),
            batch: Vec::new(),
            wanted: Vec::new(),
            current: None,
            chunks: HashSet::new(),
            entries: 0,
            extents: 0,
            files: 0,
            bytes: 0,
        }
    }

    /// Takes the next entries; says of which the content is wanted.
    pub fn batch(
        &mut self,
        owner: &mut Owner,
        batch: Vec<Entry>,
    ) -> Result<Vec<bool>, SnapshotError> {
        self.end_batch(owner)?;
        self.entries += batch.len() as u64;
        if self.entries > ENTRIES_MAX {
            return Err(SnapshotError::Quota(format!(
                "the workspace has more than {ENTRIES_MAX} files and directories, which is all that a snapshot can have"
            )));
        }
        self.batch = batch;
        self.wanted.clear();
        for entry in &mut self.batch {
            entry.content.clear();
            entry.check()?;
            let known = self.known.content(entry);
            // Also what is known must still be there.
            let known = known.filter(|content| {
                content
                    .iter()
                    .all(|extent| extent.chunk().is_ok_and(|chunk| owner.has(&chunk)))
            });
            let wanted = match (entry.kind(), known) {
                (Kind::File, Some(content)) => {
                    entry.content.clone_from(content);
                    false
                }
                (Kind::File, None) => entry.size > 0,
                (
                    Kind::Directory
                    | Kind::Symlink
                    | Kind::HardLink
                    | Kind::Fifo
                    | Kind::Unspecified,
                    _,
                ) => false,
            };
            self.wanted.push(wanted);
        }
        Ok(self.wanted.clone())
    }

    /// Takes bytes of a wanted file of the batch; what lies between two pieces is a hole. Files come in the order of the
    /// batch, and each ends with `size`, its size when it was read.
    pub fn piece(
        &mut self,
        owner: &mut Owner,
        index: usize,
        offset: u64,
        data: &[u8],
        size: Option<u64>,
    ) -> Result<(), SnapshotError> {
        if self.wanted.get(index) != Some(&true) {
            return Err(SnapshotError::invalid(
                "bytes of a file that was not asked for",
            ));
        }
        let mut current = match self.current.take() {
            Some(current) if current.index == index => current,
            Some(_) => return Err(SnapshotError::invalid("a file without its end")),
            None => Current {
                index,
                chunker: Chunker::new(FILE_CHUNKS),
                content: Vec::new(),
                hole: 0,
                end: 0,
            },
        };
        if !data.is_empty() {
            current.push(owner, offset, data)?;
        }
        if self.extents + current.content.len() > EXTENTS_MAX {
            return Err(SnapshotError::Quota(format!(
                "the files of the workspace have more than {EXTENTS_MAX} chunks, which is all that a snapshot can have"
            )));
        }
        let Some(size) = size else {
            self.current = Some(current);
            return Ok(());
        };
        let (content, end) = current.finish(owner)?;
        if size < end {
            return Err(SnapshotError::invalid(
                "a file that is shorter than its bytes",
            ));
        }
        self.extents += content.len();
        let entry = &mut self.batch[index];
        entry.content = content;
        if entry.size != size {
            entry.size = size;
            // It changed while it was read: not to be taken for the same later.
            entry.ctime_ns = i64::MAX;
        }
        entry.check()?;
        self.wanted[index] = false;
        Ok(())
    }

    fn end_batch(&mut self, owner: &mut Owner) -> Result<(), SnapshotError> {
        if self.wanted.contains(&true) {
            return Err(SnapshotError::invalid(
                "a file that was asked for did not come",
            ));
        }
        for entry in std::mem::take(&mut self.batch) {
            if let Some(manifest) = &mut self.manifest {
                for extent in &entry.content {
                    self.chunks.insert(extent.chunk()?.hash);
                }
                if entry.kind() == Kind::File {
                    self.files += 1;
                    self.bytes = self.bytes.saturating_add(entry.size);
                }
                manifest.push(owner, &entry)?;
            } else {
                self.found.remember(&entry);
            }
        }
        self.wanted.clear();
        Ok(())
    }

    /// Ends a first pass: what it found.
    pub fn finish(mut self, owner: &mut Owner) -> Result<Known, SnapshotError> {
        self.end_batch(owner)?;
        Ok(self.found)
    }

    /// Ends the pass that writes the manifest: everything is durable, and the root is written. Returns it with its digest.
    pub fn finish_snapshot(
        mut self,
        owner: &mut Owner,
        meta: &Meta,
    ) -> Result<(Root, String), SnapshotError> {
        self.end_batch(owner)?;
        let manifest = self.manifest.take().unwrap_or_else(ManifestWriter::new);
        let manifest = manifest.finish(owner)?;
        self.chunks.extend(manifest.iter().map(|chunk| chunk.hash));
        let stored = self.chunks.iter().map(|hash| owner.stored_bytes(hash));
        let root = Root {
            entries: self.entries,
            files: self.files,
            bytes: self.bytes,
            stored_bytes: stored.fold(0, u64::saturating_add),
            sandbox: meta.sandbox.clone(),
            unchanged_before_ns: self.found.unchanged_before_ns,
            created_at_ms: meta.created_at_ms,
            ..manifest::root(&manifest)
        };
        let bytes = root.encode_to_vec();
        let digest = crate::digest(&bytes);
        owner.put_root(&digest, &bytes)?;
        Ok((root, digest))
    }
}

// === impl Current ===

impl Current {
    fn push(&mut self, owner: &mut Owner, offset: u64, data: &[u8]) -> Result<(), SnapshotError> {
        let Some(hole) = offset.checked_sub(self.end) else {
            return Err(SnapshotError::invalid("bytes of a file out of order"));
        };
        if hole > 0 {
            // The chunks before a hole end there.
            self.cut_rest(owner)?;
            self.hole = hole;
        }
        let end = offset.checked_add(data.len() as u64);
        self.end = end.ok_or_else(|| SnapshotError::invalid("a file without an end"))?;
        let (content, hole) = (&mut self.content, &mut self.hole);
        self.chunker.push(data, |chunk| {
            content.push(Extent::new(std::mem::take(hole), owner.put(chunk)?));
            Ok(())
        })
    }

    fn cut_rest(&mut self, owner: &mut Owner) -> Result<(), SnapshotError> {
        let (content, hole) = (&mut self.content, &mut self.hole);
        self.chunker.finish(|chunk| {
            content.push(Extent::new(std::mem::take(hole), owner.put(chunk)?));
            Ok(())
        })
    }

    fn finish(mut self, owner: &mut Owner) -> Result<(Vec<Extent>, u64), SnapshotError> {
        self.cut_rest(owner)?;
        Ok((self.content, self.end))
    }
}
