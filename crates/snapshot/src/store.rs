//! The chunks of one owner: a directory with packs and roots. Nothing is shared between owners, so that nobody learns
//! from what is stored already what others have.
//!
//! | file | |
//! |---|---|
//! | `NNNNNNNN.pack` | chunks |
//! | `DIGEST.root` | the root of a snapshot |
//! | `tmp-*` | being written; removed when it is opened for writing |
//! | `dirty` | there while something is written or deleted: after a crash, what nothing names is looked for |

use crate::SnapshotError;
use crate::chunker::{CHUNK_BYTES_MAX, ChunkRef, Hash};
use crate::manifest::ROOT_BYTES_MAX;
use crate::pack::{Building, Place, read_index};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// As `zstd -1`: saving is a matter of speed.
const COMPRESSION: i32 = 1;

/// Chunks of one owner: their index is in memory (some 60 bytes each) while the owner saves or restores.
const CHUNKS_MAX: usize = 2_000_000;

/// What is left free on the disk: the database of the server is on the same one.
const DISK_RESERVE_BYTES: u64 = 64 * 1024 * 1024;

/// A pack is rewritten when less than this part of it is needed, in percent.
const PACK_NEEDED_MIN: u64 = 50;

/// What an owner may store.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// Bytes on disk of all chunks together.
    pub bytes_max: u64,
}

/// What a collection removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Packs that were removed or rewritten.
    pub packs: usize,
    /// Bytes that were freed.
    pub bytes: u64,
}

/// An owner's chunks, open.
pub struct Owner {
    dir: PathBuf,
    index: HashMap<Hash, Place>,
    packs: HashMap<u32, Pack>,
    building: Building,
    next_pack: u32,
    quota: Quota,
    /// Of packs on disk.
    bytes: u64,
    /// Bytes of chunks that were added since it was opened.
    added: u64,
    compressor: zstd::bulk::Compressor<'static>,
    decompressor: zstd::bulk::Decompressor<'static>,
    scratch: Vec<u8>,
}

struct Pack {
    file: File,
    path: PathBuf,
    bytes: u64,
    /// Not yet synchronised and named.
    temporary: bool,
}

// === impl Owner ===

