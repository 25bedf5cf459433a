//! Terminals of live sessions, so that they are found again after a restart.

use crate::{Store, StoreError};
use k8e_model::{SessionId, TerminalId, UnixMillis};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

/// The record of a terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TerminalRecord {
    /// Id: random, hard to guess.
    pub id: TerminalId,
    /// Its session, whose owner may use it.
    pub session: SessionId,
    /// Name of its program, for display.
    pub program: String,
    /// Time of creation.
    pub created_at: UnixMillis,
}

// === impl Store ===

impl Store {
    /// Inserts a terminal that is about to be created.
    pub async fn insert_terminal(&self, terminal: &TerminalRecord) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO terminals (id, session, program, created_at) VALUES ($1, $2, $3, $4)",
        )
        .bind(terminal.id.as_str())
        .bind(terminal.session.as_str())
        .bind(&terminal.program)
        .bind(terminal.created_at)
        .execute(&self.shared.write)
        .await
        .map(drop)
        .map_err(self.sql("write a terminal"))
    }

    /// Removes a terminal that has ended.
    pub async fn remove_terminal(&self, id: &TerminalId) -> Result<(), StoreError> {
        self.remove_terminals("DELETE FROM terminals WHERE id = $1", id.as_str())
            .await
    }

    /// Removes the terminals of an ended session.
    pub async fn remove_terminals_of(&self, session: &SessionId) -> Result<(), StoreError> {
        let sql = "DELETE FROM terminals WHERE session = $1";
        self.remove_terminals(sql, session.as_str()).await
    }

    /// All terminals. Damaged records are skipped.
    pub async fn terminals(&self) -> Result<Vec<TerminalRecord>, StoreError> {
        let rows = sqlx::query("SELECT id, session, program, created_at FROM terminals")
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list terminals"))?;
        Ok(rows.iter().filter_map(read).collect())
    }

    async fn remove_terminals(&self, sql: &'static str, bind: &str) -> Result<(), StoreError> {
        sqlx::query(sql)
            .bind(bind)
            .execute(&self.shared.write)
            .await
            .map(drop)
            .map_err(self.sql("remove a terminal"))
    }
}

fn read(row: &SqliteRow) -> Option<TerminalRecord> {
    let text = |column: &str| row.try_get::<String, _>(column).ok();
    Some(TerminalRecord {
        id: text("id")?.parse().ok()?,
        session: text("session")?.parse().ok()?,
        program: text("program")?,
        created_at: row.try_get("created_at").ok()?,
    })
}
