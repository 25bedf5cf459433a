//! Approval requests and decisions. Expiry is not stored: it follows from the time and the phase of the session.

use crate::{Store, StoreError};
use k8e_model::{
    Approval, ApprovalDecision, ApprovalId, ApprovalParty, ApprovalState, SessionId, UnixMillis,
};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

/// Retention: approvals kept of one session, decided and expired ones included. Enough to look back on a day; a session
/// that asks in a loop must not fill the disk. A row is 6 KiB at most.
pub const APPROVALS_KEPT_MAX: usize = 128;

/// Rows of one listing: more than a person reads.
const LIST_MAX: i64 = 1000;

const COLUMNS: &str = "a.id, a.session, a.owner, a.action, a.asked_at, a.asked_by, a.asked_with, \
     a.expires_at, a.decision, a.decided_at, a.decided_by, a.decided_with, a.reason, s.phase";

/// SQL condition: the session has not ended, so that a decision still matters.
const SESSION_LIVES: &str = "s.phase NOT IN ('terminating', 'ended')";

/// Filter for listing approvals; `None` is any.
#[derive(Clone, Debug, Default)]
pub struct ApprovalQuery {
    /// Of this owner.
    pub owner: Option<String>,
    /// Of this session.
    pub session: Option<SessionId>,
    /// Include decided and expired ones.
    pub all: bool,
}

// === impl Store ===

impl Store {
    /// Inserts a request, unless its session has `pending_max` pending ones. The oldest decided or expired ones are removed
    /// when there are too many.
    pub async fn insert_approval(
        &self,
        approval: &Approval,
        pending_max: usize,
    ) -> Result<bool, StoreError> {
        let failed = || self.sql("write an approval");
        let mut transaction = self
            .shared
            .write
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(failed())?;
        let pending: i64 = sqlx::query(
            "SELECT COUNT(*) FROM approvals \
             WHERE session = $1 AND decision IS NULL AND expires_at > $2",
        )
        .bind(approval.session.as_str())
        .bind(approval.asked_at)
        .fetch_one(&mut *transaction)
        .await
        .map_err(failed())?
        .get(0);
        if usize::try_from(pending).unwrap_or(usize::MAX) >= pending_max {
            return Ok(false);
        }
        sqlx::query(
            "DELETE FROM approvals WHERE id IN (SELECT id FROM approvals WHERE session = $1 \
             ORDER BY (decision IS NULL AND expires_at > $2) DESC, asked_at DESC, rowid DESC \
             LIMIT -1 OFFSET $3)",
        )
        .bind(approval.session.as_str())
        .bind(approval.asked_at)
        .bind(i64::try_from(APPROVALS_KEPT_MAX - 1).unwrap_or(i64::MAX))
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        sqlx::query(
            "INSERT INTO approvals (id, session, owner, action, asked_at, asked_by, asked_with, expires_at) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(approval.id.as_str())
        .bind(approval.session.as_str())
        .bind(&approval.owner)
        .bind(approval.action.as_str())
        .bind(approval.asked_at)
        .bind(&approval.asked_by.principal)
        .bind(approval.asked_by.proof.to_string())
        .bind(approval.expires_at)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        transaction.commit().await.map_err(failed())?;
        Ok(true)
    }

    /// One approval, if it belongs to that owner, in its state at `now`. Another owner's is not read, so that its existence
    /// does not show in the response time.
    pub async fn approval(
        &self,
        id: &ApprovalId,
        owner: Option<&str>,
        now: UnixMillis,
    ) -> Result<Option<Approval>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM approvals a JOIN sessions s ON s.id = a.session \
             WHERE a.id = $1 AND ($2 IS NULL OR a.owner = $2)"
        );
        let row = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(id.as_str())
            .bind(owner)
            .fetch_optional(&self.shared.read)
            .await
            .map_err(self.sql("read an approval"))?;
        row.as_ref().map(|row| read(row, now)).transpose()
    }

    /// Approvals by query, the oldest first, a bounded number. Damaged ones are left out.
    pub async fn approvals(
        &self,
        query: &ApprovalQuery,
        now: UnixMillis,
    ) -> Result<Vec<Approval>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM approvals a JOIN sessions s ON s.id = a.session \
             WHERE ($1 IS NULL OR a.owner = $1) AND ($2 IS NULL OR a.session = $2) \
               AND ($3 OR (a.decision IS NULL AND a.expires_at > $4 AND {SESSION_LIVES})) \
             ORDER BY a.asked_at, a.rowid LIMIT {LIST_MAX}"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(query.owner.as_deref())
            .bind(query.session.as_ref().map(SessionId::as_str))
            .bind(query.all)
            .bind(now)
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list approvals"))?;
        let readable = |row: &SqliteRow| {
            read(row, now)
                .inspect_err(|error| tracing::error!("{error}: it is left out"))
                .ok()
        };
        Ok(rows.iter().filter_map(readable).collect())
    }

    /// Stores a decision. False when there is one already, or the request has expired.
    pub async fn decide_approval(
        &self,
        id: &ApprovalId,
        decision: &ApprovalDecision,
    ) -> Result<bool, StoreError> {
        let sql = format!(
            "UPDATE approvals SET decision = $2, decided_at = $3, decided_by = $4, decided_with = $5, reason = $6 \
             WHERE id = $1 AND decision IS NULL AND expires_at > $3 \
               AND EXISTS (SELECT 1 FROM sessions s WHERE s.id = approvals.session AND {SESSION_LIVES})"
        );
        let done = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(id.as_str())
            .bind(decision.as_str())
            .bind(decision.at)
            .bind(&decision.by.principal)
            .bind(decision.by.proof.to_string())
            .bind(decision.reason.as_str())
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("write a decision"))?;
        Ok(done.rows_affected() > 0)
    }
}

fn read(row: &SqliteRow, now: UnixMillis) -> Result<Approval, StoreError> {
    let id: String = row.try_get("id").map_err(|e| damaged("?", &e))?;
    let bad = |what: &dyn std::fmt::Display| damaged(&id, what);
    let text = |column: &str| row.try_get::<String, _>(column).map_err(|e| bad(&e));
    let time = |column: &str| row.try_get::<i64, _>(column).map_err(|e| bad(&e));
    let party = |who: &str, with: &str| {
        Ok(ApprovalParty {
            principal: text(who)?,
            proof: text(with)?.parse().map_err(|e| bad(&e))?,
        })
    };
    let decision: Option<String> = row.try_get("decision").map_err(|e| bad(&e))?;
    let over = matches!(text("phase")?.as_str(), "terminating" | "ended");
    let expires_at = time("expires_at")?;
    let state = match decision.as_deref() {
        Some(word @ ("approved" | "rejected")) => {
            ApprovalState::Decided(Box::new(ApprovalDecision {
                approved: word == "approved",
                reason: text("reason")?.try_into().map_err(|e| bad(&e))?,
                by: party("decided_by", "decided_with")?,
                at: time("decided_at")?,
            }))
        }
        Some(_) => return Err(bad(&"an unknown decision")),
        None if over || expires_at <= now => ApprovalState::Expired,
        None => ApprovalState::Pending,
    };
    Ok(Approval {
        session: text("session")?.parse().map_err(|e| bad(&e))?,
        owner: text("owner")?,
        action: text("action")?.try_into().map_err(|e| bad(&e))?,
        asked_by: party("asked_by", "asked_with")?,
        asked_at: time("asked_at")?,
        expires_at,
        state,
        id: id.parse().map_err(|e| bad(&e))?,
    })
}

fn damaged(id: &str, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::ApprovalRecord {
        id: id.to_owned(),
        what: what.to_string(),
    }
}
