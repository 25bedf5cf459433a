//! Writes that may wait a moment, so that several changes become one.

use crate::cache::Key;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// When each held write is due.
#[derive(Default)]
pub(crate) struct Gathering {
    due: Mutex<HashMap<Key, Instant>>,
}

// === impl Gathering ===

impl Gathering {
    /// How long the write for this key is still to be held; `None` when it is due.
    pub(crate) fn hold(&self, key: &Key, window: Duration) -> Option<Duration> {
        let now = Instant::now();
        let mut due = self.lock();
        let at = *due.entry(key.clone()).or_insert(now + window);
        if at > now {
            return Some(at - now);
        }
        due.remove(key);
        None
    }

    /// As [`Self::hold`], but what is due stays due until it is released.
    pub(crate) fn left(&self, key: &Key, window: Duration) -> Option<Duration> {
        let now = Instant::now();
        let at = *self.lock().entry(key.clone()).or_insert(now + window);
        (at > now).then(|| at - now)
    }

    /// The write was made.
    pub(crate) fn release(&self, key: &Key) {
        self.lock().remove(key);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Instant>> {
        self.due.lock().expect("no holder of the times panics")
    }
}

/// Which keys are in a state, to tell when that changes.
#[derive(Default)]
pub(crate) struct Known {
    keys: Mutex<std::collections::HashSet<Key>>,
}

// === impl Known ===

impl Known {
    /// Notes the state of a key; whether that is news.
    pub(crate) fn changed(&self, key: &Key, state: bool) -> bool {
        let mut keys = self.keys.lock().expect("no holder of the set panics");
        if state {
            keys.insert(key.clone())
        } else {
            keys.remove(key)
        }
    }
}
