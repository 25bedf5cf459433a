//! Transcripts: the output of the commands of a session, as bytes, the newest 8 to 16 MiB.
//!
//! A session has a directory with one or two files (rotation), each named by the offset it starts at. Offsets count from the
//! first byte of the session, so that a reader that follows never reads a byte twice, and the state is only the names and
//! sizes of the files.
//!
//! The directory is named by the session's sandbox. A session id can be reused by its owner; a sandbox id is random and never
//! reused, so that the output of one session never appears in the transcript of another.

use crate::{Store, StoreError};
use k8e_model::SandboxId;
use std::collections::{HashMap, HashSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Size at which a file is rotated; two are kept, so a session holds at most 16 MiB.
pub const TRANSCRIPT_FILE_BYTES_MAX: u64 = 8 * 1024 * 1024;

/// Default page size.
pub const PAGE_BYTES_DEFAULT: u64 = 256 * 1024;

/// Largest page: it is sent in one message.
pub const PAGE_BYTES_MAX: u64 = 1024 * 1024;

/// Files kept open for appending; others are opened when needed.
const OPEN_MAX: usize = 128;

/// A page of a transcript.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TranscriptPage {
    /// The bytes.
    pub output: Vec<u8>,
    /// Where `output` starts; larger than asked when the beginning is no longer kept.
    pub offset: u64,
    /// Offset of the next page.
    pub next_offset: u64,
    /// Bytes between what was asked and `offset` are no longer kept.
    pub truncated_before: bool,
    /// No more output for now.
    pub eof: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Transcripts(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    open: Mutex<HashMap<SandboxId, Log>>,
    /// Bytes on disk of each transcript there is.
    sizes: Mutex<HashMap<SandboxId, u64>>,
}

/// The file that is appended to.
#[derive(Debug)]
struct Log {
    file: File,
    /// Where the oldest kept file starts.
    start: u64,
    base: u64,
    bytes: u64,
}

// === impl Store ===

impl Store {
    /// Appends to the transcript of a sandbox's session.
    pub async fn append_transcript(
        &self,
        sandbox: &SandboxId,
        output: Vec<u8>,
    ) -> Result<(), StoreError> {
        let id = sandbox.clone();
        self.transcripts(move |t| t.append(&id, &output)).await
    }

    /// A piece of a session's transcript, from `offset`, at most `limit` bytes; 0 is the default.
    pub async fn transcript(
        &self,
        sandbox: &SandboxId,
        offset: u64,
        limit: u64,
    ) -> Result<TranscriptPage, StoreError> {
        let limit = if limit == 0 {
            PAGE_BYTES_DEFAULT
        } else {
            limit.min(PAGE_BYTES_MAX)
        };
        let id = sandbox.clone();
        self.transcripts(move |t| t.page(&id, offset, limit)).await
    }

    /// Closes the file of a session. The next write opens it again.
    pub fn close_transcript(&self, sandbox: &SandboxId) {
        self.shared.transcripts.open_files().remove(sandbox);
    }

    /// Removes a transcript. A later write creates it again.
    pub(crate) async fn remove_transcript(&self, sandbox: &SandboxId) -> Result<(), StoreError> {
        let id = sandbox.clone();
        self.transcripts(move |t| t.remove(&id)).await
    }

    /// Removes the transcripts of all but these sandboxes, and reads the sizes of the rest.
    pub(crate) async fn sweep_transcripts(
        &self,
        known: HashSet<SandboxId>,
    ) -> Result<(), StoreError> {
        self.transcripts(move |t| t.sweep(&known)).await
    }

    /// Bytes of all transcripts on disk.
    pub(crate) fn transcript_bytes(&self) -> u64 {
        self.shared.transcripts.sizes().values().sum()
    }

    /// Bytes of one transcript on disk.
    pub(crate) fn transcript_bytes_of(&self, sandbox: &SandboxId) -> u64 {
        let sizes = self.shared.transcripts.sizes();
        sizes.get(sandbox).copied().unwrap_or(0)
    }

    /// Runs file operations, which block, on the blocking thread pool.
    async fn transcripts<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transcripts) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let transcripts = self.shared.transcripts.clone();
        let path = transcripts.0.dir.clone();
        match tokio::task::spawn_blocking(move || work(&transcripts)).await {
            Ok(done) => done,
            Err(e) => Err(StoreError::File {
                operation: "work on",
                path,
                source: std::io::Error::other(e),
            }),
        }
    }
}

// === impl Transcripts ===

