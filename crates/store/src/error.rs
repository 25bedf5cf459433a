//! What can go wrong with the records.

use k8e_model::Code;
use std::path::PathBuf;

/// Why the store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The directory cannot be made or written.
    #[error("data directory {} cannot be used: make it writable for this user or choose another with --data-dir", dir.display())]
    Directory {
        /// Which.
        dir: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The disk is full.
    #[error("the disk of data directory {} is full: free some space", dir.display())]
    Full {
        /// Which.
        dir: PathBuf,
    },
    /// A newer k8e wrote the database.
    #[error("the database in {} was written by a newer k8e (schema {version}): start that version, or choose another --data-dir", dir.display())]
    Newer {
        /// Which directory.
        dir: PathBuf,
        /// Of the database.
        version: i64,
    },
    /// The schema cannot be brought up to date.
    #[error("the database in {} cannot be brought up to date: restore it or choose another --data-dir", dir.display())]
    Migrate {
        /// Which directory.
        dir: PathBuf,
        /// What SQL said.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
    /// The file is no database any more.
    #[error("the database in {} is damaged: restore it or move it away", dir.display())]
    Damaged {
        /// Which directory.
        dir: PathBuf,
        /// What SQL said.
        #[source]
        source: sqlx::Error,
    },
    /// A record is not what we wrote.
    #[error("the record of session {session} is damaged ({what})")]
    Record {
        /// As the record says.
        session: String,
        /// What about it.
        what: String,
    },
    /// A session with this id is there and not over.
    #[error("session {0} exists already")]
    Exists(String),
    /// A key has this name.
    #[error("an API key named {0} exists already: choose another name or delete that one first")]
    KeyExists(String),
    /// An API key's record is not what we wrote.
    #[error("the record of API key {id} is damaged ({what})")]
    KeyRecord {
        /// As the record says.
        id: String,
        /// What about it.
        what: String,
    },
    /// An approval's record is not what we wrote.
    #[error("the record of approval {id} is damaged ({what})")]
    ApprovalRecord {
        /// As the record says.
        id: String,
        /// What about it.
        what: String,
    },
    /// A snapshot's record is not what we wrote.
    #[error("the record of snapshot {name} is damaged ({what})")]
    SnapshotRecord {
        /// As the record says.
        name: String,
        /// What about it.
        what: String,
    },
    /// The key that seals secrets cannot be used.
    #[error("the secrets' key {} cannot be used: restore it, or delete the secrets and set them again", path.display())]
    SecretKey {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A secret was sealed with another key, or changed.
    #[error("secret {secret} does not open with the key {}: restore that file, or set the secret again", key.display())]
    Unsealed {
        /// Which secret.
        secret: String,
        /// Which file.
        key: PathBuf,
    },
    /// Any other failure of the database.
    #[error("the database failed to {operation}")]
    Sql {
        /// What was done.
        operation: &'static str,
        /// What SQL said.
        #[source]
        source: sqlx::Error,
    },
    /// A transcript file cannot be read or written.
    #[error("{operation} {}", path.display())]
    File {
        /// What was done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

// === impl StoreError ===

impl StoreError {
    /// What it means to a caller.
    pub fn code(&self) -> Code {
        match self {
            Self::Full { .. } => Code::Exhausted,
            Self::Exists(_) | Self::KeyExists(_) => Code::Exists,
            Self::Newer { .. } | Self::Directory { .. } => Code::Precondition,
            Self::Migrate { .. }
            | Self::Damaged { .. }
            | Self::Record { .. }
            | Self::KeyRecord { .. }
            | Self::ApprovalRecord { .. }
            | Self::SnapshotRecord { .. }
            | Self::SecretKey { .. }
            | Self::Unsealed { .. }
            | Self::Sql { .. }
            | Self::File { .. } => Code::Internal,
        }
    }
}
