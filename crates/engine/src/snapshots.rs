//! The snapshot registry: which layers a name stands for. Each owner has its own names; the layers'
//! bytes are with whoever made them.

use crate::recorder::now_ms;
use crate::{Error, Sessions};
use k8e_model::{Principal, SnapshotLayers, SnapshotName};
use k8e_store::SnapshotEntry;

/// Of one owner: each is at most 68 KiB.
const SNAPSHOTS_PER_OWNER_MAX: usize = 1000;

// === impl Sessions ===

impl Sessions {
    /// Registers a snapshot of the caller's, in place of one of that name.
    pub async fn put_snapshot(
        &self,
        who: &Principal,
        name: &SnapshotName,
        layers: &SnapshotLayers,
    ) -> Result<(), Error> {
        let audit = self.audited(who, "snapshot.put", name.as_str());
        let put = async {
            let max = SNAPSHOTS_PER_OWNER_MAX;
            let store = &self.shared.store;
            match store
                .put_snapshot(who.name(), name, layers, now_ms(), max)
                .await?
            {
                true => Ok(()),
                false => Err(Error::SnapshotsFull { max }),
            }
        };
        audit.end(put.await)
    }

    /// The layers of a snapshot of the caller's.
    pub async fn get_snapshot(
        &self,
        who: &Principal,
        name: &SnapshotName,
    ) -> Result<SnapshotLayers, Error> {
        let found = self.shared.store.snapshot(who.name(), name).await?;
        found.ok_or_else(|| Error::SnapshotNotFound(name.clone()))
    }

    /// The caller's snapshots, by name.
    pub async fn list_snapshots(&self, who: &Principal) -> Result<Vec<SnapshotEntry>, Error> {
        Ok(self.shared.store.snapshots(who.name()).await?)
    }

    /// Forgets a snapshot of the caller's.
    pub async fn delete_snapshot(&self, who: &Principal, name: &SnapshotName) -> Result<(), Error> {
        let audit = self.audited(who, "snapshot.delete", name.as_str());
        let delete = async {
            let store = &self.shared.store;
            match store.delete_snapshot(who.name(), name).await? {
                true => Ok(()),
                false => Err(Error::SnapshotNotFound(name.clone())),
            }
        };
        audit.end(delete.await)
    }
}
