//! One entry of a saved tree, and what a valid one is.

use crate::SnapshotError;
use crate::chunker::{CHUNK_BYTES_MAX, ChunkRef, Hash};
use bytes::Bytes;

/// Longest path, as in the kernel.
pub const PATH_BYTES_MAX: usize = 4096;

/// Longest name of a file, as in the kernel.
const NAME_BYTES_MAX: usize = 255;

/// Levels of directories: each is open while the guest walks below it.
const DEPTH_MAX: usize = 256;

/// Extended attributes of a file: the kernel allows 64 KiB of them together.
const XATTRS_MAX: usize = 128;
const XATTRS_BYTES_MAX: usize = 64 * 1024;

/// Largest file: what ext4 allows.
const FILE_BYTES_MAX: u64 = 16 << 40;

/// What an entry is. Sockets and devices are not saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Kind {
    /// Not a valid value.
    Unspecified = 0,
    /// A regular file.
    File = 1,
    /// A directory.
    Directory = 2,
    /// A symbolic link to `target`.
    Symlink = 3,
    /// Another name of the file that was saved as `target`.
    HardLink = 4,
    /// A named pipe.
    Fifo = 5,
}

/// An extended attribute.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Xattr {
    /// With its name space, such as `user.`.
    #[prost(bytes = "bytes", tag = "1")]
    pub name: Bytes,
    /// Its bytes.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

/// A chunk of a file, after a hole.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Extent {
    /// Bytes without data before it.
    #[prost(uint64, tag = "1")]
    pub hole: u64,
    /// BLAKE3 of the chunk.
    #[prost(bytes = "bytes", tag = "2")]
    pub hash: Bytes,
    /// Its length.
    #[prost(uint32, tag = "3")]
    pub bytes: u32,
}

/// A file, directory or link of a tree.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Entry {
    /// Relative to the root of the tree; empty for the root itself, which comes first.
    #[prost(bytes = "bytes", tag = "1")]
    pub path: Bytes,
    /// File, directory, link, pipe.
    #[prost(enumeration = "Kind", tag = "2")]
    pub kind: i32,
    /// Permission bits.
    #[prost(uint32, tag = "3")]
    pub mode: u32,
    /// User id inside the sandbox.
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    /// Group id inside the sandbox.
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    /// Modification time.
    #[prost(sint64, tag = "6")]
    pub mtime_ns: i64,
    /// Of a file, with holes.
    #[prost(uint64, tag = "7")]
    pub size: u64,
    /// Of a symbolic or hard link.
    #[prost(bytes = "bytes", tag = "8")]
    pub target: Bytes,
    /// Extended attributes.
    #[prost(message, repeated, tag = "9")]
    pub xattrs: Vec<Xattr>,
    /// Content of a file, in order.
    #[prost(message, repeated, tag = "10")]
    pub content: Vec<Extent>,
    /// Inode number where it was saved, to find out later whether it has changed.
    #[prost(uint64, tag = "11")]
    pub ino: u64,
    /// Time of its last change there, of data or metadata, in nanoseconds.
    #[prost(sint64, tag = "12")]
    pub ctime_ns: i64,
}

// === impl Extent ===

impl Extent {
    pub(crate) fn new(hole: u64, chunk: ChunkRef) -> Self {
        Self {
            hole,
            hash: Bytes::copy_from_slice(&chunk.hash),
            bytes: chunk.bytes,
        }
    }

    /// The chunk that it names.
    pub(crate) fn chunk(&self) -> Result<ChunkRef, SnapshotError> {
        let hash = Hash::try_from(&self.hash[..])
            .map_err(|_| SnapshotError::invalid("a chunk without a hash of 32 bytes"))?;
        match self.bytes {
            0 => Err(SnapshotError::invalid("an empty chunk")),
            bytes if bytes as usize > CHUNK_BYTES_MAX => {
                Err(SnapshotError::invalid("a chunk that is too long"))
            }
            bytes => Ok(ChunkRef { hash, bytes }),
        }
    }
}

// === impl Entry ===

