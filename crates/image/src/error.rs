//! What can be wrong with an image, a registry or an archive.

use k8e_model::Code;
use std::io;

/// Why an image could not be read, fetched or unpacked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// It is not what it should be.
    #[error("{0}")]
    Invalid(String),
    /// It is more than this server takes.
    #[error("{what}: more than {max}")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// The bound, in words.
        max: String,
    },
    /// Its bytes are not those that its digest names.
    #[error("{what} has digest {found}, not {wanted}: the registry or archive is damaged, or lies")]
    Digest {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        wanted: String,
        /// What came.
        found: String,
    },
    /// A registry refused, or does not have it.
    #[error("{0}")]
    Registry(String, Code),
    /// A file or a connection failed.
    #[error("{operation}: {source}")]
    Io {
        /// What was done.
        operation: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

// === impl ImageError ===

impl ImageError {
    /// It is not what it should be.
    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }

    pub(crate) fn too_large(what: &'static str, max: impl ToString) -> Self {
        let max = max.to_string();
        Self::TooLarge { what, max }
    }

    /// For `map_err`: what was done.
    pub(crate) fn io<E: Into<io::Error>>(operation: impl Into<String>) -> impl FnOnce(E) -> Self {
        let operation = operation.into();
        move |source| Self::Io {
            operation,
            source: source.into(),
        }
    }

    /// What it means to a caller.
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::Digest { .. } => Code::Invalid,
            Self::TooLarge { .. } => Code::Exhausted,
            Self::Registry(_, code) => *code,
            Self::Io { source, .. } => {
                let full = [
                    io::ErrorKind::StorageFull,
                    io::ErrorKind::QuotaExceeded,
                    io::ErrorKind::FileTooLarge,
                ];
                match full.contains(&source.kind()) {
                    true => Code::Exhausted,
                    false => Code::Unavailable,
                }
            }
        }
    }
}
