//! Errors of the store.

use k8e_model::Code;
use std::path::PathBuf;

/// An error of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The directory cannot be created or written.
    #[error("data directory {} cannot be used: make it writable for this user or choose another with --data-dir", dir.display())]
    Directory {
        /// The data directory.
        dir: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The disk is full.
    #[error("the disk of data directory {} is full: free some space", dir.display())]
    Full {
        /// The data directory.
        dir: PathBuf,
    },
    /// A newer k8e wrote the database.
    #[error("the database in {} was written by a newer k8e (schema {version}): start that version, or choose another --data-dir", dir.display())]
    Newer {
        /// The data directory.
        dir: PathBuf,
        /// Schema version of the database.
        version: i64,
    },
    /// The schema migration failed.
    #[error("the database in {} cannot be migrated to this version: restore a backup or choose another --data-dir", dir.display())]
    Migrate {
        /// The data directory.
        dir: PathBuf,
        /// The database's error.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
    /// The file is not a valid database.
    #[error("the database in {} is damaged: restore a backup or move it away", dir.display())]
    Damaged {
        /// The data directory.
        dir: PathBuf,
        /// The database's error.
        #[source]
        source: sqlx::Error,
    },
    /// The record of a session is damaged.
    #[error("the record of session {session} is damaged ({what})")]
    Record {
        /// Id or name in the record.
        session: String,
        /// What is wrong with it.
        what: String,
    },
    /// A session with this id exists and has not ended.
    #[error("session {0} exists already")]
    Exists(String),
    /// Another key has this name.
    #[error("an API key named {0} exists already: choose another name or delete that one first")]
    KeyExists(String),
    /// The record of an API key is damaged.
    #[error("the record of API key {id} is damaged ({what})")]
    KeyRecord {
        /// Id or name in the record.
        id: String,
        /// What is wrong with it.
        what: String,
    },
    /// A template's record is not what we wrote.
    #[error("the record of template {name} is damaged ({what})")]
    TemplateRecord {
        /// As the record says.
        name: String,
        /// What about it.
        what: String,
    },
    /// The record of an approval is damaged.
    #[error("the record of approval {id} is damaged ({what})")]
    ApprovalRecord {
        /// Id or name in the record.
        id: String,
        /// What is wrong with it.
        what: String,
    },
    /// The record of a snapshot is damaged.
    #[error("the record of snapshot {name} is damaged ({what})")]
    SnapshotRecord {
        /// Id or name in the record.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// The encryption key of the secrets cannot be used.
    #[error("the encryption key of the secrets {} cannot be used: restore it, or delete the secrets and set them again", path.display())]
    SecretKey {
        /// File of the key.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A secret was encrypted with another key, or modified.
    #[error("secret {secret} cannot be decrypted with the key {}: restore that file, or set the secret again", key.display())]
    Unsealed {
        /// Name of the secret.
        secret: String,
        /// File of the key.
        key: PathBuf,
    },
    /// Any other failure of the database.
    #[error("the database failed to {operation}")]
    Sql {
        /// The operation.
        operation: &'static str,
        /// The database's error.
        #[source]
        source: sqlx::Error,
    },
    /// A transcript file cannot be read or written.
    #[error("{operation} {}", path.display())]
    File {
        /// The operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}

// === impl StoreError ===

impl StoreError {
    /// The error code for a caller.
    pub fn code(&self) -> Code {
        match self {
            Self::Full { .. } => Code::Exhausted,
            Self::Exists(_) | Self::KeyExists(_) => Code::Exists,
            Self::Newer { .. } | Self::Directory { .. } => Code::Precondition,
            Self::Migrate { .. }
            | Self::Damaged { .. }
            | Self::Record { .. }
            | Self::KeyRecord { .. }
            | Self::TemplateRecord { .. }
            | Self::ApprovalRecord { .. }
            | Self::SnapshotRecord { .. }
            | Self::SecretKey { .. }
            | Self::Unsealed { .. }
            | Self::Sql { .. }
            | Self::File { .. } => Code::Internal,
        }
    }
}
