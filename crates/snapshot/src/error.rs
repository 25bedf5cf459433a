//! Errors of saving, restoring and transferring snapshots.

use std::io;
use std::path::{Path, PathBuf};

/// Why an operation on snapshots failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// A file of the store cannot be read or written.
    #[error("{operation} {}: {source}", path.display())]
    Io {
        /// The operation.
        operation: &'static str,
        /// Its file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The disk has no room left but what the server itself needs.
    #[error("the disk with {} is full", .0.display())]
    Full(PathBuf),
    /// A bound on the snapshots of an owner or tenant is reached.
    #[error("{0}")]
    Quota(String),
    /// What is stored is not what was written.
    #[error("the stored snapshot is damaged: {0}")]
    Damaged(String),
    /// An entry or an archive that is not valid.
    #[error("{0}")]
    Invalid(String),
    /// The archive cannot be read from its sender.
    #[error("the archive cannot be read: {0}")]
    Source(io::Error),
}

// === impl SnapshotError ===

impl SnapshotError {
    /// For `map_err`: names operation and file, and tells a full disk from other failures.
    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| {
            let path = path.to_owned();
            if matches!(
                source.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            ) {
                return Self::Full(path);
            }
            Self::Io {
                operation,
                path,
                source,
            }
        }
    }

    pub(crate) fn damaged(what: impl Into<String>) -> Self {
        Self::Damaged(what.into())
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }
}
