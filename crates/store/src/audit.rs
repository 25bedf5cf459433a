//! Who changed what, and whether it worked: the newest million rows.

use crate::{Store, StoreError};
use k8e_model::UnixMillis;
use sqlx::Row as _;

/// A row is some hundred bytes: with a million the database stays well under a gigabyte. Somebody
/// who wants to push his own deeds out has to make as many calls, at the rate that he is given.
pub const AUDIT_ROWS_MAX: i64 = 1_000_000;

/// Rows of one answer, and when nobody says.
const PAGE_ROWS_MAX: u32 = 10_000;
const PAGE_ROWS_DEFAULT: u32 = 100;

/// Old rows are removed when this many are too many, so not with every batch.
const TRIM_EVERY: i64 = 1000;

/// A call that changed something, or tried to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRow {
    /// When.
    pub at: UnixMillis,
    /// Who.
    pub principal: String,
    /// The id of the API key that it was made with, by itself or by a certificate; empty for none.
    pub key: String,
    /// From where: an IP address, or `uid:N` at the Unix socket; empty where nobody knows.
    pub source: String,
    /// What, in a word.
    pub action: String,
    /// To which session, key or secret.
    pub object: String,
    /// `ok`, or the error's code.
    pub code: String,
}

/// Which rows; none is any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditQuery {
    /// Of this principal.
    pub principal: Option<String>,
    /// From then on.
    pub since: Option<UnixMillis>,
    /// The newest so many; 0 is the default.
    pub limit: u32,
}

// === impl Store ===

impl Store {
    /// Writes rows down, in order, all or none, and forgets the oldest.
    pub async fn append_audit(&self, rows: &[AuditRow]) -> Result<(), StoreError> {
        let failed = || self.sql("write the audit");
        let mut transaction = self
            .shared
            .write
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(failed())?;
        let mut newest = 0;
        for row in rows {
            newest = sqlx::query(
                "INSERT INTO audit (at, principal, key, source, action, object, code) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING id",
            )
            .bind(row.at)
            .bind(&row.principal)
            .bind(&row.key)
            .bind(&row.source)
            .bind(&row.action)
            .bind(&row.object)
            .bind(&row.code)
            .fetch_one(&mut *transaction)
            .await
            .map_err(failed())?
            .get::<i64, _>(0);
        }
        let count = i64::try_from(rows.len()).unwrap_or(i64::MAX);
        if newest > AUDIT_ROWS_MAX && newest % TRIM_EVERY < count {
            sqlx::query("DELETE FROM audit WHERE id <= $1")
                .bind(newest - AUDIT_ROWS_MAX)
                .execute(&mut *transaction)
                .await
                .map_err(failed())?;
        }
        transaction.commit().await.map_err(failed())
    }

    /// The newest rows that fit, the oldest of them first.
    pub async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditRow>, StoreError> {
        let limit = match query.limit {
            0 => PAGE_ROWS_DEFAULT,
            limit => limit.min(PAGE_ROWS_MAX),
        };
        let rows = sqlx::query(
            "SELECT at, principal, key, source, action, object, code FROM audit \
             WHERE ($1 IS NULL OR principal = $1) AND ($2 IS NULL OR at >= $2) \
             ORDER BY id DESC LIMIT $3",
        )
        .bind(query.principal.as_deref())
        .bind(query.since)
        .bind(i64::from(limit))
        .fetch_all(&self.shared.read)
        .await
        .map_err(self.sql("read the audit"))?;
        let rows = rows.into_iter().rev().map(|row| AuditRow {
            at: row.get(0),
            principal: row.get(1),
            key: row.get(2),
            source: row.get(3),
            action: row.get(4),
            object: row.get(5),
            code: row.get(6),
        });
        Ok(rows.collect())
    }
}
