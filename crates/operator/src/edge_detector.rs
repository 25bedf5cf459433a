//! Edge detector: reports when a condition of an object begins or ends, so that an event is sent once for each change.

use crate::cache::Key;
use std::collections::HashSet;
use std::sync::Mutex;

/// The keys for which one condition is true.
#[derive(Default)]
pub(crate) struct EdgeDetector {
    active: Mutex<HashSet<Key>>,
}

// === impl EdgeDetector ===

impl EdgeDetector {
    /// Records whether the condition is true for this key. Returns whether that differs from the last call.
    pub(crate) fn changed(&self, key: &Key, now: bool) -> bool {
        let mut active = self.active.lock().expect("no code panics under this lock");
        if now {
            active.insert(key.clone())
        } else {
            active.remove(key)
        }
    }
}
