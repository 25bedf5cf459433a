//! Snapshots: archives, which clients import, and entries, which guests send.

use crate::outcome;
use k8e_snapshot::fuzzing;

pub(super) fn archives(bytes: &[u8]) -> u64 {
    let dir = std::env::temp_dir().join(format!("k8e-fuzz-snapshot-{}", std::process::id()));
    let archive = fuzzing::archive(bytes, &dir);
    // The next input meets an empty store.
    let _ = std::fs::remove_dir_all(&dir);
    let (entries, paths) = fuzzing::entries(bytes);
    for path in &paths {
        let plain = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && !name.contains(&0);
        let inside = path.is_empty() || path.split(|byte| *byte == b'/').all(plain);
        assert!(inside, "a path that leads out: {path:?}");
    }
    outcome(&format!("{archive}; {entries}"))
}