impl Owner {
    /// Opens the directory for writing, and removes what a crash left half-written.
    pub fn open(dir: &Path, quota: Quota) -> Result<Self, SnapshotError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(SnapshotError::io("make", dir))?;
        for (name, path) in entries(dir)? {
            if name.starts_with("tmp-") {
                fs::remove_file(&path).map_err(SnapshotError::io("remove", &path))?;
            }
        }
        Self::open_to_read(dir, quota)
    }

    /// Opens the directory; packs that are being written by somebody else are not seen.
    pub fn open_to_read(dir: &Path, quota: Quota) -> Result<Self, SnapshotError> {
        let codec = |source| SnapshotError::Io {
            operation: "set up zstd for",
            path: dir.to_owned(),
            source,
        };
        let mut owner = Self {
            dir: dir.to_owned(),
            index: HashMap::new(),
            packs: HashMap::new(),
            building: Building::default(),
            next_pack: 1,
            quota,
            bytes: 0,
            added: 0,
            compressor: zstd::bulk::Compressor::new(COMPRESSION).map_err(codec)?,
            decompressor: zstd::bulk::Decompressor::new().map_err(codec)?,
            scratch: Vec::with_capacity(zstd::zstd_safe::compress_bound(CHUNK_BYTES_MAX)),
        };
        let mut packs: Vec<(u32, PathBuf)> = entries(dir)?
            .into_iter()
            .filter_map(|(name, path)| {
                let id = u32::from_str_radix(name.strip_suffix(".pack")?, 16).ok()?;
                Some((id, path))
            })
            .collect();
        packs.sort_unstable();
        for (id, path) in packs {
            owner.add_pack(id, path)?;
        }
        Ok(owner)
    }

    fn add_pack(&mut self, id: u32, path: PathBuf) -> Result<(), SnapshotError> {
        let mut file = File::open(&path).map_err(SnapshotError::io("open", &path))?;
        let index = read_index(&mut file, &path, id)?;
        let bytes = file
            .metadata()
            .map_err(SnapshotError::io("stat", &path))?
            .len();
        for (hash, place) in index {
            // A chunk in two packs, after a crash while one was rewritten: the older one counts.
            self.index.entry(hash).or_insert(place);
        }
        self.bytes += bytes;
        self.next_pack = self.next_pack.max(id.saturating_add(1));
        let pack = Pack {
            file,
            path,
            bytes,
            temporary: false,
        };
        self.packs.insert(id, pack);
        Ok(())
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes, as stored, of chunks that were new.
    pub fn added(&self) -> u64 {
        self.added
    }

    /// Says on disk that something is about to be written or deleted.
    pub fn mark_dirty(&self) -> Result<(), SnapshotError> {
        let path = self.dir.join("dirty");
        create(&path)
            .and_then(|file| file.sync_all())
            .map_err(SnapshotError::io("write", &path))?;
        self.sync_dir()
    }

    /// Whether the last change of this directory was not completed.
    pub fn is_dirty(dir: &Path) -> bool {
        dir.join("dirty").exists()
    }

    /// Says on disk that everything here is named by a root.
    pub fn mark_clean(&self) -> Result<(), SnapshotError> {
        remove(&self.dir.join("dirty"))
    }

    /// Stores a chunk, unless it is there.
    pub(crate) fn put(&mut self, data: &[u8]) -> Result<ChunkRef, SnapshotError> {
        let hash = *blake3::hash(data).as_bytes();
        let bytes = u32::try_from(data.len()).expect("a chunk is bounded");
        let chunk = ChunkRef { hash, bytes };
        if self.index.contains_key(&hash) {
            return Ok(chunk);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        let compressed = self.compressor.compress_to_buffer(data, &mut scratch);
        let stored = match compressed {
            Ok(length) if length < data.len() => &scratch[..length],
            Ok(_) | Err(_) => data,
        };
        let put = self.put_stored(hash, stored, bytes);
        self.scratch = scratch;
        put.map(|()| chunk)
    }

    fn put_stored(&mut self, hash: Hash, stored: &[u8], raw: u32) -> Result<(), SnapshotError> {
        if self.index.len() >= CHUNKS_MAX {
            return Err(SnapshotError::Quota(format!(
                "your snapshots have {CHUNKS_MAX} chunks, which is all that this server keeps for one owner: delete snapshots"
            )));
        }
        let bytes = stored.len() as u64;
        if self.bytes + self.added_here() + bytes > self.quota.bytes_max {
            return Err(SnapshotError::Quota(format!(
                "your snapshots may take {} MiB on this server, and this one does not fit: delete snapshots",
                self.quota.bytes_max >> 20
            )));
        }
        let place = self.building.push(self.next_pack, hash, stored, raw);
        self.index.insert(hash, place);
        self.added += bytes;
        match self.building.is_full() {
            true => self.flush(),
            false => Ok(()),
        }
    }

    /// Bytes of the pack in memory.
    fn added_here(&self) -> u64 {
        self.building.bytes()
    }

    /// Writes the pack that is in memory, still under a temporary name.
    fn flush(&mut self) -> Result<(), SnapshotError> {
        if self.building.is_empty() {
            return Ok(());
        }
        self.check_disk()?;
        let id = self.next_pack;
        let bytes = std::mem::take(&mut self.building).into_bytes();
        let path = self.dir.join(format!("tmp-{id:08x}"));
        let failed = || SnapshotError::io("write", &path);
        let mut file = create(&path).map_err(failed())?;
        let length = bytes.len() as u64;
        // Listed before it is written: a failure removes it.
        let written = file.write_all(&bytes);
        let pack = Pack {
            file,
            path: path.clone(),
            bytes: length,
            temporary: true,
        };
        self.packs.insert(id, pack);
        self.next_pack += 1;
        self.bytes += length;
        written.map_err(failed())
    }

    fn check_disk(&self) -> Result<(), SnapshotError> {
        let stat = rustix::fs::statvfs(&self.dir)
            .map_err(|errno| SnapshotError::io("stat", &self.dir)(errno.into()))?;
        match stat.f_bavail.saturating_mul(stat.f_frsize) > DISK_RESERVE_BYTES {
            true => Ok(()),
            false => Err(SnapshotError::Full(self.dir.clone())),
        }
    }

    /// Makes everything that was put durable, and gives packs their names.
    pub(crate) fn commit(&mut self) -> Result<(), SnapshotError> {
        self.flush()?;
        for (id, pack) in &mut self.packs {
            if pack.temporary {
                let failed = || SnapshotError::io("write", &pack.path);
                pack.file.sync_data().map_err(failed())?;
                let name = self.dir.join(format!("{id:08x}.pack"));
                fs::rename(&pack.path, &name).map_err(failed())?;
                pack.path = name;
                pack.temporary = false;
            }
        }
        self.sync_dir()
    }

    /// Whether a chunk of that length is there.
    pub(crate) fn has(&self, chunk: &ChunkRef) -> bool {
        self.index
            .get(&chunk.hash)
            .is_some_and(|place| place.raw == chunk.bytes)
    }

    /// Bytes on disk of a chunk.
    pub(crate) fn stored_bytes(&self, hash: &Hash) -> u64 {
        self.index.get(hash).map_or(0, |place| place.stored.into())
    }

    /// Reads a chunk into `data`, and checks it.
    pub(crate) fn get(
        &mut self,
        chunk: &ChunkRef,
        data: &mut Vec<u8>,
    ) -> Result<(), SnapshotError> {
        let place = *self
            .index
            .get(&chunk.hash)
            .filter(|place| place.raw == chunk.bytes)
            .ok_or_else(|| SnapshotError::damaged("a chunk is missing"))?;
        if place.pack == self.next_pack {
            self.flush()?;
        }
        let pack = self
            .packs
            .get(&place.pack)
            .ok_or_else(|| SnapshotError::damaged("a pack is missing"))?;
        let mut stored = std::mem::take(&mut self.scratch);
        stored.resize(place.stored as usize, 0);
        let read = pack.file.read_exact_at(&mut stored, place.offset.into());
        let read = read.map_err(SnapshotError::io("read", &pack.path));
        data.clear();
        let unpacked = read.and_then(|()| {
            if place.stored == place.raw {
                data.extend_from_slice(&stored);
                return Ok(());
            }
            data.reserve(place.raw as usize);
            let done = self.decompressor.decompress_to_buffer(&stored, data);
            done.map(drop)
                .map_err(|_| SnapshotError::damaged("a chunk cannot be decompressed"))
        });
        self.scratch = stored;
        unpacked?;
        match data.len() == chunk.bytes as usize && *blake3::hash(data).as_bytes() == chunk.hash {
            true => Ok(()),
            false => Err(SnapshotError::damaged(
                "a chunk has other bytes than its hash",
            )),
        }
    }

    /// A chunk as it is stored, for an archive: the bytes on disk.
    pub(crate) fn get_stored(&mut self, chunk: &ChunkRef) -> Result<Vec<u8>, SnapshotError> {
        let mut data = Vec::new();
        // Checked before it leaves.
        self.get(chunk, &mut data)?;
        let place = self.index[&chunk.hash];
        let pack = self
            .packs
            .get(&place.pack)
            .ok_or_else(|| SnapshotError::damaged("a pack is missing"))?;
        let mut stored = vec![0; place.stored as usize];
        pack.file
            .read_exact_at(&mut stored, place.offset.into())
            .map_err(SnapshotError::io("read", &pack.path))?;
        Ok(stored)
    }

    /// Writes a root, durably, after everything that it names.
    pub(crate) fn put_root(&mut self, digest: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.commit()?;
        let (temporary, path) = (self.dir.join("tmp-root"), self.root_path(digest));
        let write = || {
            let mut file = create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        let written = write().map_err(SnapshotError::io("write", &path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written?;
        self.sync_dir()
    }

    /// Reads a root.
    pub fn root(&self, digest: &str) -> Result<Vec<u8>, SnapshotError> {
        let path = self.root_path(digest);
        let failed = || SnapshotError::io("read", &path);
        let file = File::open(&path).map_err(failed())?;
        let mut bytes = Vec::new();
        file.take(ROOT_BYTES_MAX as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(failed())?;
        match crate::digest(&bytes) == digest {
            true => Ok(bytes),
            false => Err(SnapshotError::damaged(format!("root {digest}"))),
        }
    }

    /// Removes the roots that are not in `keep`.
    pub fn keep_roots(&self, keep: &HashSet<String>) -> Result<(), SnapshotError> {
        for (name, path) in entries(&self.dir)? {
            if name
                .strip_suffix(".root")
                .is_some_and(|digest| !keep.contains(digest))
            {
                remove(&path)?;
            }
        }
        self.sync_dir()
    }

    /// Removes every chunk that is not in `live`: whole packs, and packs that are mostly not needed are written again.
    pub fn collect(&mut self, live: &HashSet<Hash>) -> Result<Collected, SnapshotError> {
        self.commit()?;
        let mut needed: HashMap<u32, (u64, Vec<(Hash, Place)>)> = HashMap::new();
        for (hash, place) in &self.index {
            if live.contains(hash) {
                let pack = needed.entry(place.pack).or_default();
                pack.0 += u64::from(place.stored);
                pack.1.push((*hash, *place));
            }
        }
        let before = self.bytes;
        let mut removed = Vec::new();
        let ids: Vec<(u32, u64)> = self.packs.iter().map(|(id, p)| (*id, p.bytes)).collect();
        for (id, bytes) in ids {
            let (used, chunks) = needed.remove(&id).unwrap_or_default();
            if used * 100 < bytes * PACK_NEEDED_MIN {
                self.move_chunks(chunks)?;
                removed.push(id);
            }
        }
        // The copies are durable before the originals go.
        self.commit()?;
        for id in &removed {
            if let Some(pack) = self.packs.remove(id) {
                remove(&pack.path)?;
                self.bytes -= pack.bytes;
            }
        }
        self.index
            .retain(|hash, place| live.contains(hash) && !removed.contains(&place.pack));
        self.sync_dir()?;
        Ok(Collected {
            packs: removed.len(),
            bytes: before.saturating_sub(self.bytes),
        })
    }

    /// Copies chunks, as they are stored, to new packs.
    fn move_chunks(&mut self, mut chunks: Vec<(Hash, Place)>) -> Result<(), SnapshotError> {
        chunks.sort_unstable_by_key(|(_, place)| place.offset);
        let mut stored = Vec::new();
        for (hash, place) in chunks {
            let Some(pack) = self.packs.get(&place.pack) else {
                continue;
            };
            stored.resize(place.stored as usize, 0);
            pack.file
                .read_exact_at(&mut stored, place.offset.into())
                .map_err(SnapshotError::io("read", &pack.path))?;
            let moved = self.building.push(self.next_pack, hash, &stored, place.raw);
            self.index.insert(hash, moved);
            if self.building.is_full() {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn root_path(&self, digest: &str) -> PathBuf {
        self.dir.join(format!("{digest}.root"))
    }

    fn sync_dir(&self) -> Result<(), SnapshotError> {
        File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(SnapshotError::io("write", &self.dir))
    }
}

impl Drop for Owner {
    /// What was not committed is removed.
    fn drop(&mut self) {
        for pack in self.packs.values().filter(|pack| pack.temporary) {
            let _ = fs::remove_file(&pack.path);
        }
    }
}

fn create(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

fn remove(path: &Path) -> Result<(), SnapshotError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(SnapshotError::io("remove", path)),
    }
}

/// Names and paths in a directory; none when there is no directory.
fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, SnapshotError> {
    let listed = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.map_err(SnapshotError::io("list", dir))?,
    };
    let mut found = Vec::new();
    for entry in listed {
        let entry = entry.map_err(SnapshotError::io("list", dir))?;
        found.push((
            entry.file_name().to_string_lossy().into_owned(),
            entry.path(),
        ));
    }
    Ok(found)
}
