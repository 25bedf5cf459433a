//! Errors of setting up a sandbox's network.

use std::io;

/// Why a sandbox's network could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum EgressError {
    /// A system call on the namespace, its links, its rules or its sockets failed.
    #[error("{step}: {source}")]
    Network {
        /// The operation and its object.
        step: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// The thread that enters network namespaces panicked.
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
