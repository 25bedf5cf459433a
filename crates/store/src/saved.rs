//! Saved workspaces: names, and the roots that they stand for.

use crate::{Store, StoreError};
use k8e_model::{SnapshotName, UnixMillis};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

const COLUMNS: &str =
    "owner, name, tenant, digest, session, entries, files, bytes, stored_bytes, created_at";

/// The row of a saved workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedSnapshot {
    /// Whose it is.
    pub owner: String,
    /// Its name; each owner has its own.
    pub name: SnapshotName,
    /// Tenant of the session it was saved from, or of who imported it.
    pub tenant: String,
    /// Names its root.
    pub digest: String,
    /// The session it was saved from; empty when it was imported.
    pub session: String,
    /// Files, directories and links.
    pub entries: u64,
    /// Regular files.
    pub files: u64,
    /// Bytes of these files.
    pub bytes: u64,
    /// Bytes on disk of its chunks, also of shared ones.
    pub stored_bytes: u64,
    /// When it was saved.
    pub created_at: UnixMillis,
}

// === impl Store ===

impl Store {
    /// Inserts a saved workspace, or replaces one of that name. False when the name is another snapshot's and
    /// `replace` is not set, or is in the registry of layers.
    pub async fn put_saved_snapshot(
        &self,
        saved: &SavedSnapshot,
        replace: bool,
    ) -> Result<bool, StoreError> {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let statement = format!(
            "INSERT INTO workspace_snapshots ({COLUMNS}) SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10 \
             WHERE NOT EXISTS (SELECT 1 FROM snapshots WHERE owner = $1 AND name = $2) \
               AND ($11 OR NOT EXISTS (SELECT 1 FROM workspace_snapshots WHERE owner = $1 AND name = $2)) \
             ON CONFLICT (owner, name) DO UPDATE SET tenant = $3, digest = $4, session = $5, entries = $6, \
             files = $7, bytes = $8, stored_bytes = $9, created_at = $10"
        );
        let done = sqlx::query(sqlx::AssertSqlSafe(statement))
            .bind(&saved.owner)
            .bind(saved.name.as_str())
            .bind(&saved.tenant)
            .bind(&saved.digest)
            .bind(&saved.session)
            .bind(number(saved.entries))
            .bind(number(saved.files))
            .bind(number(saved.bytes))
            .bind(number(saved.stored_bytes))
            .bind(saved.created_at)
            .bind(replace)
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("write a saved workspace"))?;
        Ok(done.rows_affected() > 0)
    }

    /// A saved workspace of an owner.
    pub async fn saved_snapshot(
        &self,
        owner: &str,
        name: &SnapshotName,
    ) -> Result<Option<SavedSnapshot>, StoreError> {
        let statement =
            format!("SELECT {COLUMNS} FROM workspace_snapshots WHERE owner = $1 AND name = $2");
        let row = sqlx::query(sqlx::AssertSqlSafe(statement))
            .bind(owner)
            .bind(name.as_str())
            .fetch_optional(&self.shared.read)
            .await
            .map_err(self.sql("read a saved workspace"))?;
        row.as_ref().map(parse).transpose()
    }

    /// Saved workspaces of an owner, or of all, by name. The engine bounds the number of each owner's.
    pub async fn saved_snapshots(
        &self,
        owner: Option<&str>,
    ) -> Result<Vec<SavedSnapshot>, StoreError> {
        let statement = format!(
            "SELECT {COLUMNS} FROM workspace_snapshots WHERE $1 IS NULL OR owner = $1 ORDER BY name"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(statement))
            .bind(owner)
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list saved workspaces"))?;
        rows.iter().map(parse).collect()
    }

    /// Bytes on disk of the saved workspaces of a tenant, each counted as if it shared nothing.
    pub async fn saved_bytes_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        let statement =
            "SELECT COALESCE(SUM(stored_bytes), 0) FROM workspace_snapshots WHERE tenant = $1";
        let row = sqlx::query(statement)
            .bind(tenant)
            .fetch_one(&self.shared.read)
            .await
            .map_err(self.sql("count saved workspaces"))?;
        let bytes: i64 = row.try_get(0).map_err(|e| damaged("?", &e))?;
        Ok(bytes.max(0).unsigned_abs())
    }

    /// Removes a saved workspace of an owner. False when there is none.
    pub async fn delete_saved_snapshot(
        &self,
        owner: &str,
        name: &SnapshotName,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query("DELETE FROM workspace_snapshots WHERE owner = $1 AND name = $2")
            .bind(owner)
            .bind(name.as_str())
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("delete a saved workspace"))?;
        Ok(done.rows_affected() > 0)
    }
}

fn parse(row: &SqliteRow) -> Result<SavedSnapshot, StoreError> {
    let name: String = row.try_get(1).map_err(|e| damaged("?", &e))?;
    let bad = |what: &dyn std::fmt::Display| damaged(&name, what);
    let text = |at: usize| row.try_get::<String, _>(at).map_err(|e| bad(&e));
    let number = |at: usize| {
        let number: i64 = row.try_get(at).map_err(|e| bad(&e))?;
        u64::try_from(number).map_err(|e| bad(&e))
    };
    Ok(SavedSnapshot {
        owner: text(0)?,
        name: name.parse().map_err(|e| bad(&e))?,
        tenant: text(2)?,
        digest: text(3)?,
        session: text(4)?,
        entries: number(5)?,
        files: number(6)?,
        bytes: number(7)?,
        stored_bytes: number(8)?,
        created_at: row.try_get(9).map_err(|e| bad(&e))?,
    })
}

fn damaged(name: &str, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::SnapshotRecord {
        name: name.to_owned(),
        what: what.to_string(),
    }
}
