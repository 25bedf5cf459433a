//! Retention of ended sessions: by age, number and bytes.
//!
//! An owner that creates and ends sessions in a loop must neither fill the disk nor evict the history of others. So the owner
//! with the most is trimmed first, and of its sessions the oldest.

use crate::{Store, StoreError};
use k8e_model::UnixMillis;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use std::collections::HashMap;

/// Trimming goes this far below a bound, in tenths, so that it is not due again when the next session ends.
const TRIM_TO_TENTHS: u64 = 9;

/// The fields of an ended session that trimming needs.
struct Ended {
    row: SqliteRow,
    bytes: u64,
    /// Number of the owner's sessions that are as new or newer.
    rank: u64,
    /// Bytes of those sessions.
    bytes_before: u64,
}

// === impl Store ===

impl Store {
    /// Removes the records of sessions that ended before `before`, with their events and
    /// transcripts. Returns how many.
    pub async fn purge_ended(&self, before: UnixMillis) -> Result<usize, StoreError> {
        let rows = sqlx::query(
            "DELETE FROM sessions WHERE phase = 'ended' AND ended_at < $1 RETURNING sandbox",
        )
        .bind(before)
        .fetch_all(&self.shared.write)
        .await
        .map_err(self.sql("remove old sessions"))?;
        for row in &rows {
            self.drop_transcript(row).await;
        }
        Ok(rows.len())
    }

    /// Whether [`Store::trim_ended`] may have something to do. Cheap: called whenever a session ends.
    pub async fn ended_too_many(
        &self,
        records_max: usize,
        bytes_max: u64,
    ) -> Result<bool, StoreError> {
        // The sum includes live sessions: then trimming finds nothing to do.
        let bytes = self.transcript_bytes() + self.run_bytes().await?;
        if bytes > bytes_max {
            return Ok(true);
        }
        let row = sqlx::query("SELECT COUNT(*) FROM sessions WHERE phase = 'ended'")
            .fetch_one(&self.shared.read)
            .await
            .map_err(self.sql("count sessions"))?;
        let count: i64 = row.get(0);
        Ok(u64::try_from(count).unwrap_or(0) > records_max as u64)
    }

    /// Removes records of ended sessions, with their events, runs and transcripts, until at most
    /// `records_max` are left and what they wrote is at most `bytes_max`. Returns how many.
    pub async fn trim_ended(
        &self,
        records_max: usize,
        bytes_max: u64,
    ) -> Result<usize, StoreError> {
        let rows = sqlx::query(
            "SELECT id, owner, sandbox FROM sessions WHERE phase = 'ended' ORDER BY ended_at DESC, id",
        )
        .fetch_all(&self.shared.read)
        .await
        .map_err(self.sql("list ended sessions"))?;
        let runs = self.run_bytes_by_session().await?;
        let surplus = surplus(self.weigh(rows, &runs), records_max as u64, bytes_max);
        for row in &surplus {
            // One transaction each, so that other writers get their turn.
            sqlx::query("DELETE FROM sessions WHERE sandbox = $1 AND phase = 'ended'")
                .bind(row.try_get::<String, _>("sandbox").unwrap_or_default())
                .execute(&self.shared.write)
                .await
                .map_err(self.sql("remove an ended session"))?;
            self.drop_transcript(row).await;
        }
        Ok(surplus.len())
    }

    /// `rows` must be the newest first.
    fn weigh(&self, rows: Vec<SqliteRow>, runs: &HashMap<String, u64>) -> Vec<Ended> {
        let mut owners: HashMap<String, (u64, u64)> = HashMap::new();
        let weigh = |row: SqliteRow| {
            let text = |column| row.try_get::<String, _>(column).unwrap_or_default();
            let bytes = text("sandbox")
                .parse()
                .map_or(0, |sandbox| self.transcript_bytes_of(&sandbox))
                + runs.get(&text("id")).copied().unwrap_or(0);
            let (rank, bytes_before) = owners.entry(text("owner")).or_default();
            *rank += 1;
            *bytes_before += bytes;
            Ended {
                bytes,
                rank: *rank,
                bytes_before: *bytes_before,
                row,
            }
        };
        rows.into_iter().map(weigh).collect()
    }
}

/// The sessions to remove. A bound that is not exceeded removes none.
fn surplus(mut ended: Vec<Ended>, records_max: u64, bytes_max: u64) -> Vec<SqliteRow> {
    let mut gone = Vec::new();
    if ended.len() as u64 > records_max {
        ended.sort_by_key(|ended| ended.rank);
        let kept = usize::try_from(records_max * TRIM_TO_TENTHS / 10).unwrap_or(usize::MAX);
        gone.extend(ended.split_off(kept));
    }
    if ended.iter().map(|ended| ended.bytes).sum::<u64>() > bytes_max {
        ended.sort_by_key(|ended| ended.bytes_before);
        let mut left = bytes_max / 10 * TRIM_TO_TENTHS;
        let mut fits = |ended: &Ended| {
            let rest = left.checked_sub(ended.bytes);
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        let kept = ended.iter().take_while(|&ended| fits(ended)).count();
        gone.extend(ended.split_off(kept));
    }
    gone.into_iter().map(|ended| ended.row).collect()
}
