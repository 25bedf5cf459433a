//! Detects that the process limit was reached, where the kernel inside enforces it (gVisor's `RLIMIT_NPROC`) and
//! has no counter of refused forks: the number of processes is sampled whenever a command writes output or ends,
//! as commands do whose fork fails.

use crate::sys;
use std::sync::atomic::{AtomicU64, Ordering};

/// Samples the number of processes and threads.
#[derive(Debug)]
pub(crate) struct ProcessLimit {
    /// The limit; none where the host counts refused forks.
    max: Option<u64>,
    /// Samples at which the limit was reached.
    reached: AtomicU64,
}

// === impl ProcessLimit ===

impl ProcessLimit {
    pub(crate) fn new(max: Option<u64>) -> Self {
        Self {
            max,
            reached: AtomicU64::new(0),
        }
    }

    /// Takes a sample: one system call, or none where the host counts.
    pub(crate) fn look(&self) {
        if self.max.is_some_and(|max| sys::processes() >= max) {
            self.reached.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Number of samples at which it was reached.
    pub(crate) fn times_reached(&self) -> u64 {
        self.reached.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_reached_is_seen_and_none_is_not_looked_at() {
        for (max, times) in [(Some(1), 1), (Some(u64::MAX), 0), (None, 0)] {
            let limit = ProcessLimit::new(max);
            limit.look();
            assert_eq!(limit.times_reached(), times, "{max:?}");
        }
    }
}
