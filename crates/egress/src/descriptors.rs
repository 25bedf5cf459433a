//! File descriptors for the connections of all sandboxes: one budget, shared by a rule that leaves
//! room for others.
//!
//! A process that has no descriptors left serves nobody: it accepts no client, makes no sandbox and
//! finds no name. So connections of sandboxes may take a part of the limit only ([`Budget`]), and
//! one sandbox a part of that ([`Share`]): it may take more only while it has no more than are free
//! (the dynamic threshold of packet buffers in switches, Choudhury and Hahne, 1998). Connections
//! last, and those that a sandbox has are not taken from it. So a quarter of the budget is kept for
//! sandboxes that have few: many that took all they could leave that to whoever comes next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A connection through the gate: the sandbox's side and the server's.
pub(crate) const OF_CONNECTION: usize = 2;

/// A connection to the resolver: the sandbox's side.
pub(crate) const OF_DNS_CONNECTION: usize = 1;

/// A sandbox with no more than this has few: what a package manager or a browser opens at once.
const FEW: usize = 8 * OF_CONNECTION;

/// One part in so many of the budget is for sandboxes that have few.
const KEPT_PART: usize = 4;

/// The descriptors of all sandboxes' connections.
#[derive(Debug)]
pub(crate) struct Budget {
    free: Mutex<usize>,
    /// How many of them are for sandboxes that have few.
    kept: usize,
}

/// One sandbox's part of a budget.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    /// Changed only with the budget locked.
    taken: Mutex<usize>,
}

/// Descriptors that may be open. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Descriptors {
    share: Arc<Share>,
    count: usize,
}

// === impl Budget ===

impl Budget {
    /// So many descriptors.
    pub(crate) fn new(descriptors: usize) -> Self {
        Self {
            free: Mutex::new(descriptors),
            kept: descriptors / KEPT_PART,
        }
    }
}

// === impl Share ===

impl Share {
    /// Nothing of it yet.
    pub(crate) fn new(budget: Arc<Budget>) -> Self {
        Self {
            budget,
            taken: Mutex::new(0),
        }
    }

    /// `count` more, if that leaves as many free as this sandbox then has. The first are an
    /// exception, when there are any.
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
    // A panic in between leaves a number that is still a number.
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

    /// As many connections as it can get.
    fn all(share: &Arc<Share>) -> Vec<Descriptors> {
        std::iter::from_fn(|| share.take(OF_CONNECTION)).collect()
    }

    #[test]
    fn whoever_is_alone_leaves_more_than_half() {
        let shares = shares(400, 1);
        assert_eq!(all(&shares[0]).len(), 75);
        // And again, when they are given back.
        assert_eq!(all(&shares[0]).len(), 75);
    }

    #[test]
    fn whoever_takes_all_it_can_leaves_room_for_the_next() {
        let held: Vec<_> = shares(1024, 20).iter().map(all).collect();
        let least = held.iter().map(Vec::len).min().unwrap();
        assert_eq!(least, FEW / OF_CONNECTION, "{held:?}");
        // Far beyond what the budget is for, somebody still gets one.
        let held: Vec<_> = shares(64, 7).iter().map(all).collect();
        assert!(held.iter().all(|held| !held.is_empty()), "{held:?}");
    }

    #[test]
    fn nobody_gets_what_is_not_there() {
        let one = shares(1, 1);
        assert!(one[0].take(OF_CONNECTION).is_none());
        let dns = one[0].take(OF_DNS_CONNECTION);
        assert!(dns.is_some() && one[0].take(OF_DNS_CONNECTION).is_none());
        drop(dns);
        assert!(one[0].take(OF_DNS_CONNECTION).is_some());
    }

    proptest! {
        #[test]
        fn what_is_taken_and_what_is_free_is_all(
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
