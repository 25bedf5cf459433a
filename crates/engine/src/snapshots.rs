//! Snapshots: saved workspaces of sessions, and the registry of `sandbox.v1` clients, which maps names to layers that
//! the clients store. Names are per owner, for both together.
//!
//! A snapshot is listed when its row is written, which is the last step of saving; deleting begins with the row. What is
//! between is found by a mark on disk that is there while an owner's chunks change ([`sweep`]).

mod copy;
mod registry;
mod transfer;
mod tree;

pub use transfer::ExportStream;

use crate::recorder::now_ms;
use crate::sessions::Shared;
use crate::{Error, Sessions};
use k8e_model::{Principal, SessionId, SnapshotName, TenantId};
use k8e_snapshot::{Hash, Known, Meta, Owner, Quota, Root, SnapshotError, read_manifest};
use k8e_store::{SavedSnapshot, Store};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{
    OwnedRwLockReadGuard, OwnedRwLockWriteGuard, OwnedSemaphorePermit, RwLock, Semaphore,
};
use tokio::time::timeout;

/// Saved, restored or transferred at once: each uses a CPU, and memory for an owner's index.
const WORK_AT_ONCE: usize = 2;

/// All of one: 200 GB at 60 MB a second.
const WORK_TIMEOUT: Duration = Duration::from_secs(3600);

/// A saved workspace, and what saving it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its row.
    pub snapshot: SavedSnapshot,
    /// Bytes that were written to the chunk store for it.
    pub added_bytes: u64,
    /// How long the processes of the session were stopped, as its guest says.
    pub stopped: Duration,
    /// Sockets and devices, which are not saved.
    pub skipped: u64,
}

/// State of the snapshots of a server.
pub(crate) struct Snapshots {
    dir: PathBuf,
    turns: Arc<Semaphore>,
    /// One lock for each owner in use: written by what changes the owner's chunks, read by what needs them.
    locks: Mutex<HashMap<String, Arc<RwLock<()>>>>,
}

/// An owner's chunks, locked.
struct Held {
    owner: Owner,
    _lock: Lock,
    _turn: Option<OwnedSemaphorePermit>,
}

enum Lock {
    Read { _guard: OwnedRwLockReadGuard<()> },
    Write { _guard: OwnedRwLockWriteGuard<()> },
}

// === impl Sessions ===

impl Sessions {
    /// Saves the workspace of a session. The row is written when everything else is on disk; when this fails or is
    /// dropped, nothing is listed and nothing is left.
    pub async fn save_snapshot(
        &self,
        who: &Principal,
        id: &SessionId,
        name: &SnapshotName,
        replace: bool,
    ) -> Result<Saved, Error> {
        let audit = self.audited(who, "snapshot.save", &format!("{id}:{name}"));
        let saved = timeout(WORK_TIMEOUT, self.save(who, id, name, replace)).await;
        audit.end(saved.unwrap_or(Err(Error::SnapshotTimeout(WORK_TIMEOUT))))
    }

