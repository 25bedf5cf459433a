//! API keys, stored as hashes, and revoked certificates.

use crate::{Store, StoreError};
use k8e_model::{KeyHash, KeyId, PrincipalName, Tenants, UnixMillis};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use std::collections::HashSet;
use std::fmt::Write as _;

/// The record of an API key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// Id of the key.
    pub id: KeyId,
    /// Unique name.
    pub name: PrincipalName,
    /// Principal that it authenticates.
    pub principal: PrincipalName,
    /// Tenants that it may create sessions for.
    pub tenants: Tenants,
    /// Hash of the key.
    pub hash: KeyHash,
    /// Time of creation.
    pub created_at: UnixMillis,
    /// Time of expiry; `None` is never.
    pub expires_at: Option<UnixMillis>,
    /// Time of the last call with it, to the minute.
    pub last_used: Option<UnixMillis>,
}

// === impl Store ===

impl Store {
    /// Inserts a key. Its name must be unused.
    pub async fn insert_key(&self, key: &KeyRecord) -> Result<(), StoreError> {
        let written = sqlx::query(
            "INSERT INTO api_keys (id, name, principal, hash, created_at, expires_at, last_used, tenants) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(key.id.as_str())
        .bind(key.name.as_str())
        .bind(key.principal.as_str())
        .bind(hex(&key.hash.0))
        .bind(key.created_at)
        .bind(key.expires_at)
        .bind(key.last_used)
        .bind(serde_json::json!(key.tenants.entries()).to_string())
        .execute(&self.shared.write)
        .await;
        match written {
            Ok(_) => Ok(()),
            Err(e) if crate::sessions::is_taken(&e) => {
                Err(StoreError::KeyExists(key.name.to_string()))
            }
            Err(e) => Err(self.sql("write an API key")(e)),
        }
    }

    /// All keys, oldest first. A damaged one is an error: taken for missing, it might be created again.
    pub async fn keys(&self) -> Result<Vec<KeyRecord>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, name, principal, hash, created_at, expires_at, last_used, tenants FROM api_keys \
             WHERE deleted_at IS NULL ORDER BY created_at, id",
        )
        .fetch_all(&self.shared.read)
        .await
        .map_err(self.sql("read the API keys"))?;
        rows.iter().map(read).collect()
    }

    /// Deletes a key. False when there is none.
    pub async fn delete_key(&self, id: &KeyId, at: UnixMillis) -> Result<bool, StoreError> {
        let done =
            sqlx::query("UPDATE api_keys SET deleted_at = $2 WHERE id = $1 AND deleted_at IS NULL")
                .bind(id.as_str())
                .bind(at)
                .execute(&self.shared.write)
                .await
                .map_err(self.sql("delete an API key"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Stores when a key was last used.
    pub async fn touch_key(&self, id: &KeyId, at: UnixMillis) -> Result<(), StoreError> {
        sqlx::query("UPDATE api_keys SET last_used = $2 WHERE id = $1")
            .bind(id.as_str())
            .bind(at)
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("write an API key's last use"))?;
        Ok(())
    }

    /// Revokes the certificate with this serial number.
    pub async fn revoke_certificate(&self, serial: &str, at: UnixMillis) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO revoked_certificates (serial, revoked_at) VALUES ($1, $2) \
             ON CONFLICT (serial) DO NOTHING",
        )
        .bind(serial)
        .bind(at)
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("revoke a certificate"))?;
        Ok(())
    }

    /// Serial numbers of certificates revoked since then; older revocations are removed.
    pub async fn revoked_certificates(
        &self,
        since: UnixMillis,
    ) -> Result<HashSet<String>, StoreError> {
        sqlx::query("DELETE FROM revoked_certificates WHERE revoked_at < $1")
            .bind(since)
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("forget old certificates"))?;
        let rows = sqlx::query("SELECT serial FROM revoked_certificates")
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("read the revoked certificates"))?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

fn read(row: &SqliteRow) -> Result<KeyRecord, StoreError> {
    let id: String = row.get("id");
    let bad = |what: &dyn std::fmt::Display| StoreError::KeyRecord {
        id: id.clone(),
        what: what.to_string(),
    };
    let text = |column: &str| row.try_get::<String, _>(column).map_err(|e| bad(&e));
    let hash = unhex(&text("hash")?).ok_or_else(|| bad(&"its hash is none"))?;
    let tenants: Option<String> = row.try_get("tenants").map_err(|e| bad(&e))?;
    let tenants = match tenants {
        None => Tenants::any(),
        Some(text) => {
            let entries: Vec<String> = serde_json::from_str(&text).map_err(|e| bad(&e))?;
            let tenants = Tenants::parse(&entries).map_err(|e| bad(&e))?;
            tenants.ok_or_else(|| bad(&"it has no tenant"))?
        }
    };
    Ok(KeyRecord {
        tenants,
        id: id.parse().map_err(|e| bad(&e))?,
        name: text("name")?.parse().map_err(|e| bad(&e))?,
        principal: text("principal")?.parse().map_err(|e| bad(&e))?,
        hash: KeyHash(hash),
        created_at: row.try_get("created_at").map_err(|e| bad(&e))?,
        expires_at: row.try_get("expires_at").map_err(|e| bad(&e))?,
        last_used: row.try_get("last_used").map_err(|e| bad(&e))?,
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes everything");
        text
    })
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}
