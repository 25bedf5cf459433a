//! Archives: a snapshot as one file.
//!
//! `magic | header | root | (stored length, length, chunk)… | 0, 0 | BLAKE3 of all before | that, keyed`
//!
//! Numbers are big-endian u32. Everything is checked when an archive is imported: each chunk against its hash, the
//! manifest, that every chunk which it names came, and the sum over the whole. The keyed sum is made with a key of the
//! server and proves that this server exported the archive for this owner; without it an archive can be imported as a
//! foreign one, whose sums only prove that it is complete.

use crate::chunker::{CHUNK_BYTES_MAX, ChunkRef, Hash};
use crate::entry::Kind;
use crate::manifest::ROOT_BYTES_MAX;
use crate::restore::file_bytes;
use crate::{Owner, Root, SnapshotError, digest, read_manifest};
use prost::Message;
use std::collections::HashSet;
use std::io::{self, Read, Write};

/// Bytes of the server's key.
pub const KEY_BYTES: usize = 32;

const MAGIC: &[u8; 16] = b"k8e snapshot 1\n\0";

/// A name and an owner.
const HEADER_BYTES_MAX: usize = 4096;

/// What an archive says about itself.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ArchiveInfo {
    /// Name of the snapshot when it was exported.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its owner then.
    #[prost(string, tag = "2")]
    pub owner: String,
}

struct Sum<T> {
    io: T,
    hasher: blake3::Hasher,
}

/// Writes a snapshot as an archive.
pub fn export(
    owner: &mut Owner,
    root: &[u8],
    info: &ArchiveInfo,
    key: &[u8; KEY_BYTES],
    to: impl Write,
) -> Result<(), SnapshotError> {
    let parsed = Root::decode_checked(root)?;
    let mut out = Sum {
        io: to,
        hasher: blake3::Hasher::new(),
    };
    out.put(MAGIC)?;
    out.put_block(&info.encode_to_vec())?;
    out.put_block(root)?;
    let mut sent: HashSet<Hash> = HashSet::new();
    for extent in &parsed.manifest {
        out.put_chunk(owner, &mut sent, &extent.chunk()?)?;
    }
    read_manifest(owner, &parsed, |owner, entry| {
        for extent in &entry.content {
            out.put_chunk(owner, &mut sent, &extent.chunk()?)?;
        }
        Ok(())
    })?;
    out.put(&[0; 8])?;
    let sum = out.hasher.finalize();
    out.put(sum.as_bytes())?;
    out.put(keyed(key, sum.as_bytes()).as_bytes())?;
    out.io.flush().map_err(SnapshotError::Source)
}

/// Reads an archive into an owner's chunks. The root is written when everything was checked; returned are what the
/// archive says, the root, its digest, and the bytes on disk of its chunks. `expected` is the owner whose archive it must be; none takes any archive.
pub fn import(
    owner: &mut Owner,
    from: impl Read,
    key: &[u8; KEY_BYTES],
    expected: Option<&str>,
) -> Result<(ArchiveInfo, Root, String, u64), SnapshotError> {
    let mut source = Sum {
        io: from,
        hasher: blake3::Hasher::new(),
    };
    let mut magic = [0; MAGIC.len()];
    source.get(&mut magic)?;
    if &magic != MAGIC {
        return Err(SnapshotError::invalid(
            "this is not an archive of a snapshot",
        ));
    }
    let info = source.get_block(HEADER_BYTES_MAX)?;
    let info = ArchiveInfo::decode(&info[..])
        .map_err(|_| SnapshotError::invalid("the header of the archive is not valid"))?;
    if expected.is_some_and(|expected| expected != info.owner) {
        return Err(SnapshotError::invalid(
            "the archive is of another owner: import it with --foreign if you trust where it comes from",
        ));
    }
    let bytes = source.get_block(ROOT_BYTES_MAX)?;
    let root = Root::decode_checked(&bytes)?;
    let came = source.get_chunks(owner)?;
    source.check_sums(key, expected.is_some())?;
    let stored = check_complete(owner, &root, &came)?;
    let digest = digest(&bytes);
    owner.put_root(&digest, &bytes)?;
    Ok((info, root, digest, stored))
}

/// Every chunk that the manifest names came with the archive, and the numbers of the root are right. Returns the bytes on
/// disk of the chunks, which are charged to quotas: they are not for the archive to say.
fn check_complete(
    owner: &mut Owner,
    root: &Root,
    came: &HashSet<Hash>,
) -> Result<u64, SnapshotError> {
    let missing = || SnapshotError::invalid("the archive is not complete: a chunk is missing");
    let mut used: HashSet<Hash> = HashSet::new();
    let mut check = |chunk: ChunkRef| match came.contains(&chunk.hash) {
        true => {
            used.insert(chunk.hash);
            Ok(())
        }
        false => Err(missing()),
    };
    for extent in &root.manifest {
        check(extent.chunk()?)?;
    }
    let (mut files, mut bytes) = (0u64, 0u64);
    read_manifest(owner, root, |owner, entry| {
        for extent in &entry.content {
            let chunk = extent.chunk()?;
            check(chunk)?;
            if !owner.has(&chunk) {
                return Err(missing());
            }
        }
        files += u64::from(entry.kind() == Kind::File);
        bytes = bytes.saturating_add(file_bytes(&entry));
        Ok(())
    })?;
    if used.len() != came.len() {
        return Err(SnapshotError::invalid(
            "the archive has chunks that nothing names",
        ));
    }
    match (files, bytes) == (root.files, root.bytes) {
        true => Ok(used
            .iter()
            .map(|hash| owner.stored_bytes(hash))
            .fold(0, u64::saturating_add)),
        false => Err(SnapshotError::invalid(
            "the root of the archive has wrong totals",
        )),
    }
}