    async fn save(
        &self,
        who: &Principal,
        id: &SessionId,
        name: &SnapshotName,
        replace: bool,
    ) -> Result<Saved, Error> {
        let shared = &self.shared;
        let live = self.live(who, id).await?;
        let tenant = live.record.tenant.clone();
        let owned = shared.check_quota(who, name, &tenant, replace).await?;
        let sandbox = live.record.sandbox.to_string();
        let held = shared.hold(who.name(), true).await?;
        // The newest one of the same sandbox: most of its files are as they were.
        let mut earlier: Vec<_> = owned
            .into_iter()
            .filter(|saved| saved.session == id.as_str())
            .collect();
        earlier.sort_unstable_by_key(|saved| std::cmp::Reverse(saved.created_at));
        let digest = earlier.first().map(|saved| saved.digest.clone());
        let (held, known) = {
            let sandbox = sandbox.clone();
            blocking(move || {
                let mut held = held;
                held.owner.mark_dirty()?;
                let known = digest.and_then(|digest| known_of(&mut held.owner, &digest, &sandbox));
                Ok((held, known.unwrap_or_default()))
            })
            .await?
        };
        let meta = Meta {
            sandbox,
            created_at_ms: now_ms(),
        };
        let disk_bytes = live.record.limits.disk_bytes;
        let saved = match self
            .save_tree(who, id, held, known, disk_bytes, &meta)
            .await
        {
            Ok((held, tree)) => {
                let snapshot = SavedSnapshot {
                    owner: who.name().to_owned(),
                    name: name.clone(),
                    tenant: tenant.as_str().to_owned(),
                    digest: tree.digest,
                    session: id.as_str().to_owned(),
                    entries: tree.root.entries,
                    files: tree.root.files,
                    bytes: tree.root.bytes,
                    stored_bytes: tree.root.stored_bytes,
                    created_at: meta.created_at_ms,
                };
                let saved = Saved {
                    snapshot,
                    added_bytes: held.owner.added(),
                    stopped: tree.stopped,
                    skipped: tree.skipped,
                };
                let listed = shared.list_saved(&saved.snapshot, replace, held).await;
                listed.map(|()| saved)
            }
            Err(error) => Err(error),
        };
        if saved.is_err() {
            // It leaves no chunks behind.
            shared.collect_snapshots_soon(who.name());
        }
        saved
    }

    /// Puts a snapshot in the place of what is in a session's workspace. On failure the workspace is as it was.
    pub async fn restore_snapshot(
        &self,
        who: &Principal,
        id: &SessionId,
        name: &SnapshotName,
    ) -> Result<Saved, Error> {
        let audit = self.audited(who, "snapshot.restore", &format!("{id}:{name}"));
        let restored = timeout(WORK_TIMEOUT, self.restore(who, id, name)).await;
        audit.end(restored.unwrap_or(Err(Error::SnapshotTimeout(WORK_TIMEOUT))))
    }

    async fn restore(
        &self,
        who: &Principal,
        id: &SessionId,
        name: &SnapshotName,
    ) -> Result<Saved, Error> {
        // Before it is looked for: a session of another owner must not tell from this.
        self.live(who, id).await?;
        let held = self.shared.hold(who.name(), false).await?;
        let snapshot = self.saved_snapshot(who, name).await?;
        let stopped = self.restore_tree(who, id, held, &snapshot.digest).await?;
        Ok(Saved {
            snapshot,
            added_bytes: 0,
            stopped,
            skipped: 0,
        })
    }

    /// One of the caller's saved workspaces.
    pub async fn saved_snapshot(
        &self,
        who: &Principal,
        name: &SnapshotName,
    ) -> Result<SavedSnapshot, Error> {
        let found = self.shared.store.saved_snapshot(who.name(), name).await?;
        found.ok_or_else(|| Error::SnapshotNotFound(name.clone()))
    }

    /// The caller's saved workspaces, by name.
    pub async fn saved_snapshots(&self, who: &Principal) -> Result<Vec<SavedSnapshot>, Error> {
        Ok(self.shared.store.saved_snapshots(Some(who.name())).await?)
    }

    /// Deletes one of the caller's snapshots, saved or registered. What only it needed is removed from disk.
    pub async fn delete_snapshot(&self, who: &Principal, name: &SnapshotName) -> Result<(), Error> {
        let audit = self.audited(who, "snapshot.delete", name.as_str());
        let delete = async {
            let store = &self.shared.store;
            if store.delete_snapshot(who.name(), name).await? {
                return Ok(());
            }
            self.saved_snapshot(who, name).await?;
            let held = self.shared.hold(who.name(), true).await?;
            held.owner.mark_dirty()?;
            if !store.delete_saved_snapshot(who.name(), name).await? {
                return Err(Error::SnapshotNotFound(name.clone()));
            }
            self.shared.collect_snapshots(who.name(), held).await
        };
        audit.end(delete.await)
    }
}