impl Entry {
    /// Checks it: its path stays below the root, every part is bounded, and its content fits its size.
    pub fn check(&self) -> Result<(), SnapshotError> {
        let kind = self.kind();
        if self.path.is_empty() {
            if kind != Kind::Directory {
                return Err(SnapshotError::invalid("the root is not a directory"));
            }
        } else {
            check_path(&self.path)?;
        }
        match kind {
            Kind::Unspecified => return Err(SnapshotError::invalid("an entry of no kind")),
            Kind::HardLink => check_path(&self.target)?,
            Kind::Symlink
                if self.target.is_empty()
                    || self.target.len() >= PATH_BYTES_MAX
                    || self.target.contains(&0) =>
            {
                return Err(SnapshotError::invalid("an impossible symbolic link"));
            }
            Kind::File | Kind::Directory | Kind::Symlink | Kind::Fifo => {}
        }
        if self.mode > 0o7777 {
            return Err(SnapshotError::invalid(
                "an entry with impossible permissions",
            ));
        }
        self.check_xattrs()?;
        self.check_content()
    }

    /// The chunks of its content.
    pub fn chunks(&self) -> Result<Vec<Hash>, SnapshotError> {
        self.content
            .iter()
            .map(|extent| Ok(extent.chunk()?.hash))
            .collect()
    }

    fn check_xattrs(&self) -> Result<(), SnapshotError> {
        let bytes: usize = self
            .xattrs
            .iter()
            .map(|xattr| xattr.name.len() + xattr.value.len())
            .sum();
        let named = |xattr: &Xattr| {
            (1..=NAME_BYTES_MAX).contains(&xattr.name.len()) && !xattr.name.contains(&0)
        };
        match self.xattrs.len() <= XATTRS_MAX
            && bytes <= XATTRS_BYTES_MAX
            && self.xattrs.iter().all(named)
        {
            true => Ok(()),
            false => Err(SnapshotError::invalid("impossible extended attributes")),
        }
    }

    fn check_content(&self) -> Result<(), SnapshotError> {
        if self.kind() != Kind::File && (self.size != 0 || !self.content.is_empty()) {
            return Err(SnapshotError::invalid("content without a file"));
        }
        let mut end = 0u64;
        for extent in &self.content {
            extent.chunk()?;
            let next = end
                .checked_add(extent.hole)
                .and_then(|at| at.checked_add(extent.bytes.into()));
            end = next.ok_or_else(|| SnapshotError::invalid("a file without an end"))?;
        }
        match end <= self.size && self.size <= FILE_BYTES_MAX {
            true => Ok(()),
            false => Err(SnapshotError::invalid(
                "a file whose content is not its size",
            )),
        }
    }
}

fn check_path(path: &[u8]) -> Result<(), SnapshotError> {
    let parts = || path.split(|byte| *byte == b'/');
    let name = |part: &[u8]| {
        !matches!(part, b"" | b"." | b"..") && part.len() <= NAME_BYTES_MAX && !part.contains(&0)
    };
    match path.len() < PATH_BYTES_MAX && parts().count() <= DEPTH_MAX && parts().all(name) {
        true => Ok(()),
        false => Err(SnapshotError::invalid(format!(
            "an entry with an impossible path: {:?}",
            String::from_utf8_lossy(&path[..path.len().min(100)])
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &'static str) -> Entry {
        Entry {
            path: Bytes::from_static(path.as_bytes()),
            kind: Kind::File.into(),
            ..Entry::default()
        }
    }

    #[test]
    fn paths_stay_below_the_root() {
        for good in ["a", "a/b", "..a", "a b/\u{e9}", " "] {
            file(good).check().unwrap();
        }
        for bad in ["/a", "..", "a/../b", "a//b", "a/", ".", "a/./b", "a\0b"] {
            assert!(file(bad).check().is_err(), "{bad:?}");
        }
        assert!(file("").check().is_err(), "a root that is a file");
    }

    #[test]
    fn content_fits_the_size() {
        let extent = Extent {
            hole: 10,
            hash: Bytes::from_static(&[1; 32]),
            bytes: 5,
        };
        let with = |size, content| Entry {
            size,
            content,
            ..file("a")
        };
        with(15, vec![extent.clone()]).check().unwrap();
        with(99, vec![extent.clone()]).check().unwrap();
        assert!(with(14, vec![extent.clone()]).check().is_err());
        let far = Extent {
            hole: u64::MAX,
            ..extent.clone()
        };
        assert!(with(u64::MAX, vec![far]).check().is_err());
        let short = Extent {
            hash: Bytes::from_static(b"abc"),
            ..extent
        };
        assert!(with(99, vec![short]).check().is_err());
    }
}
