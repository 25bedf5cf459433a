//! Background runs: one row each, from before the command starts until its session is purged.

use crate::{Store, StoreError};
use k8e_model::{BackgroundRun, BackgroundStatus, LimitKind, RunId, SessionId, UnixMillis};
use serde::{Deserialize, Serialize};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use std::collections::HashMap;
use std::time::Duration;

/// Retention: ended runs kept of one session; the oldest are removed first.
pub const RUNS_KEPT_MAX: usize = 1000;

/// Retention: output bytes kept of the ended runs of one session, as for its transcript; the oldest are removed first, and
/// the newest is always kept.
pub const RUN_OUTPUT_KEPT_BYTES_MAX: u64 = 16 * 1024 * 1024;

const COLUMNS: &str =
    "runs.id, runs.session, runs.status, runs.reason, program, started_at, runs.ended_at, detail";

/// The part of a record that nothing is looked up by.
#[derive(Serialize, Deserialize)]
struct Detail {
    timeout_ms: Option<u64>,
    exit_code: i32,
    signal: i32,
    duration_us: u64,
    stdout_truncated: bool,
    stderr_truncated: bool,
    memory_hit: bool,
    pids_hit: bool,
}

// === impl Store ===

impl Store {
    /// Inserts a run that is about to start.
    pub async fn insert_run(&self, run: &BackgroundRun) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO runs (id, session, status, reason, program, started_at, ended_at, detail, output_bytes, stdout, stderr) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 0, x'', x'')",
        )
        .bind(run.id.as_str())
        .bind(run.session.as_str())
        .bind(run.status.as_str())
        .bind(&run.reason)
        .bind(&run.program)
        .bind(run.started_at)
        .bind(run.ended_at)
        .bind(detail(run)?)
        .execute(&self.shared.write)
        .await
        .map(drop)
        .map_err(self.sql("write a run"))
    }

    /// Stores the result and output of a run, and applies the retention of its session.
    pub async fn finish_run(&self, run: &BackgroundRun) -> Result<(), StoreError> {
        let failed = || self.sql("write a run");
        let output = (run.stdout.len() + run.stderr.len()) as u64;
        let mut transaction = self
            .shared
            .write
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(failed())?;
        sqlx::query(
            "UPDATE runs SET status = $2, reason = $3, ended_at = $4, detail = $5, output_bytes = $6, \
             stdout = $7, stderr = $8 WHERE id = $1",
        )
        .bind(run.id.as_str())
        .bind(run.status.as_str())
        .bind(&run.reason)
        .bind(run.ended_at)
        .bind(detail(run)?)
        .bind(output.cast_signed())
        .bind(run.stdout.as_slice())
        .bind(run.stderr.as_slice())
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        // The newest first: which of them go over a bound, with all that are newer.
        sqlx::query(
            "DELETE FROM runs WHERE id IN (SELECT id FROM (\
             SELECT id, ROW_NUMBER() OVER newest AS newer, SUM(output_bytes) OVER newest AS bytes \
             FROM runs WHERE session = $1 AND status <> 'running' \
             WINDOW newest AS (ORDER BY started_at DESC, id ROWS UNBOUNDED PRECEDING)) \
             WHERE id <> $4 AND (newer > $2 OR bytes > $3))",
        )
        .bind(run.session.as_str())
        .bind(i64::try_from(RUNS_KEPT_MAX).unwrap_or(i64::MAX))
        .bind(RUN_OUTPUT_KEPT_BYTES_MAX.cast_signed())
        .bind(run.id.as_str())
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        transaction.commit().await.map_err(failed())
    }

    /// Removes a run that did not start.
    pub async fn remove_run(&self, id: &RunId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM runs WHERE id = $1")
            .bind(id.as_str())
            .execute(&self.shared.write)
            .await
            .map(drop)
            .map_err(self.sql("remove a run"))
    }

    /// One run; with an owner, only if it belongs to that owner. Another's is not read: the size of its output would show in
    /// the response time.
    pub async fn run(
        &self,
        id: &RunId,
        owner: Option<&str>,
    ) -> Result<Option<BackgroundRun>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS}, stdout, stderr FROM runs JOIN sessions ON sessions.id = runs.session \
             WHERE runs.id = $1 AND ($2 IS NULL OR owner = $2)"
        );
        let row = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(id.as_str())
            .bind(owner)
            .fetch_optional(&self.shared.read)
            .await
            .map_err(self.sql("read a run"))?;
        let Some(row) = row else { return Ok(None) };
        let mut run = read(&row)?;
        let bad = |e| damaged(&run.session, &e);
        run.stdout = row.try_get("stdout").map_err(bad)?;
        let bad = |e| damaged(&run.session, &e);
        run.stderr = row.try_get("stderr").map_err(bad)?;
        Ok(Some(run))
    }

    /// The runs of a session without their output, newest first.
    pub async fn runs(&self, session: &SessionId) -> Result<Vec<BackgroundRun>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM runs WHERE session = $1 ORDER BY started_at DESC, id LIMIT $2"
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(session.as_str())
            // With as many that run as there can be.
            .bind(i64::try_from(2 * RUNS_KEPT_MAX).unwrap_or(i64::MAX))
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list runs"))?;
        rows.iter().map(read).collect()
    }

    /// All runs in progress. The engine bounds their number.
    pub async fn unended_runs(&self) -> Result<Vec<BackgroundRun>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM runs WHERE status = 'running'");
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list runs"))?;
        let readable = |row| {
            read(row)
                .inspect_err(|error| tracing::error!("{error}: it is left out"))
                .ok()
        };
        Ok(rows.iter().filter_map(readable).collect())
    }

    /// Output bytes of all runs.
    pub(crate) async fn run_bytes(&self) -> Result<u64, StoreError> {
        let row = sqlx::query("SELECT COALESCE(SUM(output_bytes), 0) FROM runs")
            .fetch_one(&self.shared.read)
            .await
            .map_err(self.sql("weigh runs"))?;
        Ok(row.get::<i64, _>(0).unsigned_abs())
    }

    /// Output bytes of the runs of each session.
    pub(crate) async fn run_bytes_by_session(&self) -> Result<HashMap<String, u64>, StoreError> {
        let rows = sqlx::query("SELECT session, SUM(output_bytes) FROM runs GROUP BY session")
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("weigh runs"))?;
        let bytes = |row: &SqliteRow| (row.get(0), row.get::<i64, _>(1).unsigned_abs());
        Ok(rows.iter().map(bytes).collect())
    }
}