// === impl Shared ===

impl Shared {
    /// Checks the bounds of owner and tenant, before anything is read or written; returns the owner's snapshots.
    async fn check_quota(
        &self,
        who: &Principal,
        name: &SnapshotName,
        tenant: &TenantId,
        replace: bool,
    ) -> Result<Vec<SavedSnapshot>, Error> {
        let owned = self.store.saved_snapshots(Some(who.name())).await?;
        let exists = owned.iter().any(|saved| saved.name == *name);
        if exists && !replace {
            return Err(Error::SnapshotExists(name.clone()));
        }
        if self.store.snapshot(who.name(), name).await?.is_some() {
            return Err(Error::SnapshotNameTaken(name.clone()));
        }
        let max = self.config.snapshots_per_owner_max;
        if owned.len() >= max && !exists {
            return Err(Error::SnapshotsFull { max });
        }
        let max = self.config.snapshot_bytes_per_tenant_max;
        let bytes = self.store.saved_bytes_of_tenant(tenant.as_str()).await?;
        if bytes >= max {
            return Err(Error::TenantSnapshotsFull {
                tenant: tenant.clone(),
                bytes: bytes >> 20,
                max: max >> 20,
            });
        }
        Ok(owned)
    }

    /// Opens an owner's chunks: to change them, or to read.
    async fn hold(self: &Arc<Self>, owner: &str, write: bool) -> Result<Held, Error> {
        let lock = self.snapshots.lock(owner);
        // First the owner's own turn: who waits for it must not keep others waiting.
        let lock = match write {
            true => Lock::Write {
                _guard: lock.write_owned().await,
            },
            false => Lock::Read {
                _guard: lock.read_owned().await,
            },
        };
        let turn = Arc::clone(&self.snapshots.turns).acquire_owned().await.ok();
        let dir = self.snapshots.dir_of(owner);
        let quota = self.quota();
        blocking(move || {
            let owner = match write {
                true => Owner::open(&dir, quota)?,
                false => Owner::open_to_read(&dir, quota)?,
            };
            Ok(Held {
                owner,
                _lock: lock,
                _turn: turn,
            })
        })
        .await
    }

    fn quota(&self) -> Quota {
        Quota {
            bytes_max: self.config.snapshot_bytes_per_owner_max,
        }
    }

    /// Writes the row: from here on the snapshot is listed.
    async fn list_saved(
        self: &Arc<Self>,
        saved: &SavedSnapshot,
        replace: bool,
        held: Held,
    ) -> Result<(), Error> {
        if !self.store.put_saved_snapshot(saved, replace).await? {
            return Err(Error::SnapshotExists(saved.name.clone()));
        }
        match replace {
            // What it replaced may need no chunks any more.
            true => self.collect_snapshots(&saved.owner, held).await,
            false => Ok(held.owner.mark_clean()?),
        }
    }

    /// Removes what no snapshot of the owner needs.
    async fn collect_snapshots(self: &Arc<Self>, owner: &str, held: Held) -> Result<(), Error> {
        let rows = self.store.saved_snapshots(Some(owner)).await?;
        let digests = rows.into_iter().map(|row| row.digest).collect();
        let dir = self.snapshots.dir_of(owner);
        blocking(move || collect(held, digests, &dir)).await
    }

    fn collect_snapshots_soon(self: &Arc<Self>, owner: &str) {
        let (shared, owner) = (Arc::clone(self), owner.to_owned());
        self.runtime.spawn(async move {
            let collect = async {
                let held = shared.hold(&owner, true).await?;
                shared.collect_snapshots(&owner, held).await
            };
            if let Err(error) = collect.await {
                tracing::warn!(%error, "chunks of a failed snapshot cannot be removed");
            }
        });
    }
}

// === impl Snapshots ===

