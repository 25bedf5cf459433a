//! What can go wrong between a sandbox and its gate.

use std::io;

/// A step of the kernel's that failed.
#[derive(Debug, thiserror::Error)]
pub enum EgressError {
    /// The namespace, its links or its rules.
    #[error("{step}: {source}")]
    Network {
        /// What was done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The thread that enters namespaces is gone.
    #[error("the thread that enters network namespaces has ended")]
    NoWorker,
}

// === impl EgressError ===

impl EgressError {
    /// For `map_err`.
    pub(crate) fn step<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Network {
            step,
            source: source.into(),
        }
    }
}
