//! Audit log: calls that change something, with principal and result; the newest million rows.

use crate::{Store, StoreError};
use k8e_model::UnixMillis;
use sqlx::Row as _;

/// Retention: number of rows. A row is some hundred bytes, so that the database stays well under a gigabyte; to push a row
/// out, a client has to make as many calls, at its rate limit.
pub const AUDIT_ROWS_MAX: i64 = 1_000_000;

/// Rows of one page: the bound, and the default.
const PAGE_ROWS_MAX: u32 = 10_000;
const PAGE_ROWS_DEFAULT: u32 = 100;

/// Old rows are removed in batches of this size, not with every insert.
const TRIM_EVERY: i64 = 1000;

/// A call that changed something, or failed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRow {
    /// Time of the call.
    pub at: UnixMillis,
    /// Principal that made the call.
    pub principal: String,
    /// Id of the API key that authenticated the call, directly or by a certificate; empty for none.
    pub key: String,
    /// Source: an IP address, or `uid:N` for the Unix socket; empty when unknown.
    pub source: String,
    /// Action, as `run` or `session.create`.
    pub action: String,
    /// Object: the session, key or secret.
    pub object: String,
    /// Result: `ok`, or an error code.
    pub code: String,
}

/// Filter for reading; `None` is any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditQuery {
    /// Of this principal.
    pub principal: Option<String>,
    /// Only rows since this time.
    pub since: Option<UnixMillis>,
    /// Number of newest rows; 0 is the default.
    pub limit: u32,
}

// === impl Store ===

impl Store {
    /// Inserts rows in order, in one transaction, and applies the retention.
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

    /// The newest rows that match, oldest first.
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