impl Snapshots {
    pub(crate) fn new(store: &Store) -> Self {
        Self {
            dir: store.dir().join("snapshots"),
            turns: Arc::new(Semaphore::new(WORK_AT_ONCE)),
            locks: Mutex::default(),
        }
    }

    /// An owner is any text; its directory is named by a hash of it.
    fn dir_of(&self, owner: &str) -> PathBuf {
        let mut name = k8e_snapshot::digest(owner.as_bytes());
        name.truncate(32);
        self.dir.join(name)
    }

    fn lock(&self, owner: &str) -> Arc<RwLock<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nobody holds are not kept.
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(owner.to_owned()).or_default())
    }
}

/// Removes what a crash left: for every owner whose last change was not completed.
pub(crate) async fn sweep(shared: Arc<Shared>) {
    let work = async {
        let mut owners: HashMap<PathBuf, String> = HashMap::new();
        for row in shared.store.saved_snapshots(None).await? {
            owners.insert(shared.snapshots.dir_of(&row.owner), row.owner);
        }
        let dir = shared.snapshots.dir.clone();
        let dirty = blocking(move || Ok(dirty_dirs(&dir))).await?;
        for dir in dirty {
            match owners.get(&dir) {
                Some(owner) => {
                    let held = shared.hold(owner, true).await?;
                    shared.collect_snapshots(owner, held).await?;
                }
                // Of an owner without a snapshot, whose name is not known: the directory itself is the key.
                None => shared.remove_unowned(dir).await?,
            }
        }
        Ok::<(), Error>(())
    };
    if let Err(error) = work.await {
        tracing::warn!(%error, "leftovers of snapshots cannot be removed");
    }
}

impl Shared {
    async fn remove_unowned(&self, dir: PathBuf) -> Result<(), Error> {
        // Whoever has no snapshot yet may be saving the first one now.
        let rows = self.store.saved_snapshots(None).await?;
        let held_now: Vec<String> = {
            let locks = self.snapshots.locks.lock();
            locks
                .unwrap_or_else(PoisonError::into_inner)
                .keys()
                .cloned()
                .collect()
        };
        let mut busy = held_now.iter().chain(rows.iter().map(|row| &row.owner));
        if busy.any(|owner| self.snapshots.dir_of(owner) == dir) {
            return Ok(());
        }
        blocking(move || {
            std::fs::remove_dir_all(&dir).map_err(|source| SnapshotError::Io {
                operation: "remove",
                path: dir,
                source,
            })
        })
        .await
    }
}

fn dirty_dirs(dir: &Path) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(dir).into_iter().flatten().flatten();
    listed
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && Owner::is_dirty(path))
        .collect()
}

/// Mark and sweep over the chunks of one owner.
fn collect(mut held: Held, digests: HashSet<String>, dir: &Path) -> Result<(), SnapshotError> {
    let owner = &mut held.owner;
    owner.mark_dirty()?;
    owner.keep_roots(&digests)?;
    let mut live: HashSet<Hash> = HashSet::new();
    for digest in &digests {
        let root = Root::decode_checked(&owner.root(digest)?)?;
        live.extend(root.chunks()?);
        read_manifest(owner, &root, |_, entry| {
            live.extend(entry.chunks()?);
            Ok(())
        })?;
    }
    owner.collect(&live)?;
    owner.mark_clean()?;
    if digests.is_empty() {
        // Fails when something is in it after all.
        let _ = std::fs::remove_dir(dir);
    }
    Ok(())
}

/// What an earlier snapshot of the same sandbox knows; none when it cannot be read, which is no reason not to save.
fn known_of(owner: &mut Owner, digest: &str, sandbox: &str) -> Option<Known> {
    let root = Root::decode_checked(&owner.root(digest).ok()?).ok()?;
    (root.sandbox == sandbox)
        .then(|| Known::of(owner, &root).ok())
        .flatten()
}

/// Runs work on files in a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SnapshotError> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(Error::Stopping),
    }
}
