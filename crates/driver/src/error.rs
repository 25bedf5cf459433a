//! What can go wrong with a sandbox.

use k8e_model::Code;
use std::io;

/// Why a driver could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// This machine cannot run this driver.
    #[error("{0}")]
    Unusable(String),
    /// The machine has no room for another sandbox.
    #[error("{0}")]
    Exhausted(String),
    /// A step of making or removing a sandbox failed.
    #[error("{operation} {object}")]
    Step {
        /// What was done, as in "mount", "write".
        operation: &'static str,
        /// To what.
        object: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A step that the launcher took failed.
    #[error("{message}")]
    InLauncher {
        /// What was done, to what.
        message: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The launcher process is gone; the server must be restarted.
    #[error("the launcher process is gone: restart k8e server")]
    LauncherGone,
    /// A launch failed and so did the cleaning up after it.
    #[error("{launch}; cleaning up failed too: {cleanup}")]
    Launch {
        /// Why the launch failed.
        launch: Box<DriverError>,
        /// What was left behind.
        cleanup: Box<DriverError>,
    },
}

// === impl DriverError ===

impl DriverError {
    /// For `map_err` on a system call: what was done, to what.
    pub fn step<E: Into<io::Error>>(
        operation: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::Step {
            operation,
            object,
            source: source.into(),
        }
    }

    /// What it means to a caller.
    pub fn code(&self) -> Code {
        match self {
            Self::Unusable(_) => Code::Unsupported,
            Self::Exhausted(_) => Code::Exhausted,
            Self::Step { source, .. } | Self::InLauncher { source, .. } => {
                let full = [
                    io::ErrorKind::StorageFull,
                    io::ErrorKind::QuotaExceeded,
                    io::ErrorKind::OutOfMemory,
                ];
                if full.contains(&source.kind()) {
                    Code::Exhausted
                } else {
                    Code::Internal
                }
            }
            Self::LauncherGone => Code::Unavailable,
            Self::Launch { launch, .. } => launch.code(),
        }
    }
}