fn keyed(key: &[u8; KEY_BYTES], sum: &[u8; 32]) -> blake3::Hash {
    blake3::keyed_hash(key, sum)
}

// === impl Sum ===

impl<T: Write> Sum<T> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.hasher.update(bytes);
        self.io.write_all(bytes).map_err(SnapshotError::Source)
    }

    fn put_block(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let length = u32::try_from(bytes.len())
            .map_err(|_| SnapshotError::invalid("a block that is too long"))?;
        self.put(&length.to_be_bytes())?;
        self.put(bytes)
    }

    fn put_chunk(
        &mut self,
        owner: &mut Owner,
        sent: &mut HashSet<Hash>,
        chunk: &ChunkRef,
    ) -> Result<(), SnapshotError> {
        if !sent.insert(chunk.hash) {
            return Ok(());
        }
        let stored = owner.get_stored(chunk)?;
        let length = u32::try_from(stored.len()).unwrap_or(u32::MAX);
        self.put(&length.to_be_bytes())?;
        self.put(&chunk.bytes.to_be_bytes())?;
        self.put(&stored)
    }
}

impl<T: Read> Sum<T> {
    fn get(&mut self, bytes: &mut [u8]) -> Result<(), SnapshotError> {
        self.io.read_exact(bytes).map_err(|error| {
            match error.kind() == io::ErrorKind::UnexpectedEof {
                true => SnapshotError::invalid("the archive ends too early"),
                false => SnapshotError::Source(error),
            }
        })?;
        self.hasher.update(bytes);
        Ok(())
    }

    fn get_u32(&mut self) -> Result<u32, SnapshotError> {
        let mut number = [0; 4];
        self.get(&mut number)?;
        Ok(u32::from_be_bytes(number))
    }

    fn get_block(&mut self, max: usize) -> Result<Vec<u8>, SnapshotError> {
        /// A length alone costs no memory.
        const STEP: usize = 64 * 1024;
        let length = self.get_u32()? as usize;
        if length > max {
            return Err(SnapshotError::invalid("a part of the archive is too long"));
        }
        let mut block = Vec::new();
        while block.len() < length {
            let start = block.len();
            block.resize(length.min(start + STEP), 0);
            self.get(&mut block[start..])?;
        }
        Ok(block)
    }

    /// Stores all chunks; returns their hashes.
    fn get_chunks(&mut self, owner: &mut Owner) -> Result<HashSet<Hash>, SnapshotError> {
        let mut came = HashSet::new();
        let mut decompressor = zstd::bulk::Decompressor::new().map_err(SnapshotError::Source)?;
        let (mut stored, mut data) = (Vec::new(), Vec::new());
        loop {
            let (length, raw) = (self.get_u32()? as usize, self.get_u32()? as usize);
            if (length, raw) == (0, 0) {
                return Ok(came);
            }
            if length == 0 || length > raw || raw > CHUNK_BYTES_MAX {
                return Err(SnapshotError::invalid(
                    "a chunk of the archive has an impossible length",
                ));
            }
            stored.resize(length, 0);
            self.get(&mut stored)?;
            data.clear();
            if length == raw {
                data.extend_from_slice(&stored);
            } else {
                // Writes no more than there is room for.
                data.reserve_exact(raw);
                let unpacked = decompressor.decompress_to_buffer(&stored, &mut data);
                if !unpacked.is_ok_and(|bytes| bytes == raw) {
                    return Err(SnapshotError::invalid(
                        "a chunk of the archive cannot be decompressed",
                    ));
                }
            }
            if !came.insert(owner.put(&data)?.hash) {
                return Err(SnapshotError::invalid("a chunk of the archive comes twice"));
            }
        }
    }

    fn check_sums(&mut self, key: &[u8; KEY_BYTES], own: bool) -> Result<(), SnapshotError> {
        let expected = self.hasher.finalize();
        let (mut sum, mut signed) = ([0; 32], [0; 32]);
        self.get(&mut sum)?;
        self.get(&mut signed)?;
        let mut more = [0; 1];
        let ended = matches!(self.io.read(&mut more), Ok(0));
        if expected != sum || !ended {
            return Err(SnapshotError::invalid(
                "the archive was changed: its checksum is wrong",
            ));
        }
        if own && keyed(key, &sum) != signed {
            return Err(SnapshotError::invalid(
                "the archive was not exported by this server: import it with --foreign if you trust where it comes from",
            ));
        }
        Ok(())
    }
}
