//! The host's user numbers that sandboxes run as: a range of its own for each.
//!
//! The numbers come from 0x7000_0000 on, which distributions leave unassigned. The first slot is
//! chosen at random and used slots are never given twice, so two servers on one machine rarely
//! meet; where they do, their sandboxes are still apart by every other namespace.
//!
//! A range is its sandbox's for as long as the sandbox's directory exists, which goes last.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What a sandbox sees as 0 to 65535.
pub(crate) const RANGE: u32 = 65536;

const FIRST: u32 = 0x7000_0000;
const SLOTS: u32 = 4095;

/// Which ranges are taken, by their first number: at most [`SLOTS`].
#[derive(Debug, Default)]
pub(crate) struct Uids {
    taken: HashMap<u32, PathBuf>,
}

// === impl Uids ===

impl Uids {
    /// Takes a free range for the sandbox whose directory is `dir`, which exists; its first number,
    /// or none when all are taken.
    pub(crate) fn take(&mut self, dir: &Path) -> Option<u32> {
        let start = random() % SLOTS;
        let base = (0..SLOTS)
            .map(|i| FIRST + (start + i) % SLOTS * RANGE)
            .find(|base| self.taken.get(base).is_none_or(|dir| !dir.exists()))?;
        self.keep(base, dir.to_owned());
        Some(base)
    }

    /// Marks a range of a sandbox of an earlier server as taken.
    pub(crate) fn keep(&mut self, base: u32, dir: PathBuf) {
        self.taken.insert(base, dir);
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
    use std::collections::HashSet;

    #[test]
    fn ranges_never_overlap_and_come_back_with_the_end_of_their_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let (first, others) = (dir.path().join("first"), dir.path().join("others"));
        std::fs::create_dir(&first).unwrap();
        std::fs::create_dir(&others).unwrap();
        let mut uids = Uids::default();
        let mut all: HashSet<u32> = (1..SLOTS).map(|_| uids.take(&others).unwrap()).collect();
        let last = uids.take(&first).unwrap();
        assert!(all.insert(last));
        assert_eq!(all.len(), SLOTS as usize);
        assert!(all.iter().all(|base| {
            base.checked_add(RANGE)
                .is_some_and(|end| end <= 0x8000_0000)
                && base % RANGE == 0
        }));
        assert_eq!(uids.take(&others), None);
        std::fs::remove_dir(&first).unwrap();
        assert_eq!(uids.take(&others), Some(last));
    }
}
