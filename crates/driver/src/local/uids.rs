//! Allocator of uid ranges: each sandbox has its own range of host uids.
//!
//! The numbers come from 0x7000_0000 on, which distributions leave unassigned. The first slot is
//! chosen at random and used slots are never given twice, so two servers on one machine rarely
//! meet; where they do, their sandboxes are still apart by every other namespace.
//!
//! A range is its sandbox's for as long as the sandbox's directory exists, which goes last, or its saved state.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Size of a range: uids 0 to 65535 inside.
pub(crate) const RANGE: u32 = 65536;

const FIRST: u32 = 0x7000_0000;
const SLOTS: u32 = 4095;

/// The range behind all of them, which no process but an unpacker ever has: the files of images belong
/// to it on disk, so none is root's or a user's of the host, and set-user-id bits mean nothing there.
pub(crate) const LAYERS: u32 = FIRST + SLOTS * RANGE;

/// Which ranges are taken, by their first number: at most [`SLOTS`].
#[derive(Debug, Default)]
pub(crate) struct Uids {
    taken: HashMap<u32, Vec<PathBuf>>,
}

// === impl Uids ===

impl Uids {
    /// Takes a free range for the sandbox whose directory is `dir`, which exists; its first number,
    /// or none when all are taken.
    pub(crate) fn take(&mut self, dir: &Path) -> Option<u32> {
        let start = random() % SLOTS;
        let base = (0..SLOTS)
            .map(|i| FIRST + (start + i) % SLOTS * RANGE)
            .find(|base| !self.is_taken(*base))?;
        self.taken.remove(&base);
        self.keep(base, dir.to_owned());
        Some(base)
    }

    /// Marks a range as taken as long as `dir` exists: of a sandbox of an earlier server, or its saved state.
    pub(crate) fn keep(&mut self, base: u32, dir: PathBuf) {
        let dirs = self.taken.entry(base).or_default();
        dirs.retain(|other| *other != dir);
        dirs.push(dir);
    }

    fn is_taken(&self, base: u32) -> bool {
        let dirs = self.taken.get(&base);
        dirs.is_some_and(|dirs| dirs.iter().any(|dir| dir.exists()))
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
