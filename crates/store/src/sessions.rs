//! Session records: one row each, inserted before the sandbox exists and kept for a while after it is removed.

use crate::{Store, StoreError};
use k8e_model::{
    EgressPolicy, Env, Image, Labels, Lifetime, Limits, Phase, SandboxId, SecretRefs, Session,
    SessionId, SubAgent, Template, TenantId, UnixMillis,
};
use serde::{Deserialize, Serialize};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row as _, Sqlite};
use std::collections::HashSet;

/// Rows of one listing: as many as a person or a script can use, few enough to hold.
const LIST_MAX: i64 = 10_000;

const COLUMNS: &str = "id, owner, tenant, origin, client, phase, reason, runtime, sandbox, created_at, last_used, spec, egress";

/// Filter for listing sessions; `None` is any.
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
    /// References to secrets, without values. Records of older servers have none.
    #[serde(default)]
    secrets: SecretRefs,
    /// Parent and working directory of a sub-agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sub_agent: Option<SubAgent>,
    /// Of one whose template is an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image: Option<Image>,
}

/// A record with its JSON part serialized.
struct Row<'a> {
    session: &'a Session,
    spec: String,
    egress: String,
}

// === impl Store ===

impl Store {
    /// Inserts a record. An ended session with the same id and owner is replaced, with its history; one of another owner is
    /// not, so that its state is not revealed.
    pub async fn insert_session(&self, session: &Session) -> Result<(), StoreError> {
        let spec = Spec {
            template: session.template.clone(),
            env: session.env.clone(),
            labels: session.labels.clone(),
            limits: session.limits,
            lifetime: session.lifetime,
            secrets: session.secrets.clone(),
            sub_agent: session.sub_agent.clone(),
            image: session.image.clone(),
        };
        let bad = |e| damaged(session.id.as_str(), &e);
        let row = Row {
            session,
            spec: serde_json::to_string(&spec).map_err(bad)?,
            egress: serde_json::to_string(&session.egress).map_err(bad)?,
        };
        // Nearly every name is new, and one statement is a transaction by itself.
        match row.insert().execute(&self.shared.write).await {
            Ok(_) => Ok(()),
            Err(e) if is_taken(&e) => self.replace_session(&row).await,
            Err(e) => Err(self.sql("write a session")(e)),
        }
    }

    async fn replace_session(&self, row: &Row<'_>) -> Result<(), StoreError> {
        let session = row.session;
        let failed = || self.sql("write a session");
        let mut transaction = self
            .shared
            .write
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(failed())?;
        let replaced = sqlx::query(
            "DELETE FROM sessions WHERE id = $1 AND owner = $2 AND phase = 'ended' RETURNING sandbox",
        )
        .bind(session.id.as_str())
        .bind(&session.owner)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(failed())?;
        match row.insert().execute(&mut *transaction).await {
            Ok(_) => {}
            Err(e) if is_taken(&e) => return Err(StoreError::Exists(session.id.to_string())),
            Err(e) => return Err(failed()(e)),
        }
        transaction.commit().await.map_err(failed())?;
        if let Some(row) = replaced {
            self.drop_transcript(&row).await;
        }
        Ok(())
    }

