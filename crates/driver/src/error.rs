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
    /// What was given is not what it should be.
    #[error("{0}")]
    Refused(String),
    /// Calls to its guest are open, which a checkpoint cannot hold; in the guest's words.
    #[error("{0}")]
    InUse(String),
    /// The machine has no room for another sandbox.
    #[error("{0}")]
    Exhausted(String),
    /// The launcher has as many requests under way as it takes at once.
    #[error("the launcher is busy with other sandboxes: try again")]
    Busy,
    /// A step of making or removing a sandbox failed.
    #[error("{operation} {object}")]
    Step {
        /// The operation, as in "mount", "write".
        operation: &'static str,
        /// Its object, such as a path.
        object: String,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// A step that the launcher took failed.
    #[error("{message}")]
    InLauncher {
        /// The operation and its object.
        message: String,
        /// The error of the system call.
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
    /// For `map_err` on a system call: names the operation and its object.
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

    /// Its category for a caller.
    pub fn code(&self) -> Code {
        match self {
            Self::Unusable(_) => Code::Unsupported,
            Self::InUse(_) => Code::Precondition,
            Self::Refused(_) => Code::Invalid,
            Self::Exhausted(_) | Self::Busy => Code::Exhausted,
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