fn detail(run: &BackgroundRun) -> Result<String, StoreError> {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let detail = Detail {
        timeout_ms: run.timeout.map(millis),
        exit_code: run.exit_code,
        signal: run.signal,
        duration_us: u64::try_from(run.duration.as_micros()).unwrap_or(u64::MAX),
        stdout_truncated: run.stdout_truncated,
        stderr_truncated: run.stderr_truncated,
        memory_hit: run.limits_hit.contains(&LimitKind::Memory),
        pids_hit: run.limits_hit.contains(&LimitKind::Pids),
    };
    serde_json::to_string(&detail).map_err(|e| damaged(&run.session, &e))
}

/// A run without its output.
fn read(row: &SqliteRow) -> Result<BackgroundRun, StoreError> {
    let text = |column: &str| row.try_get::<String, _>(column);
    let session = text("session")
        .ok()
        .and_then(|session| session.parse::<SessionId>().ok());
    let Some(session) = session else {
        return Err(StoreError::Record {
            session: "?".to_owned(),
            what: "a run of no session".to_owned(),
        });
    };
    let bad = |what: &dyn std::fmt::Display| damaged(&session, what);
    let detail: Detail = text("detail")
        .map_err(|e| bad(&e))
        .and_then(|detail| serde_json::from_str(&detail).map_err(|e| bad(&e)))?;
    let status: BackgroundStatus = text("status")
        .map_err(|e| bad(&e))
        .and_then(|status| status.parse().map_err(|e| bad(&e)))?;
    let id: RunId = text("id")
        .map_err(|e| bad(&e))
        .and_then(|id| id.parse().map_err(|e| bad(&e)))?;
    let started_at: UnixMillis = row.try_get("started_at").map_err(|e| bad(&e))?;
    let ended_at: Option<UnixMillis> = row.try_get("ended_at").map_err(|e| bad(&e))?;
    let hits = [
        detail.memory_hit.then_some(LimitKind::Memory),
        detail.pids_hit.then_some(LimitKind::Pids),
    ];
    Ok(BackgroundRun {
        id,
        status,
        reason: text("reason").map_err(|e| bad(&e))?,
        program: text("program").map_err(|e| bad(&e))?,
        timeout: detail.timeout_ms.map(Duration::from_millis),
        started_at,
        ended_at,
        exit_code: detail.exit_code,
        signal: detail.signal,
        duration: Duration::from_micros(detail.duration_us),
        stdout: Vec::new(),
        stderr: Vec::new(),
        stdout_truncated: detail.stdout_truncated,
        stderr_truncated: detail.stderr_truncated,
        limits_hit: hits.into_iter().flatten().collect(),
        session,
    })
}

fn damaged(session: &SessionId, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::Record {
        session: session.to_string(),
        what: format!("a run: {what}"),
    }
}