impl Transcripts {
    pub(crate) fn open(dir: &Path) -> std::io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        Ok(Self(Arc::new(Inner {
            dir: dir.to_owned(),
            open: Mutex::default(),
            sizes: Mutex::default(),
        })))
    }

    fn open_files(&self) -> MutexGuard<'_, HashMap<SandboxId, Log>> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sizes(&self) -> MutexGuard<'_, HashMap<SandboxId, u64>> {
        self.0.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dir_of(&self, id: &SandboxId) -> PathBuf {
        self.0.dir.join(id.as_str())
    }

    fn append(&self, id: &SandboxId, output: &[u8]) -> Result<(), StoreError> {
        // Taken out while it is written: a failed write may have left half of it, and then the
        // size on disk is the truth again.
        let held = self.open_files().remove(id);
        let mut log = match held {
            Some(log) => log,
            None => self.newest(id)?,
        };
        let mut rest = output;
        while !rest.is_empty() {
            if log.bytes >= TRANSCRIPT_FILE_BYTES_MAX {
                log = self.rotate(id, &log)?;
            }
            let room = usize::try_from(TRANSCRIPT_FILE_BYTES_MAX - log.bytes).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(rest.len().min(room));
            log.file
                .write_all(now)
                .map_err(|e| self.file("append to", &self.path(id, log.base), e))?;
            log.bytes += now.len() as u64;
            rest = later;
        }
        self.sizes()
            .insert(id.clone(), log.base + log.bytes - log.start);
        let mut open = self.open_files();
        if open.len() >= OPEN_MAX {
            open.clear();
        }
        open.insert(id.clone(), log);
        Ok(())
    }

    fn newest(&self, id: &SandboxId) -> Result<Log, StoreError> {
        let dir = self.dir_of(id);
        std::fs::create_dir_all(&dir).map_err(|e| self.file("make", &dir, e))?;
        let files = self.files(id)?;
        // Known from now on, so that it counts also when the first write fails.
        let bytes = files.iter().map(|(_, bytes)| bytes).sum();
        self.sizes().insert(id.clone(), bytes);
        let start = files.first().map_or(0, |(base, _)| *base);
        let base = files.last().map_or(0, |(base, _)| *base);
        self.log(id, start, base)
    }

    fn log(&self, id: &SandboxId, start: u64, base: u64) -> Result<Log, StoreError> {
        let path = self.path(id, base);
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|e| self.file("open", &path, e))?;
        let bytes = file
            .metadata()
            .map_err(|e| self.file("stat", &path, e))?
            .len();
        Ok(Log {
            file,
            start,
            base,
            bytes,
        })
    }

    fn rotate(&self, id: &SandboxId, full: &Log) -> Result<Log, StoreError> {
        let next = self.log(id, full.base, full.base + full.bytes)?;
        for (base, _) in self.files(id)? {
            if base < full.base {
                let path = self.path(id, base);
                std::fs::remove_file(&path).map_err(|e| self.file("remove", &path, e))?;
            }
        }
        Ok(next)
    }

    fn page(&self, id: &SandboxId, offset: u64, limit: u64) -> Result<TranscriptPage, StoreError> {
        let files = self.files(id)?;
        let start = files.first().map_or(0, |(base, _)| *base);
        let end = files.last().map_or(0, |(base, bytes)| base + bytes);
        let from = offset.clamp(start, end);
        let until = from.saturating_add(limit).min(end);
        let mut output = Vec::with_capacity(usize::try_from(until - from).unwrap_or(0));
        for (base, bytes) in files {
            let (a, b) = (from.max(base), until.min(base + bytes));
            if a < b {
                let path = self.path(id, base);
                self.read(&path, a - base, b - a, &mut output)?;
            }
        }
        let next_offset = from + output.len() as u64;
        Ok(TranscriptPage {
            output,
            offset: from,
            next_offset,
            truncated_before: offset < start,
            eof: next_offset >= end,
        })
    }

    fn read(
        &self,
        path: &Path,
        offset: u64,
        bytes: u64,
        output: &mut Vec<u8>,
    ) -> Result<(), StoreError> {
        let mut file = match File::open(path) {
            Ok(file) => file,
            // Rotated away between the listing and now: the next page says so.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(self.file("open", path, e)),
        };
        file.seek(SeekFrom::Start(offset))
            .map_err(|e| self.file("seek in", path, e))?;
        file.take(bytes)
            .read_to_end(output)
            .map_err(|e| self.file("read", path, e))?;
        Ok(())
    }

    fn remove(&self, id: &SandboxId) -> Result<(), StoreError> {
        self.open_files().remove(id);
        self.remove_dir(&self.dir_of(id))?;
        self.sizes().remove(id);
        Ok(())
    }

    fn remove_dir(&self, dir: &Path) -> Result<(), StoreError> {
        match std::fs::remove_dir_all(dir) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(self.file("remove", dir, e)),
            _ => Ok(()),
        }
    }

    /// A file that cannot be removed is logged and kept: it must not keep a server from starting.
    fn sweep(&self, known: &HashSet<SandboxId>) -> Result<(), StoreError> {
        let failed = |e| self.file("list", &self.0.dir, e);
        for entry in std::fs::read_dir(&self.0.dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let id = name.to_str().and_then(|name| name.parse().ok());
            if let Some(id) = id.filter(|id| known.contains(id)) {
                let bytes = self.files(&id)?.iter().map(|(_, bytes)| bytes).sum();
                self.sizes().insert(id, bytes);
            } else if let Err(error) = self.remove_dir(&self.0.dir.join(&name)) {
                tracing::warn!(
                    ?error,
                    "the transcript of a session that is not known stays"
                );
            }
        }
        Ok(())
    }

    /// Start and size of each file, oldest first.
    fn files(&self, id: &SandboxId) -> Result<Vec<(u64, u64)>, StoreError> {
        let dir = self.dir_of(id);
        let failed = |e| self.file("list", &dir, e);
        let entries = match std::fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(failed(e)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let base = name
                .to_str()
                .and_then(|name| name.strip_suffix(".log"))
                .and_then(|base| base.parse().ok());
            if let Some(base) = base {
                match entry.metadata() {
                    Ok(metadata) => files.push((base, metadata.len())),
                    Err(e) if e.kind() == ErrorKind::NotFound => {}
                    Err(e) => return Err(failed(e)),
                }
            }
        }
        files.sort_unstable();
        Ok(files)
    }

    fn path(&self, id: &SandboxId, base: u64) -> PathBuf {
        self.dir_of(id).join(format!("{base}.log"))
    }

    fn file(&self, operation: &'static str, path: &Path, source: std::io::Error) -> StoreError {
        if crate::is_full(&source) {
            return StoreError::Full {
                dir: self.0.dir.clone(),
            };
        }
        StoreError::File {
            operation,
            path: path.to_owned(),
            source,
        }
    }
}
