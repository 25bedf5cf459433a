//! Pack files: compressed chunks one after another, then their index. Written once, and named when they are whole.
//!
//! `chunks… | (hash, offset, stored, raw)… | count | BLAKE3 of the index | magic`

use crate::SnapshotError;
use crate::chunker::{CHUNK_BYTES_MAX, Hash};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

/// A pack is written when it has this many bytes: few files, and little to copy when some chunks are no longer needed.
pub(crate) const PACK_BYTES: usize = 16 * 1024 * 1024;

/// Chunks of a pack: also the smallest ones fill it in the end, and its index is read into memory.
const PACK_CHUNKS_MAX: usize = 64 * 1024;

const MAGIC: &[u8; 8] = b"k8epack1";
const INDEX_ENTRY_BYTES: usize = 32 + 3 * 4;
const TRAILER_BYTES: usize = 4 + 32 + 8;

/// Where a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pack: u32,
    pub(crate) offset: u32,
    /// Bytes on disk. The same as `raw` when it is not compressed.
    pub(crate) stored: u32,
    pub(crate) raw: u32,
}

/// A pack in memory.
#[derive(Debug, Default)]
pub(crate) struct Building {
    bytes: Vec<u8>,
    index: Vec<(Hash, Place)>,
}

// === impl Building ===

impl Building {
    pub(crate) fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Bytes of its chunks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= PACK_BYTES || self.index.len() >= PACK_CHUNKS_MAX
    }

    /// Adds a chunk as it is to be stored.
    pub(crate) fn push(&mut self, pack: u32, hash: Hash, stored: &[u8], raw: u32) -> Place {
        let number = |n: usize| u32::try_from(n).expect("a pack is far below 4 GiB");
        let place = Place {
            pack,
            offset: number(self.bytes.len()),
            stored: number(stored.len()),
            raw,
        };
        self.bytes.extend_from_slice(stored);
        self.index.push((hash, place));
        place
    }

    /// The bytes of the whole file.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        let start = self.bytes.len();
        for (hash, place) in &self.index {
            self.bytes.extend_from_slice(hash);
            for number in [place.offset, place.stored, place.raw] {
                self.bytes.extend_from_slice(&number.to_be_bytes());
            }
        }
        let sum = blake3::hash(&self.bytes[start..]);
        let count = u32::try_from(self.index.len()).expect("a pack has a bounded number of chunks");
        self.bytes.extend_from_slice(&count.to_be_bytes());
        self.bytes.extend_from_slice(sum.as_bytes());
        self.bytes.extend_from_slice(MAGIC);
        self.bytes
    }
}

/// The index of a pack file.
pub(crate) fn read_index(
    file: &mut File,
    path: &Path,
    pack: u32,
) -> Result<Vec<(Hash, Place)>, SnapshotError> {
    let damaged = || SnapshotError::damaged(format!("the index of {}", path.display()));
    let failed = || SnapshotError::io("read", path);
    let length = file.seek(SeekFrom::End(0)).map_err(failed())?;
    let trailer_at = length
        .checked_sub(TRAILER_BYTES as u64)
        .ok_or_else(damaged)?;
    let mut trailer = [0; TRAILER_BYTES];
    file.seek(SeekFrom::Start(trailer_at)).map_err(failed())?;
    file.read_exact(&mut trailer).map_err(failed())?;
    let (count, rest) = trailer.split_first_chunk::<4>().ok_or_else(damaged)?;
    let (sum, magic) = rest.split_first_chunk::<32>().ok_or_else(damaged)?;
    let count = u32::from_be_bytes(*count) as usize;
    if magic != MAGIC || count > PACK_CHUNKS_MAX {
        return Err(damaged());
    }
    let index_at = trailer_at
        .checked_sub((count * INDEX_ENTRY_BYTES) as u64)
        .ok_or_else(damaged)?;
    let mut index = vec![0; count * INDEX_ENTRY_BYTES];
    file.seek(SeekFrom::Start(index_at)).map_err(failed())?;
    file.read_exact(&mut index).map_err(failed())?;
    if blake3::hash(&index) != *sum {
        return Err(damaged());
    }
    let entries = index.chunks_exact(INDEX_ENTRY_BYTES).map(|entry| {
        let (hash, numbers) = entry.split_first_chunk::<32>()?;
        let mut numbers = numbers
            .as_chunks::<4>()
            .0
            .iter()
            .copied()
            .map(u32::from_be_bytes);
        let place = Place {
            pack,
            offset: numbers.next()?,
            stored: numbers.next()?,
            raw: numbers.next()?,
        };
        let end = u64::from(place.offset) + u64::from(place.stored);
        let fits = end <= index_at && place.raw as usize <= CHUNK_BYTES_MAX;
        (fits && place.stored <= place.raw).then_some((*hash, place))
    });
    entries.collect::<Option<Vec<_>>>().ok_or_else(damaged)
}
