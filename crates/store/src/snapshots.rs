//! Snapshot registry: names, and the layers of each.

use crate::{Store, StoreError};
use k8e_model::{SnapshotLayers, SnapshotName, UnixMillis};
use sqlx::Row as _;

/// A snapshot without its layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotEntry {
    /// Name.
    pub name: SnapshotName,
    /// Number of layers.
    pub layers: usize,
    /// Time of the last put.
    pub updated_at: UnixMillis,
}

// === impl Store ===

impl Store {
    /// Inserts or replaces a snapshot. False when the owner has `max` already.
    pub async fn put_snapshot(
        &self,
        owner: &str,
        name: &SnapshotName,
        layers: &SnapshotLayers,
        at: UnixMillis,
        max: usize,
    ) -> Result<bool, StoreError> {
        let layers = serde_json::to_string(layers).map_err(|e| damaged(name.as_str(), &e))?;
        let done = sqlx::query(
            "INSERT INTO snapshots (owner, name, layers, updated_at) SELECT $1, $2, $3, $4 \
             WHERE NOT EXISTS (SELECT 1 FROM workspace_snapshots WHERE owner = $1 AND name = $2) \
               AND ((SELECT COUNT(*) FROM snapshots WHERE owner = $1) < $5 \
                OR EXISTS (SELECT 1 FROM snapshots WHERE owner = $1 AND name = $2)) \
             ON CONFLICT (owner, name) DO UPDATE SET layers = $3, updated_at = $4",
        )
        .bind(owner)
        .bind(name.as_str())
        .bind(layers)
        .bind(at)
        .bind(i64::try_from(max).unwrap_or(i64::MAX))
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("write a snapshot"))?;
        Ok(done.rows_affected() > 0)
    }

    /// The layers of an owner's snapshot.
    pub async fn snapshot(
        &self,
        owner: &str,
        name: &SnapshotName,
    ) -> Result<Option<SnapshotLayers>, StoreError> {
        let row = sqlx::query("SELECT layers FROM snapshots WHERE owner = $1 AND name = $2")
            .bind(owner)
            .bind(name.as_str())
            .fetch_optional(&self.shared.read)
            .await
            .map_err(self.sql("read a snapshot"))?;
        let Some(row) = row else { return Ok(None) };
        let layers: String = row.try_get(0).map_err(|e| damaged(name.as_str(), &e))?;
        let layers = serde_json::from_str(&layers).map_err(|e| damaged(name.as_str(), &e))?;
        Ok(Some(layers))
    }

    /// Snapshots of an owner, by name. The engine bounds their number.
    pub async fn snapshots(&self, owner: &str) -> Result<Vec<SnapshotEntry>, StoreError> {
        let rows = sqlx::query(
            "SELECT name, json_array_length(layers), updated_at FROM snapshots WHERE owner = $1 ORDER BY name",
        )
        .bind(owner)
        .fetch_all(&self.shared.read)
        .await
        .map_err(self.sql("list snapshots"))?;
        let entries = rows.iter().map(|row| {
            let name: String = row.try_get(0).map_err(|e| damaged("?", &e))?;
            let bad = |what: &dyn std::fmt::Display| damaged(&name, what);
            let layers: i64 = row.try_get(1).map_err(|e| bad(&e))?;
            Ok(SnapshotEntry {
                layers: usize::try_from(layers).map_err(|e| bad(&e))?,
                updated_at: row.try_get(2).map_err(|e| bad(&e))?,
                name: name.parse().map_err(|e| bad(&e))?,
            })
        });
        entries.collect()
    }

    /// Removes a snapshot of an owner. False when there is none.
    pub async fn delete_snapshot(
        &self,
        owner: &str,
        name: &SnapshotName,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query("DELETE FROM snapshots WHERE owner = $1 AND name = $2")
            .bind(owner)
            .bind(name.as_str())
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("delete a snapshot"))?;
        Ok(done.rows_affected() > 0)
    }
}

fn damaged(name: &str, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::SnapshotRecord {
        name: name.to_owned(),
        what: what.to_string(),
    }
}
