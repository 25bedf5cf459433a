//! The host's user numbers that sandboxes run as: a range of its own for each.
//!
//! The numbers come from 0x7000_0000 on, which distributions leave unassigned. The first slot is
//! chosen at random and used slots are never given twice, so two servers on one machine rarely
//! meet; where they do, their sandboxes are still apart by every other namespace.

use std::collections::HashSet;
use std::sync::Mutex;

/// What a sandbox sees as 0 to 65535.
pub(crate) const RANGE: u32 = 65536;

const FIRST: u32 = 0x7000_0000;
const SLOTS: u32 = 4095;

/// Which slots are taken.
#[derive(Debug, Default)]
pub(crate) struct Uids {
    taken: Mutex<HashSet<u32>>,
}

// === impl Uids ===

impl Uids {
    /// Takes a free range; its first number, or none when all are taken.
    pub(crate) fn take(&self) -> Option<u32> {
        let mut taken = self.lock();
        let start = random() % SLOTS;
        let base = (0..SLOTS)
            .map(|i| FIRST + (start + i) % SLOTS * RANGE)
            .find(|base| !taken.contains(base))?;
        taken.insert(base);
        Some(base)
    }

    /// Marks a range of an adopted sandbox as taken.
    pub(crate) fn keep(&self, base: u32) {
        self.lock().insert(base);
    }

    /// Gives a range back.
    pub(crate) fn free(&self, base: u32) {
        self.lock().remove(&base);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<u32>> {
        self.taken
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn random() -> u32 {
    use std::hash::{BuildHasher as _, Hasher as _};
    let hash = std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish();
    u32::try_from(hash >> 32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_come_back() {
        let uids = Uids::default();
        let all: HashSet<u32> = (0..SLOTS).map(|_| uids.take().unwrap()).collect();
        assert_eq!(all.len(), SLOTS as usize);
        assert!(all.iter().all(|base| {
            base.checked_add(RANGE)
                .is_some_and(|end| end <= 0x8000_0000)
                && base % RANGE == 0
        }));
        assert_eq!(uids.take(), None);
        uids.free(FIRST);
        assert_eq!(uids.take(), Some(FIRST));
    }
}
