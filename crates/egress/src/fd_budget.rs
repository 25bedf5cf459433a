//! File descriptor budget for the connections of all sandboxes, shared by a dynamic threshold.
//!
//! A process without free descriptors serves nobody: it accepts no client, makes no sandbox and
//! resolves no name. So connections of sandboxes may use only a part of `RLIMIT_NOFILE` ([`Budget`]),
//! and one sandbox only a part of that ([`Share`]): it may take more only while it has no more than
//! are free (the dynamic threshold of packet buffers in switches, Choudhury and Hahne, 1998).
//! Connections are long-lived and never revoked, so a quarter of the budget is reserved for sandboxes
//! that have few: however many greedy sandboxes there are, the next one still gets connections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Descriptors of a proxied connection: downstream and upstream socket.
pub(crate) const CONNECTION_FDS: usize = 2;

/// Descriptors of a DNS connection over TCP: the downstream socket.
pub(crate) const DNS_CONNECTION_FDS: usize = 1;

/// A sandbox with no more descriptors than this has few: what a package manager or a browser opens at
/// once.
const FEW: usize = 8 * CONNECTION_FDS;

/// `1 / KEPT_PART` of the budget is reserved for sandboxes that have few.
const KEPT_PART: usize = 4;

/// The file descriptor budget of all sandboxes.
#[derive(Debug)]
pub(crate) struct Budget {
    free: Mutex<usize>,
    /// Descriptors reserved for sandboxes that have few.
    kept: usize,
}

/// What one sandbox has taken of a budget.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    /// Changed only while the budget is locked.
    taken: Mutex<usize>,
}

/// Descriptors taken from the budget. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Descriptors {
    share: Arc<Share>,
    count: usize,
}

// === impl Budget ===

impl Budget {
    pub(crate) fn new(descriptors: usize) -> Self {
        Self {
            free: Mutex::new(descriptors),
            kept: descriptors / KEPT_PART,
        }
    }
}

// === impl Share ===

impl Share {
    pub(crate) fn new(budget: Arc<Budget>) -> Self {
        Self {
            budget,
            taken: Mutex::new(0),
        }
    }

    /// Takes `count` more, if that leaves at least as many free as this sandbox then has. A sandbox
    /// that has none gets its first as long as there are any.
    pub(crate) fn take(self: &Arc<Self>, count: usize) -> Option<Descriptors> {
        let mut free = locked(&self.budget.free);
        let mut taken = locked(&self.taken);
        let (left, has) = (free.checked_sub(count)?, *taken + count);
        let for_all = left.saturating_sub(self.budget.kept);
        let for_few = if has <= FEW { left } else { 0 };
        if *taken > 0 && has > for_all.max(for_few) {
            return None;
        }
        (*free, *taken) = (left, has);
        Some(Descriptors {
            share: Arc::clone(self),
            count,
        })
    }
}

// === impl Descriptors ===

impl Drop for Descriptors {
    fn drop(&mut self) {
        let mut free = locked(&self.share.budget.free);
        let mut taken = locked(&self.share.taken);
        *free += self.count;
        *taken = taken.saturating_sub(self.count);
    }
}

fn locked(count: &Mutex<usize>) -> MutexGuard<'_, usize> {
    // A panic while it was locked leaves a valid number.
    count.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shares(descriptors: usize, count: usize) -> Vec<Arc<Share>> {
        let budget = Arc::new(Budget::new(descriptors));
        let share = |_| Arc::new(Share::new(Arc::clone(&budget)));
        (0..count).map(share).collect()
    }

    /// Takes connections until the budget refuses.
    fn all(share: &Arc<Share>) -> Vec<Descriptors> {
        std::iter::from_fn(|| share.take(CONNECTION_FDS)).collect()
    }

    #[test]
    fn a_single_sandbox_leaves_more_than_half() {
        let shares = shares(400, 1);
        assert_eq!(all(&shares[0]).len(), 75);
        // The same again after they were given back.
        assert_eq!(all(&shares[0]).len(), 75);
    }

    #[test]
    fn greedy_sandboxes_leave_room_for_the_next() {
        let held: Vec<_> = shares(1024, 20).iter().map(all).collect();
        let least = held.iter().map(Vec::len).min().unwrap();
        assert_eq!(least, FEW / CONNECTION_FDS, "{held:?}");
        // Even with far more sandboxes than the budget is for, each gets one.
        let held: Vec<_> = shares(64, 7).iter().map(all).collect();
        assert!(held.iter().all(|held| !held.is_empty()), "{held:?}");
    }

    #[test]
    fn an_empty_budget_refuses() {
        let one = shares(1, 1);
        assert!(one[0].take(CONNECTION_FDS).is_none());
        let dns = one[0].take(DNS_CONNECTION_FDS);
        assert!(dns.is_some() && one[0].take(DNS_CONNECTION_FDS).is_none());
        drop(dns);
        assert!(one[0].take(DNS_CONNECTION_FDS).is_some());
    }

    proptest! {
        #[test]
        fn taken_and_free_add_up_to_the_budget(
            budget in 0usize..200,
            steps in proptest::collection::vec((0usize..5, any::<bool>(), 1usize..3), 0..200),
        ) {
            let shares = shares(budget, 5);
            let mut held: Vec<Vec<Descriptors>> = (0..5).map(|_| Vec::new()).collect();
            for (who, takes, count) in steps {
                if takes {
                    held[who].extend(shares[who].take(count));
                } else {
                    held[who].pop();
                }
                let taken: usize = held.iter().flatten().map(|one| one.count).sum();
                let free = *shares[0].budget.free.lock().unwrap();
                prop_assert_eq!(taken + free, budget);
            }
        }
    }
}
