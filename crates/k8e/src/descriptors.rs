//! How many files this process may have open: every role that serves connections wants as many as it can get.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// As many descriptors as we may have: each client and each command costs a few.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if setrlimit(Resource::Nofile, raised).is_err() {
        tracing::warn!(
            "the limit of {:?} open files could not be raised",
            limit.current
        );
    }
}

/// How many descriptors this process may have open now.
pub(crate) fn limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}
