//! Event log of a session: numbered from 1, the newest thousand.

use crate::{Store, StoreError};
use k8e_model::{SandboxId, SessionId, UnixMillis};
use serde_json::{Map, Value};
use sqlx::Row as _;
use std::collections::{BTreeMap, HashMap};

/// Retention: events kept of one session. Enough for a day of an agent; a busy session must not fill the disk.
pub const EVENTS_KEPT_MAX: u64 = 1000;

/// Default page size.
const PAGE_EVENTS_DEFAULT: u32 = 100;

/// An event to insert.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    /// The session.
    pub session: SessionId,
    /// Its sandbox, which tells it from a later session with the same id.
    pub sandbox: SandboxId,
    /// Time of the event.
    pub at: UnixMillis,
    /// Kind, as `run_started`.
    pub kind: &'static str,
    /// Details, as a JSON object.
    pub detail: Map<String, Value>,
}

/// A stored event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Sequence number in the session, from 1.
    pub seq: u64,
    /// Time of the event.
    pub at: UnixMillis,
    /// Kind, as `run_started`.
    pub kind: String,
    /// A JSON object.
    pub detail: String,
}

/// Some events of a session, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventPage {
    /// Oldest first.
    pub events: Vec<Event>,
    /// Whether older events were removed, or more follow.
    pub truncated: bool,
}

// === impl Store ===

impl Store {
    /// Inserts events in order, in one transaction. Those of unknown sessions are dropped.
    pub async fn append_events(&self, events: &[NewEvent]) -> Result<(), StoreError> {
        const INSERT: &str = "INSERT INTO events (session, seq, at, kind, detail) \
             SELECT $1, 1 + COALESCE((SELECT MAX(seq) FROM events WHERE session = $1), 0), $2, $3, $4 \
             WHERE EXISTS (SELECT 1 FROM sessions WHERE id = $1 AND sandbox = $5) RETURNING seq";
        let failed = || self.sql("write events");
        let mut transaction = self
            .shared
            .write
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(failed())?;
        let mut newest = BTreeMap::new();
        for event in events {
            let seq = sqlx::query(INSERT)
                .bind(event.session.as_str())
                .bind(event.at)
                .bind(event.kind)
                .bind(Value::Object(event.detail.clone()).to_string())
                .bind(event.sandbox.as_str())
                .fetch_optional(&mut *transaction)
                .await
                .map_err(failed())?;
            if let Some(row) = seq {
                newest.insert(&event.session, row.get::<i64, _>(0));
            }
        }
        for (session, seq) in newest {
            let gone = seq.saturating_sub(EVENTS_KEPT_MAX.cast_signed());
            if gone > 0 {
                sqlx::query("DELETE FROM events WHERE session = $1 AND seq <= $2")
                    .bind(session.as_str())
                    .bind(gone)
                    .execute(&mut *transaction)
                    .await
                    .map_err(failed())?;
            }
        }
        transaction.commit().await.map_err(failed())
    }

    /// For each session that has not ended: foreground runs with a `run_started` and no `run_ended`, as far as events are
    /// kept.
    pub async fn unended_foreground_runs(&self) -> Result<HashMap<SessionId, u64>, StoreError> {
        let rows = sqlx::query(
            "SELECT session, SUM(CASE kind WHEN 'run_started' THEN 1 ELSE -1 END) AS unended \
             FROM events JOIN sessions ON sessions.id = events.session \
             WHERE sessions.phase <> 'ended' AND kind IN ('run_started', 'run_ended') \
             AND json_extract(detail, '$.run_id') IS NULL GROUP BY session HAVING unended > 0",
        )
        .fetch_all(&self.shared.read)
        .await
        .map_err(self.sql("count runs without an end"))?;
        let counted = rows.iter().filter_map(|row| {
            let session: SessionId = row.try_get::<String, _>(0).ok()?.parse().ok()?;
            Some((session, row.try_get::<i64, _>(1).ok()?.unsigned_abs()))
        });
        Ok(counted.collect())
    }

    /// Events after number `after`, at most `limit`; 0 is the default.
    pub async fn events(
        &self,
        session: &SessionId,
        after: u64,
        limit: u32,
    ) -> Result<EventPage, StoreError> {
        let most = u32::try_from(EVENTS_KEPT_MAX).unwrap_or(u32::MAX);
        let limit = if limit == 0 {
            PAGE_EVENTS_DEFAULT
        } else {
            limit.min(most)
        };
        let rows = sqlx::query("SELECT seq, at, kind, detail FROM events WHERE session = $1 AND seq > $2 ORDER BY seq LIMIT $3")
            .bind(session.as_str())
            .bind(i64::try_from(after).unwrap_or(i64::MAX))
            .bind(i64::from(limit) + 1)
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("read events"))?;
        let mut events: Vec<Event> = rows
            .into_iter()
            .map(|row| Event {
                seq: row.get::<i64, _>(0).unsigned_abs(),
                at: row.get(1),
                kind: row.get(2),
                detail: row.get(3),
            })
            .collect();
        let more = events.len() > limit as usize;
        events.truncate(limit as usize);
        let lost = events
            .first()
            .is_some_and(|first| first.seq > after.saturating_add(1));
        Ok(EventPage {
            events,
            truncated: more || lost,
        })
    }
}
