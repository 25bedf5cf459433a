//! Manifests: the entries of a tree as a stream of length-delimited messages, cut into chunks; and roots, which name
//! those chunks.

use crate::chunker::{ChunkRef, Chunker, Hash, MANIFEST_CHUNKS};
use crate::entry::{Entry, Extent};
use crate::{Owner, SnapshotError};
use prost::Message as _;
use prost::encoding::decode_varint;

/// Entries of one snapshot: with their chunks, they are in memory while it is saved.
pub const ENTRIES_MAX: u64 = 1_000_000;

/// Bytes of an entry: that of a file with 400,000 chunks (50 GB), and the longest paths.
const ENTRY_BYTES_MAX: usize = 20 * 1024 * 1024;

/// Bytes of a root: some 400,000 chunks of a manifest, of which a million entries have 40,000.
pub const ROOT_BYTES_MAX: usize = 20 * 1024 * 1024;

/// Version of the format.
const VERSION: u32 = 1;

/// What a snapshot consists of.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Root {
    /// Version of the format.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The chunks of the manifest, in order.
    #[prost(message, repeated, tag = "2")]
    pub manifest: Vec<Extent>,
    /// Entries of the manifest.
    #[prost(uint64, tag = "3")]
    pub entries: u64,
    /// Regular files among them; a second name of a file does not count.
    #[prost(uint64, tag = "4")]
    pub files: u64,
    /// Bytes of these files, with holes.
    #[prost(uint64, tag = "5")]
    pub bytes: u64,
    /// Bytes on disk of all its chunks, also of those that other snapshots share.
    #[prost(uint64, tag = "6")]
    pub stored_bytes: u64,
    /// The sandbox that it was saved from: inode numbers and change times are those of its file system.
    #[prost(string, tag = "7")]
    pub sandbox: String,
    /// The guest's clock before the first file was read: what changed later has another change time.
    #[prost(sint64, tag = "8")]
    pub unchanged_before_ns: i64,
    /// When it was saved, in milliseconds.
    #[prost(int64, tag = "9")]
    pub created_at_ms: i64,
}

/// Writes the entries of a manifest.
#[derive(Debug)]
pub(crate) struct ManifestWriter {
    chunker: Chunker,
    chunks: Vec<ChunkRef>,
    buffer: Vec<u8>,
}

// === impl Root ===

impl Root {
    /// Decodes and checks a root.
    pub fn decode_checked(bytes: &[u8]) -> Result<Self, SnapshotError> {
        if bytes.len() > ROOT_BYTES_MAX {
            return Err(SnapshotError::invalid(
                "the root of the snapshot is too large",
            ));
        }
        let root = Self::decode(bytes)
            .map_err(|_| SnapshotError::invalid("the root of the snapshot is not valid"))?;
        if root.version != VERSION {
            return Err(SnapshotError::invalid(format!(
                "the snapshot has format {}, this server reads {VERSION}",
                root.version
            )));
        }
        if root.entries > ENTRIES_MAX {
            return Err(SnapshotError::invalid("the snapshot has too many entries"));
        }
        for extent in &root.manifest {
            extent.chunk()?;
        }
        Ok(root)
    }
}

impl Root {
    /// The chunks of its manifest.
    pub fn chunks(&self) -> Result<Vec<Hash>, SnapshotError> {
        self.manifest
            .iter()
            .map(|extent| Ok(extent.chunk()?.hash))
            .collect()
    }
}

impl ManifestWriter {
    pub(crate) fn new() -> Self {
        Self {
            chunker: Chunker::new(MANIFEST_CHUNKS),
            chunks: Vec::new(),
            buffer: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, owner: &mut Owner, entry: &Entry) -> Result<(), SnapshotError> {
        if entry.encoded_len() > ENTRY_BYTES_MAX {
            return Err(SnapshotError::invalid(
                "a file of the workspace is too large to be saved",
            ));
        }
        self.buffer.clear();
        entry
            .encode_length_delimited(&mut self.buffer)
            .expect("a vector grows");
        let (buffer, chunks) = (&self.buffer, &mut self.chunks);
        self.chunker.push(buffer, |chunk| {
            chunks.push(owner.put(chunk)?);
            Ok(())
        })
    }

    pub(crate) fn finish(mut self, owner: &mut Owner) -> Result<Vec<ChunkRef>, SnapshotError> {
        let chunks = &mut self.chunks;
        self.chunker.finish(|chunk| {
            chunks.push(owner.put(chunk)?);
            Ok::<(), SnapshotError>(())
        })?;
        Ok(self.chunks)
    }
}

/// A new root of the current version.
pub(crate) fn root(manifest: &[ChunkRef]) -> Root {
    Root {
        version: VERSION,
        manifest: manifest
            .iter()
            .map(|chunk| Extent::new(0, *chunk))
            .collect(),
        ..Root::default()
    }
}

/// Name of a root: BLAKE3 of its bytes, in hexadecimal digits.
pub fn digest(root: &[u8]) -> String {
    blake3::hash(root).to_hex().to_string()
}

/// Calls `each` with every entry of a snapshot, checked, in order.
pub fn read_manifest(
    owner: &mut Owner,
    root: &Root,
    mut each: impl FnMut(&mut Owner, Entry) -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    let (mut pending, mut chunk) = (Vec::new(), Vec::new());
    let mut entries = 0u64;
    for extent in &root.manifest {
        owner.get(&extent.chunk()?, &mut chunk)?;
        pending.extend_from_slice(&chunk);
        let mut rest: &[u8] = &pending;
        while let Some((entry, after)) = next_entry(rest)? {
            rest = after;
            entry.check()?;
            entries += 1;
            if entries > root.entries {
                return Err(SnapshotError::invalid(
                    "the manifest has more entries than its root says",
                ));
            }
            each(owner, entry)?;
        }
        let used = pending.len() - rest.len();
        pending.drain(..used);
    }
    match pending.is_empty() && entries == root.entries {
        true => Ok(()),
        false => Err(SnapshotError::invalid("the manifest is not complete")),
    }
}

/// The next entry, if all of it is there, and what follows it.
pub(crate) fn next_entry(bytes: &[u8]) -> Result<Option<(Entry, &[u8])>, SnapshotError> {
    const VARINT_BYTES_MAX: usize = 10;
    let mut rest = bytes;
    let length = match decode_varint(&mut rest) {
        Ok(length) => length,
        Err(_) if bytes.len() < VARINT_BYTES_MAX => return Ok(None),
        Err(_) => return Err(SnapshotError::invalid("the manifest is not valid")),
    };
    let length = usize::try_from(length)
        .ok()
        .filter(|length| *length <= ENTRY_BYTES_MAX)
        .ok_or_else(|| SnapshotError::invalid("an entry of the manifest is too large"))?;
    let Some((entry, rest)) = rest.split_at_checked(length) else {
        return Ok(None);
    };
    let entry = Entry::decode(entry)
        .map_err(|_| SnapshotError::invalid("an entry of the manifest is not valid"))?;
    Ok(Some((entry, rest)))
}
