//! Export of a snapshot to an archive, and import of one.

use super::{WORK_TIMEOUT, blocking};
use crate::recorder::now_ms;
use crate::sessions::tenant_of;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{Principal, SnapshotName};
use k8e_snapshot::{ArchiveInfo, KEY_BYTES, SnapshotError, export, import};
use k8e_store::SavedSnapshot;
use ring::rand::SecureRandom as _;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Parts of an archive that wait to be sent.
const PARTS_MAX: usize = 8;

/// Bytes of a part.
const PART_BYTES: usize = 128 * 1024;

/// An archive that is being exported. It is whole when it ends without an error.
#[derive(Debug)]
pub struct ExportStream(mpsc::Receiver<Result<Bytes, Error>>);

/// Sends what is written.
struct Parts {
    parts: mpsc::Sender<Result<Bytes, Error>>,
    buffer: Vec<u8>,
}

/// Reads what arrives.
struct Arriving {
    parts: mpsc::Receiver<Bytes>,
    rest: Bytes,
}

// === impl Sessions ===

impl Sessions {
    /// Exports one of the caller's saved workspaces.
    pub async fn export_snapshot(
        &self,
        who: &Principal,
        name: &SnapshotName,
    ) -> Result<ExportStream, Error> {
        let audit = self.audited(who, "snapshot.export", name.as_str());
        let begin = async {
            self.saved_snapshot(who, name).await?;
            let held = self.shared.hold(who.name(), false).await?;
            // Again, now that it cannot be deleted.
            Ok((held, self.saved_snapshot(who, name).await?))
        };
        let (held, saved) = audit.end(begin.await)?;
        let info = ArchiveInfo {
            name: name.to_string(),
            owner: who.name().to_owned(),
        };
        let path = self.key_path();
        let (parts, stream) = mpsc::channel(PARTS_MAX);
        tokio::task::spawn_blocking(move || {
            let mut held = held;
            let mut out = Parts {
                parts,
                buffer: Vec::with_capacity(PART_BYTES),
            };
            let mut write = || {
                let root = held.owner.root(&saved.digest)?;
                export(&mut held.owner, &root, &info, &key(&path)?, &mut out)
            };
            if let Err(error) = write() {
                // Fails when nobody reads any more.
                let _ = out.parts.blocking_send(Err(error.into()));
            }
        });
        Ok(ExportStream(stream))
    }

    /// Imports an archive as one of the caller's snapshots, under the name in it where none is given. `foreign` takes
    /// one of another owner or server.
    pub async fn import_snapshot(
        &self,
        who: &Principal,
        name: Option<SnapshotName>,
        foreign: bool,
        archive: mpsc::Receiver<Bytes>,
    ) -> Result<SavedSnapshot, Error> {
        let named = name.as_ref().map(SnapshotName::as_str).unwrap_or_default();
        let mut audit = self.audited(who, "snapshot.import", named);
        let imported = timeout(WORK_TIMEOUT, self.import(who, name, foreign, archive)).await;
        let imported = imported.unwrap_or(Err(Error::SnapshotTimeout(WORK_TIMEOUT)));
        if let Ok(imported) = &imported {
            audit.about(imported.name.as_str());
        }
        audit.end(imported)
    }

    async fn import(
        &self,
        who: &Principal,
        name: Option<SnapshotName>,
        foreign: bool,
        archive: mpsc::Receiver<Bytes>,
    ) -> Result<SavedSnapshot, Error> {
        let shared = &self.shared;
        let tenant = tenant_of(who, None)?.clone();
        if let Some(name) = &name {
            shared.check_quota(who, name, &tenant, false).await?;
        }
        let held = shared.hold(who.name(), true).await?;
        let (path, expected) = (self.key_path(), (!foreign).then(|| who.name().to_owned()));
        let read = blocking(move || {
            let mut held = held;
            held.owner.mark_dirty()?;
            let arriving = Arriving {
                parts: archive,
                rest: Bytes::new(),
            };
            let read = import(&mut held.owner, arriving, &key(&path)?, expected.as_deref())?;
            Ok((held, read))
        });
        let imported = async {
            let (held, (info, root, digest, stored_bytes)) = read.await?;
            let parsed = || info.name.parse::<SnapshotName>();
            let name = match name {
                Some(name) => name,
                None => parsed().map_err(|error| Error::Invalid(error.message))?,
            };
            shared.check_quota(who, &name, &tenant, false).await?;
            let saved = SavedSnapshot {
                owner: who.name().to_owned(),
                name,
                tenant: tenant.as_str().to_owned(),
                digest,
                session: String::new(),
                entries: root.entries,
                files: root.files,
                bytes: root.bytes,
                stored_bytes,
                created_at: now_ms(),
            };
            shared.list_saved(&saved, false, held).await?;
            Ok(saved)
        };
        let imported = imported.await;
        if imported.is_err() {
            shared.collect_snapshots_soon(who.name());
        }
        imported
    }

    fn key_path(&self) -> PathBuf {
        self.shared.store.dir().join("archives.key")
    }
}

// === impl ExportStream ===

impl ExportStream {
    /// The next bytes; none at the end.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        self.0.recv().await
    }
}

// === impl Parts ===

impl Write for Parts {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= PART_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut whole = Bytes::from(std::mem::take(&mut self.buffer));
        while !whole.is_empty() {
            let part = whole.split_to(whole.len().min(PART_BYTES));
            self.parts
                .blocking_send(Ok(part))
                .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        }
        Ok(())
    }
}

// === impl Arriving ===

impl Read for Arriving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.parts.blocking_recv() {
                Some(part) => self.rest = part,
                None => return Ok(0),
            }
        }
        let part = self.rest.split_to(self.rest.len().min(buffer.len()));
        buffer[..part.len()].copy_from_slice(&part);
        Ok(part.len())
    }
}

/// The server's key for archives, made at its first use.
fn key(path: &Path) -> Result<[u8; KEY_BYTES], SnapshotError> {
    let failed = |source| SnapshotError::Io {
        operation: "read the key of archives",
        path: path.to_owned(),
        source,
    };
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        read => {
            let read = read.map_err(failed)?;
            let wrong = |_| failed(io::Error::from(io::ErrorKind::InvalidData));
            return <[u8; KEY_BYTES]>::try_from(read).map_err(wrong);
        }
    }
    let mut key = [0; KEY_BYTES];
    ring::rand::SystemRandom::new()
        .fill(&mut key)
        .map_err(|_| failed(io::Error::other("no random numbers")))?;
    let make = || {
        let temporary = path.with_extension(format!("tmp-{:02x}{:02x}", key[0], key[1]));
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(&key)?;
        file.sync_all()?;
        // Whoever is first makes it: a link does not replace.
        let linked = std::fs::hard_link(&temporary, path);
        std::fs::remove_file(&temporary)?;
        linked
    };
    match make() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self::key(path),
        made => made.map(|()| key).map_err(failed),
    }
}