    /// Sets the phase of a session; pausing is [`Store::set_paused`]. Phases only go forward: false when it is in that phase
    /// or a later one, or unknown.
    pub async fn set_phase(
        &self,
        id: &SessionId,
        phase: Phase,
        reason: &str,
        at: UnixMillis,
    ) -> Result<bool, StoreError> {
        let sql = match phase {
            Phase::Creating | Phase::Paused => return Ok(false),
            Phase::Active => {
                "UPDATE sessions SET phase = $2, reason = $3, ended_at = $4 WHERE id = $1 AND phase = 'creating'"
            }
            Phase::Terminating => {
                "UPDATE sessions SET phase = $2, reason = $3, ended_at = $4 \
                 WHERE id = $1 AND phase IN ('creating', 'active', 'paused')"
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

    /// Sets a session and its sub-agents to paused, or back to active, in one transaction. False when it is unknown, or in
    /// another phase.
    pub async fn set_paused(&self, id: &SessionId, paused: bool) -> Result<bool, StoreError> {
        let (from, to) = match paused {
            true => (Phase::Active, Phase::Paused),
            false => (Phase::Paused, Phase::Active),
        };
        let done = sqlx::query(
            "UPDATE sessions SET phase = $3 WHERE (id = $1 OR parent = $1) AND phase = $2 \
             AND EXISTS (SELECT 1 FROM sessions WHERE id = $1 AND phase = $2)",
        )
        .bind(id.as_str())
        .bind(from.as_str())
        .bind(to.as_str())
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("write a session's phase"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Stores when a session was last used.
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

    /// Stores the egress allow-list of a session. False when it has ended or is unknown.
    pub async fn set_egress(
        &self,
        id: &SessionId,
        egress: &EgressPolicy,
    ) -> Result<bool, StoreError> {
        let egress = serde_json::to_string(egress).map_err(|e| damaged(id.as_str(), &e))?;
        let done =
            sqlx::query("UPDATE sessions SET egress = $2 WHERE id = $1 AND phase <> 'ended'")
                .bind(id.as_str())
                .bind(egress)
                .execute(&self.shared.write)
                .await
                .map_err(self.sql("write what a session may reach"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Stores the TTL and idle timeout of a session. False when it has ended or is unknown.
    pub async fn set_lifetime(
        &self,
        id: &SessionId,
        lifetime: Lifetime,
    ) -> Result<bool, StoreError> {
        let lifetime = serde_json::to_string(&lifetime).map_err(|e| damaged(id.as_str(), &e))?;
        let done = sqlx::query(
            "UPDATE sessions SET spec = json_set(spec, '$.lifetime', json($2)) WHERE id = $1 AND phase <> 'ended'",
        )
        .bind(id.as_str())
        .bind(lifetime)
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("write a session's lifetime"))?;
        Ok(done.rows_affected() > 0)
    }

    /// One record.
    pub async fn session(&self, id: &SessionId) -> Result<Option<Session>, StoreError> {
        self.session_of(id, None).await
    }

    /// One record, if it belongs to that owner. Another owner's is not read, so that its existence does not show in the
    /// response time.
    pub async fn session_of(
        &self,
        id: &SessionId,
        owner: Option<&str>,
    ) -> Result<Option<Session>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM sessions WHERE id = $1 AND ($2 IS NULL OR owner = $2)");
        let row = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(id.as_str())
            .bind(owner)
            .fetch_optional(&self.shared.read)
            .await
            .map_err(self.sql("read a session"))?;
        row.as_ref().map(read).transpose()
    }

    /// Records by query, the newest first, a bounded number. Damaged ones are left out.
    pub async fn sessions(&self, query: &SessionQuery) -> Result<Vec<Session>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sessions \
             WHERE ($1 IS NULL OR owner = $1) AND ($2 IS NULL OR tenant = $2) AND ($3 IS NULL OR phase = $3) \
             ORDER BY created_at DESC, id LIMIT {LIST_MAX}"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(query.owner.as_deref())
            .bind(query.tenant.as_ref().map(TenantId::as_str))
            .bind(query.phase.map(Phase::as_str))
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list sessions"))?;
        Ok(rows.iter().filter_map(readable).collect())
    }

    /// All sessions that have not ended; the engine bounds their number. A damaged record is skipped, and marked as ended at
    /// `at`: it must not keep a server from starting.
    pub async fn unended_sessions(&self, at: UnixMillis) -> Result<Vec<Session>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sessions WHERE phase <> 'ended' ORDER BY created_at DESC, id"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list sessions"))?;
        let mut sessions = Vec::with_capacity(rows.len());
        for row in &rows {
            match readable(row) {
                Some(session) => sessions.push(session),
                None => self.end_damaged(row, at).await?,
            }
        }
        Ok(sessions)
    }

    async fn end_damaged(&self, row: &SqliteRow, at: UnixMillis) -> Result<(), StoreError> {
        // As it is in the row, whatever that is: it may be the id that is damaged.
        let Ok(id) = row.try_get_unchecked::<String, _>("id") else {
            return Ok(());
        };
        sqlx::query(
            "UPDATE sessions SET phase = 'ended', reason = $2, ended_at = $3 WHERE id = $1",
        )
        .bind(id)
        .bind("its record was damaged when the server came back")
        .bind(at)
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("end a damaged session"))?;
        Ok(())
    }

    /// Removes a transcript that belongs to no record any more. One that cannot be removed is
    /// swept by the next start.
    pub(crate) async fn drop_transcript(&self, row: &SqliteRow) {
        let sandbox: Result<String, _> = row.try_get("sandbox");
        let Some(sandbox) = sandbox.ok().and_then(|sandbox| sandbox.parse().ok()) else {
            return;
        };
        if let Err(error) = self.remove_transcript(&sandbox).await {
            tracing::warn!(
                ?error,
                "cannot remove the transcript of a removed session: the next start of the server removes it"
            );
        }
    }

    /// The sandboxes of all records.
    pub(crate) async fn recorded_sandboxes(&self) -> Result<HashSet<SandboxId>, StoreError> {
        let rows = sqlx::query("SELECT sandbox FROM sessions")
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list sandboxes"))?;
        let names = rows.iter().filter_map(|row| row.try_get(0).ok());
        Ok(names.filter_map(|name: String| name.parse().ok()).collect())
    }
}

// === impl Row ===

impl Row<'_> {
    fn insert(&self) -> Query<'_, Sqlite, SqliteArguments> {
        let session = self.session;
        sqlx::query(
            "INSERT INTO sessions (id, owner, tenant, phase, reason, runtime, sandbox, created_at, last_used, spec, egress, parent, origin, client) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
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
        .bind(&self.spec)
        .bind(&self.egress)
        .bind(session.sub_agent.as_ref().map(|sub| sub.parent.as_str()))
        .bind(session.origin.as_str())
        .bind(session.client.as_str())
    }
}

