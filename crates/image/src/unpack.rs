//! Unpacks one layer into a directory, so that overlayfs can use it.
//!
//! The archive is hostile. Nothing it says is resolved by the kernel through a symbolic link, above the
//! directory or across a mount; device nodes are refused; owners must fit a user namespace; sizes,
//! counts, depths and name lengths are bounded. Whoever calls this should still do it in a process that
//! has nothing to lose (`k8e-driver`'s launcher does).
//!
//! Whiteouts become what overlayfs has for them: a character device 0/0, which needs no privilege, and
//! the attribute `user.overlay.opaque` of a directory, for a mount with the option `userxattr`.

mod path;
mod tree;

pub use tree::is_opaque;

use crate::decode::Compression;
use crate::error::ImageError;
use crate::hash::HashingReader;
use crate::tar::{Archive, Entry, Kind};
use k8e_model::Digest;
use path::EntryPath;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::os::fd::OwnedFd;
use tree::{Owner, Tree};

/// Uncompressed, of one layer: several times the largest that are common (CUDA, Chromium).
pub const LAYER_BYTES_MAX: u64 = 16 * 1024 * 1024 * 1024;

/// Entries of one layer: a large `node_modules` has 100,000.
pub const LAYER_ENTRIES_MAX: u64 = 1_000_000;

/// What an entry takes on a disk at least: a block of a directory or of its own, and an inode. Files are
/// rounded up to it, so that a million empty ones cannot fill a disk past a quota of bytes.
const ENTRY_BYTES: u64 = 4096;

/// What a whiteout begins with.
const WHITEOUT: &[u8] = b".wh.";

/// Hides all that lower layers have in its directory.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Other files of aufs' own.
const AUFS: &[u8] = b".wh..wh.";

/// What a layer may come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerLimits {
    /// Bytes of the uncompressed archive, and of all that it takes on disk: files with their holes, rounded up
    /// to blocks, and a block for everything else.
    pub bytes_max: u64,
    /// Files, directories and links.
    pub entries_max: u64,
}

/// A layer that was unpacked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpacked {
    /// The SHA-256 of the uncompressed archive.
    pub diff_id: Digest,
    /// What it takes on disk at most.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

// === impl LayerLimits ===

impl Default for LayerLimits {
    fn default() -> Self {
        Self {
            bytes_max: LAYER_BYTES_MAX,
            entries_max: LAYER_ENTRIES_MAX,
        }
    }
}

/// Unpacks the layer in `blob` into the empty directory `root`.
///
/// # Errors
///
/// When it is not a layer, more than `limits`, or cannot be written. What was unpacked until then stays.
pub fn unpack(
    blob: impl Read,
    compression: Compression,
    root: OwnedFd,
    limits: LayerLimits,
) -> Result<Unpacked, ImageError> {
    let reader = HashingReader::new(compression.reader(blob, limits.bytes_max));
    let mut unpacker = Unpacker {
        archive: Archive::new(reader),
        tree: Tree::new(root),
        limits,
        bytes: 0,
        entries: 0,
    };
    while let Some(entry) = unpacker.archive.next()? {
        unpacker.take(entry)?;
        // Up to 128 for one entry: they count like those that are named.
        for _ in 0..unpacker.tree.take_implied() {
            unpacker.count()?;
            unpacker.charge(0)?;
        }
    }
    unpacker.tree.finish()?;
    let (bytes, entries) = (unpacker.bytes, unpacker.entries);
    let mut reader = unpacker.archive.into_inner();
    // The digest is of all there is, also of what follows the end of the archive.
    std::io::copy(&mut reader, &mut std::io::sink()).map_err(ImageError::io("read the layer"))?;
    Ok(Unpacked {
        diff_id: reader.finish(),
        bytes,
        entries,
    })
}

struct Unpacker<R> {
    archive: Archive<R>,
    tree: Tree,
    limits: LayerLimits,
    bytes: u64,
    entries: u64,
}

