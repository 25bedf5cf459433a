//! Persistent state: sessions, events, runs, terminals, exposed services, approvals, keys, secrets, snapshots, templates and the
//! audit log in SQLite, transcripts in files.
//!
//! One writer connection and a few readers: SQLite has one writer anyway, so that no call fails with "database is locked".
//! The server holds a lock on the data directory; this crate takes none.

mod approvals;
mod audit;
mod error;
mod events;
mod exposures;
mod keys;
mod purge;
mod runs;
mod saved;
mod secrets;
mod sessions;
mod snapshots;
mod templates;
mod terminals;
mod transcript;

pub use approvals::{APPROVALS_KEPT_MAX, ApprovalQuery};
pub use audit::{AUDIT_ROWS_MAX, AuditQuery, AuditRow};
pub use error::StoreError;
pub use events::{EVENTS_KEPT_MAX, Event, EventPage, NewEvent};
pub use keys::KeyRecord;
pub use runs::{RUN_OUTPUT_KEPT_BYTES_MAX, RUNS_KEPT_MAX};
pub use saved::SavedSnapshot;
pub use secrets::SecretEntry;
pub use sessions::SessionQuery;
pub use snapshots::SnapshotEntry;
pub use templates::TemplateRecord;
pub use terminals::TerminalRecord;
pub use transcript::{
    PAGE_BYTES_DEFAULT, PAGE_BYTES_MAX, TRANSCRIPT_FILE_BYTES_MAX, TranscriptPage,
};

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _, SqlitePool};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// Connection pool for reading: a page of a listing takes well under a millisecond.
const READERS_MAX: u32 = 4;

/// SQLite's busy timeout: only tools that open the file from outside contend for its lock.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The store of one data directory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    write: SqlitePool,
    read: SqlitePool,
    transcripts: transcript::Transcripts,
    /// Encryption key of the secrets; read or created at their first use.
    sealer: tokio::sync::OnceCell<secrets::Sealer>,
}

// === impl Store ===

impl Store {
    /// Opens the database in `dir`, creates what is missing, and migrates the schema.
    pub async fn open(dir: &Path) -> Result<Self, StoreError> {
        let transcripts = prepare(dir).map_err(|source| directory(dir, source))?;
        let options = SqliteConnectOptions::new()
            .filename(dir.join("k8e.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT)
            .disable_statement_logging();
        let write = pool(1)
            .connect_with(options.clone())
            .await
            .map_err(|e| database(dir, "open", e))?;
        MIGRATIONS
            .run(&write)
            .await
            .map_err(|e| migrating(dir, e))?;
        let read = pool(READERS_MAX)
            .connect_with(options)
            .await
            .map_err(|e| database(dir, "open", e))?;
        let store = Self {
            shared: Arc::new(Shared {
                dir: dir.to_owned(),
                write,
                read,
                transcripts,
                sealer: tokio::sync::OnceCell::new(),
            }),
        };
        // A crash between removing a record and its transcript leaves the latter.
        let known = store.recorded_sandboxes().await?;
        store.sweep_transcripts(known).await?;
        Ok(store)
    }

    /// The directory it was opened with.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// Checks that the database can be read.
    pub async fn ping(&self) -> Result<(), StoreError> {
        sqlx::query("SELECT 1 FROM sessions LIMIT 1")
            .fetch_optional(&self.shared.read)
            .await
            .map(drop)
            .map_err(self.sql("read the sessions"))
    }

    /// Closes the database; every later call fails.
    pub async fn close(&self) {
        self.shared.read.close().await;
        self.shared.write.close().await;
    }

    /// For `map_err`: names the operation.
    fn sql(&self, operation: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
        move |source| database(&self.shared.dir, operation, source)
    }
}

// SQLite's primary result codes, from its documentation.
const SQLITE_READONLY: i32 = 8;
const SQLITE_CORRUPT: i32 = 11;
const SQLITE_FULL: i32 = 13;
const SQLITE_CANTOPEN: i32 = 14;
const SQLITE_NOTADB: i32 = 26;

fn pool(connections_max: u32) -> SqlitePoolOptions {
    // No lifetime, no ping: a connection to a local file does not go stale.
    SqlitePoolOptions::new()
        .max_connections(connections_max)
        .min_connections(1)
        .idle_timeout(None)
        .max_lifetime(None)
        .test_before_acquire(false)
        // A full disk makes SQLite roll back by itself, of which sqlx does not know: for it the
        // connection is in a transaction for ever. Such a one is replaced.
        .before_acquire(|connection, _| {
            let clean = !connection.is_in_transaction();
            Box::pin(async move { Ok(clean) })
        })
}

/// Creates the directories, and checks now rather than at the first write that they are writable.
/// Others may enter the data directory (the socket is in it), so the records are closed to them one by one.
fn prepare(dir: &Path) -> std::io::Result<transcript::Transcripts> {
    std::fs::create_dir_all(dir)?;
    let transcripts = transcript::Transcripts::open(&dir.join("transcripts"))?;
    // SQLite gives its other files the mode of this one.
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(dir.join("k8e.db"))?;
    let probe = dir.join(".writable");
    std::fs::write(&probe, b"")?;
    std::fs::remove_file(&probe)?;
    Ok(transcripts)
}

fn directory(dir: &Path, source: std::io::Error) -> StoreError {
    let dir = dir.to_owned();
    if is_full(&source) {
        StoreError::Full { dir }
    } else {
        StoreError::Directory { dir, source }
    }
}

fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

/// Maps a database error to the failures that an operator can fix.
fn database(dir: &Path, operation: &'static str, source: sqlx::Error) -> StoreError {
    let dir = dir.to_owned();
    match primary_code(&source) {
        Some(SQLITE_FULL) => StoreError::Full { dir },
        Some(SQLITE_READONLY | SQLITE_CANTOPEN) => StoreError::Directory {
            dir,
            source: std::io::Error::other(source),
        },
        Some(SQLITE_CORRUPT | SQLITE_NOTADB) => StoreError::Damaged { dir, source },
        _ => StoreError::Sql { operation, source },
    }
}

fn migrating(dir: &Path, source: MigrateError) -> StoreError {
    if let MigrateError::VersionMissing(version) = source {
        return StoreError::Newer {
            dir: dir.to_owned(),
            version,
        };
    }
    if let MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) = source {
        return database(dir, "bring the schema up to date", source);
    }
    StoreError::Migrate {
        dir: dir.to_owned(),
        source,
    }
}

/// SQLite's extended codes hold the primary one in their low byte.
fn primary_code(error: &sqlx::Error) -> Option<i32> {
    let code: i32 = error.as_database_error()?.code()?.parse().ok()?;
    Some(code & 0xff)
}
