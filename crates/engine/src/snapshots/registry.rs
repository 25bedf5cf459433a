//! The registry of `sandbox.v1` clients: names, and layers that the clients store. A saved workspace shows as one layer,
//! its digest.

use crate::recorder::now_ms;
use crate::{Error, Sessions};
use k8e_model::{Principal, SnapshotLayers, SnapshotName};
use k8e_store::SnapshotEntry;

// === impl Sessions ===

impl Sessions {
    /// Registers one of the caller's snapshots; replaces one of that name. The digest of one of the caller's saved
    /// workspaces, as its only layer, gives that workspace another name.
    pub async fn put_snapshot(
        &self,
        who: &Principal,
        name: &SnapshotName,
        layers: &SnapshotLayers,
    ) -> Result<(), Error> {
        let audit = self.audited(who, "snapshot.put", name.as_str());
        audit.end(self.put_registered(who, name, layers).await)
    }

    async fn put_registered(
        &self,
        who: &Principal,
        name: &SnapshotName,
        layers: &SnapshotLayers,
    ) -> Result<(), Error> {
        let (store, max) = (
            &self.shared.store,
            self.shared.config.snapshots_per_owner_max,
        );
        let saved = store.saved_snapshots(Some(who.name())).await?;
        if saved.iter().any(|saved| saved.name == *name) {
            return Err(Error::SnapshotNameTaken(name.clone()));
        }
        let listed: Vec<String> = layers.clone().into();
        let same = saved.iter().find(|saved| listed == [saved.digest.clone()]);
        if let Some(same) = same {
            if saved.len() >= max {
                return Err(Error::SnapshotsFull { max });
            }
            let mut named = same.clone();
            named.name = name.clone();
            // Nobody deletes what it stands for meanwhile.
            let _held = self.shared.hold(who.name(), true).await?;
            self.saved_snapshot(who, &same.name).await?;
            return match store.put_saved_snapshot(&named, false).await? {
                true => Ok(()),
                false => Err(Error::SnapshotNameTaken(name.clone())),
            };
        }
        match store
            .put_snapshot(who.name(), name, layers, now_ms(), max)
            .await?
        {
            true => Ok(()),
            false => Err(Error::SnapshotsFull { max }),
        }
    }

    /// The layers of one of the caller's snapshots.
    pub async fn get_snapshot(
        &self,
        who: &Principal,
        name: &SnapshotName,
    ) -> Result<SnapshotLayers, Error> {
        if let Some(layers) = self.shared.store.snapshot(who.name(), name).await? {
            return Ok(layers);
        }
        let saved = self.saved_snapshot(who, name).await?;
        SnapshotLayers::try_from(vec![saved.digest]).map_err(|error| Error::Invalid(error.message))
    }

    /// The caller's snapshots, saved and registered, by name.
    pub async fn list_snapshots(&self, who: &Principal) -> Result<Vec<SnapshotEntry>, Error> {
        let mut listed = self.shared.store.snapshots(who.name()).await?;
        let saved = self.saved_snapshots(who).await?.into_iter();
        listed.extend(saved.map(|saved| SnapshotEntry {
            name: saved.name,
            layers: 1,
            updated_at: saved.created_at,
        }));
        listed.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(listed)
    }
}