pub(crate) fn is_taken(error: &sqlx::Error) -> bool {
    let error = error.as_database_error();
    error.is_some_and(|error| error.is_unique_violation())
}

/// `None` for a damaged record, which is logged here.
fn readable(row: &SqliteRow) -> Option<Session> {
    read(row)
        .inspect_err(|error| tracing::error!("{error}: it is left out"))
        .ok()
}

fn read(row: &SqliteRow) -> Result<Session, StoreError> {
    let id: String = row.try_get("id").map_err(|e| damaged("?", &e))?;
    let bad = |what: &dyn std::fmt::Display| damaged(&id, what);
    let text = |column: &str| row.try_get::<String, _>(column).map_err(|e| bad(&e));
    let time = |column: &str| row.try_get::<i64, _>(column).map_err(|e| bad(&e));
    let spec: Spec = serde_json::from_str(&text("spec")?).map_err(|e| bad(&e))?;
    let egress = serde_json::from_str(&text("egress")?).map_err(|e| bad(&e))?;
    Ok(Session {
        id: id.parse().map_err(|e| bad(&e))?,
        owner: text("owner")?,
        tenant: text("tenant")?.parse().map_err(|e| bad(&e))?,
        origin: text("origin")?.parse().map_err(|e| bad(&e))?,
        client: text("client")?.parse().map_err(|e| bad(&e))?,
        phase: text("phase")?.parse().map_err(|e| bad(&e))?,
        reason: text("reason")?,
        runtime: text("runtime")?.parse().map_err(|e| bad(&e))?,
        sandbox: text("sandbox")?.parse().map_err(|e| bad(&e))?,
        template: spec.template,
        env: spec.env,
        labels: spec.labels,
        limits: spec.limits,
        lifetime: spec.lifetime,
        secrets: spec.secrets,
        egress,
        created_at: time("created_at")?,
        last_used: time("last_used")?,
        sub_agent: spec.sub_agent,
        image: spec.image,
    })
}

fn damaged(session: &str, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::Record {
        session: session.to_owned(),
        what: what.to_string(),
    }
}
