//! Limit of open file descriptors (RLIMIT_NOFILE): raised to its maximum for every role that serves connections.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit to the hard limit: each client and each command needs a few descriptors.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if setrlimit(Resource::Nofile, raised).is_err() {
        tracing::warn!(
            "cannot raise the limit of {:?} open files (RLIMIT_NOFILE)",
            limit.current
        );
    }
}

/// The current soft limit.
pub(crate) fn limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}
