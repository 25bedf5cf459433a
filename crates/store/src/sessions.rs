//! Session records: one row each, written before a sandbox exists and kept a while after it is gone.

use crate::{Store, StoreError};
use k8e_model::{
    Env, Labels, Lifetime, Limits, Phase, Session, SessionId, Template, TenantId, UnixMillis,
};
use serde::{Deserialize, Serialize};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

/// Rows of one listing: as many as a person or a script can use, few enough to hold.
const LIST_MAX: i64 = 10_000;

const COLUMNS: &str =
    "id, owner, tenant, phase, reason, runtime, sandbox, created_at, last_used, spec";

/// Which sessions to list; none is any.
#[derive(Clone, Debug, Default)]
pub struct SessionQuery {
    /// Of this owner.
    pub owner: Option<String>,
    /// Of this tenant.
    pub tenant: Option<TenantId>,
    /// In this phase.
    pub phase: Option<Phase>,
}

/// The part of a record that nothing is looked up by.
#[derive(Serialize, Deserialize)]
struct Spec {
    template: Template,
    env: Env,
    labels: Labels,
    limits: Limits,
    lifetime: Lifetime,
}

// === impl Store ===

impl Store {
    /// Writes a new record down. One of an ended session with the same id is replaced, with all of its history.
    pub async fn insert_session(&self, session: &Session) -> Result<(), StoreError> {
        let failed = || self.sql("write a session");
        let mut transaction = self
            .shared
            .write
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(failed())?;
        let replaced = sqlx::query("DELETE FROM sessions WHERE id = $1 AND phase = 'ended'")
            .bind(session.id.as_str())
            .execute(&mut *transaction)
            .await
            .map_err(failed())?
            .rows_affected()
            > 0;
        let spec = Spec {
            template: session.template.clone(),
            env: session.env.clone(),
            labels: session.labels.clone(),
            limits: session.limits,
            lifetime: session.lifetime,
        };
        let spec = serde_json::to_string(&spec).map_err(|e| damaged(session.id.as_str(), &e))?;
        let insert = sqlx::query(
            "INSERT INTO sessions (id, owner, tenant, phase, reason, runtime, sandbox, created_at, last_used, spec) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        )
        .bind(session.id.as_str())
        .bind(&session.owner)
        .bind(session.tenant.as_str())
        .bind(session.phase.as_str())
        .bind(&session.reason)
        .bind(session.runtime.as_str())
        .bind(session.sandbox.as_str())
        .bind(session.created_at)
        .bind(session.last_used)
        .bind(spec)
        .execute(&mut *transaction)
        .await;
        match insert {
            Ok(_) => {}
            Err(e)
                if e.as_database_error()
                    .is_some_and(|e| e.is_unique_violation()) =>
            {
                return Err(StoreError::Exists(session.id.to_string()));
            }
            Err(e) => return Err(failed()(e)),
        }
        transaction.commit().await.map_err(failed())?;
        if replaced {
            self.remove_transcript(&session.id).await?;
        }
        Ok(())
    }

    /// Moves a session on. Phases only go forward: false when it is already there or further, or not known.
    pub async fn set_phase(
        &self,
        id: &SessionId,
        phase: Phase,
        reason: &str,
        at: UnixMillis,
    ) -> Result<bool, StoreError> {
        let sql = match phase {
            Phase::Creating => return Ok(false),
            Phase::Active => {
                "UPDATE sessions SET phase = $2, reason = $3, ended_at = $4 WHERE id = $1 AND phase = 'creating'"
            }
            Phase::Terminating => {
                "UPDATE sessions SET phase = $2, reason = $3, ended_at = $4 \
                 WHERE id = $1 AND phase IN ('creating', 'active')"
            }
            Phase::Ended => {
                "UPDATE sessions SET phase = $2, reason = $3, ended_at = $4 WHERE id = $1 AND phase <> 'ended'"
            }
        };
        let done = sqlx::query(sql)
            .bind(id.as_str())
            .bind(phase.as_str())
            .bind(reason)
            .bind((phase == Phase::Ended).then_some(at))
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("write a session's phase"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Writes down when a session was last used.
    pub async fn touch_session(
        &self,
        id: &SessionId,
        last_used: UnixMillis,
    ) -> Result<(), StoreError> {
        sqlx::query("UPDATE sessions SET last_used = $2 WHERE id = $1 AND last_used < $2")
            .bind(id.as_str())
            .bind(last_used)
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("write a session's last use"))?;
        Ok(())
    }

    /// One record.
    pub async fn session(&self, id: &SessionId) -> Result<Option<Session>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM sessions WHERE id = $1");
        let row = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(id.as_str())
            .fetch_optional(&self.shared.read)
            .await
            .map_err(self.sql("read a session"))?;
        row.as_ref().map(read).transpose()
    }

    /// Records by query, the newest first, a bounded number.
    pub async fn sessions(&self, query: &SessionQuery) -> Result<Vec<Session>, StoreError> {
        let condition = "($1 IS NULL OR owner = $1) AND ($2 IS NULL OR tenant = $2) AND ($3 IS NULL OR phase = $3)";
        self.select(condition, query, LIST_MAX).await
    }

    /// Every record of a session that is not over; how many there may be is admission's to bound.
    pub async fn unended_sessions(&self) -> Result<Vec<Session>, StoreError> {
        let condition = "phase <> 'ended' AND ($1 IS NULL OR $2 IS NULL OR $3 IS NULL)";
        self.select(condition, &SessionQuery::default(), i64::MAX)
            .await
    }

    /// The newest active session of an owner's tenant.
    pub async fn active_session(
        &self,
        owner: &str,
        tenant: &TenantId,
    ) -> Result<Option<Session>, StoreError> {
        let query = SessionQuery {
            owner: Some(owner.to_owned()),
            tenant: Some(tenant.clone()),
            phase: Some(Phase::Active),
        };
        Ok(self.sessions(&query).await?.into_iter().next())
    }

    /// Removes the records of sessions that ended before `before`, with their events and transcripts.
    pub async fn purge_ended(&self, before: UnixMillis) -> Result<Vec<SessionId>, StoreError> {
        let rows = sqlx::query(
            "DELETE FROM sessions WHERE phase = 'ended' AND ended_at < $1 RETURNING id",
        )
        .bind(before)
        .fetch_all(&self.shared.write)
        .await
        .map_err(self.sql("remove old sessions"))?;
        let mut purged = Vec::new();
        for row in rows {
            let id: String = row.get(0);
            let id: SessionId = id.parse().map_err(|e| damaged(&id, &e))?;
            self.remove_transcript(&id).await?;
            purged.push(id);
        }
        Ok(purged)
    }

    async fn select(
        &self,
        condition: &'static str,
        query: &SessionQuery,
        most: i64,
    ) -> Result<Vec<Session>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sessions WHERE {condition} ORDER BY created_at DESC, id LIMIT $4"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(query.owner.as_deref())
            .bind(query.tenant.as_ref().map(TenantId::as_str))
            .bind(query.phase.map(Phase::as_str))
            .bind(most)
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list sessions"))?;
        rows.iter().map(read).collect()
    }
}

fn read(row: &SqliteRow) -> Result<Session, StoreError> {
    let id: String = row.get("id");
    let bad = |what: &dyn std::fmt::Display| damaged(&id, what);
    let text = |column: &str| row.get::<String, _>(column);
    let spec: Spec = serde_json::from_str(&text("spec")).map_err(|e| bad(&e))?;
    Ok(Session {
        id: id.parse().map_err(|e| bad(&e))?,
        owner: text("owner"),
        tenant: text("tenant").parse().map_err(|e| bad(&e))?,
        phase: text("phase").parse().map_err(|e| bad(&e))?,
        reason: text("reason"),
        runtime: text("runtime").parse().map_err(|e| bad(&e))?,
        sandbox: text("sandbox").parse().map_err(|e| bad(&e))?,
        template: spec.template,
        env: spec.env,
        labels: spec.labels,
        limits: spec.limits,
        lifetime: spec.lifetime,
        created_at: row.get("created_at"),
        last_used: row.get("last_used"),
    })
}

fn damaged(session: &str, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::Record {
        session: session.to_owned(),
        what: what.to_string(),
    }
}