impl<R: Read> Unpacker<R> {
    fn take(&mut self, entry: Entry) -> Result<(), ImageError> {
        self.count()?;
        if entry.kind == Kind::Other {
            return Ok(());
        }
        self.charge(content(&entry))?;
        let path = EntryPath::parse(&entry.path)?;
        let Some(name) = path.name() else {
            // The root itself.
            return match entry.kind == Kind::Directory {
                true => self.tree.directory(&path, &owner(&entry)?),
                false => Err(path.refused("it would take the place of the root")),
            };
        };
        if name == OPAQUE {
            return self.tree.opaque(&path.parent());
        }
        if name.starts_with(AUFS) {
            return Ok(());
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            return self.tree.whiteout(&path.parent().join(hidden)?);
        }
        match entry.kind {
            Kind::Directory => self.tree.directory(&path, &owner(&entry)?),
            Kind::Regular => self.file(&path, &entry),
            Kind::Symlink => self.tree.symlink(&path, &entry.link, &owner(&entry)?),
            Kind::HardLink => self.tree.hard_link(&path, &EntryPath::parse(&entry.link)?),
            Kind::Fifo => self.tree.fifo(&path, &owner(&entry)?),
            // A sandbox has a /dev of its own above it: nobody will miss them.
            Kind::Device if path.is_below(b"dev") => Ok(()),
            Kind::Device => Err(path.refused("it is a device node")),
            Kind::Other => Ok(()),
        }
    }

    fn count(&mut self) -> Result<(), ImageError> {
        self.entries += 1;
        if self.entries > self.limits.entries_max {
            let max = self.limits.entries_max;
            return Err(ImageError::too_large("entries of the layer", max));
        }
        Ok(())
    }

    /// Counts what an entry with this content takes on disk.
    fn charge(&mut self, content: u64) -> Result<(), ImageError> {
        let blocks = content.checked_next_multiple_of(ENTRY_BYTES);
        let blocks = blocks.unwrap_or(u64::MAX).max(ENTRY_BYTES);
        self.bytes = self.bytes.saturating_add(blocks);
        if self.bytes > self.limits.bytes_max {
            let max = format!("{} bytes", self.limits.bytes_max);
            return Err(ImageError::too_large("files of the layer", max));
        }
        Ok(())
    }

    fn file(&mut self, path: &EntryPath, entry: &Entry) -> Result<(), ImageError> {
        let archive = &mut self.archive;
        self.tree
            .file(path, entry, &owner(entry)?, |buffer| archive.read(buffer))
    }
}

/// Of the file, holes included, and of its attributes.
fn content(entry: &Entry) -> u64 {
    let xattrs = entry.xattrs.iter();
    let xattrs = xattrs.map(|(name, value)| (name.len() + value.len()) as u64);
    let size = if entry.kind == Kind::Regular {
        entry.size
    } else {
        0
    };
    size.saturating_add(xattrs.sum())
}

/// What every file gets. Numbers above 65535 have no place in a sandbox's user namespace.
fn owner(entry: &Entry) -> Result<Owner<'_>, ImageError> {
    let fits = |id: u64| u16::try_from(id).map(u32::from);
    match (fits(entry.uid), fits(entry.gid)) {
        (Ok(uid), Ok(gid)) => Ok(Owner {
            uid,
            gid,
            mode: entry.mode,
            mtime: entry.mtime,
            xattrs: &entry.xattrs,
        }),
        _ => Err(ImageError::invalid(format!(
            "{:?} in the layer belongs to user {} and group {}: a sandbox has numbers up to 65535",
            String::from_utf8_lossy(&entry.path),
            entry.uid,
            entry.gid
        ))),
    }
}

/// For the crate `fuzz`: the path that an entry of this name would get.
pub(crate) fn fuzzed_path(bytes: &[u8]) -> Result<Vec<u8>, ImageError> {
    EntryPath::parse(bytes).map(|path| path.as_bytes().to_vec())
}

#[cfg(test)]
mod tests;
