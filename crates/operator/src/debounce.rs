//! Debounce: coalesces several writes for one key into one, after a window of time.

use crate::cache::Key;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// When the coalesced write of each key is due. The first change of a key opens its window; later ones fall into it.
#[derive(Default)]
pub(crate) struct Debounce {
    due: Mutex<HashMap<Key, Instant>>,
}

// === impl Debounce ===

impl Debounce {
    /// Time until the write for this key is due. `None`: it is due now, and the next change opens a new window.
    pub(crate) fn delay(&self, key: &Key, window: Duration) -> Option<Duration> {
        let now = Instant::now();
        let mut due = self.lock();
        let at = *due.entry(key.clone()).or_insert(now + window);
        if at > now {
            return Some(at - now);
        }
        due.remove(key);
        None
    }

    /// As [`Self::delay`], but a window that ran out stays so until [`Self::clear`].
    pub(crate) fn remaining(&self, key: &Key, window: Duration) -> Option<Duration> {
        let now = Instant::now();
        let at = *self.lock().entry(key.clone()).or_insert(now + window);
        (at > now).then(|| at - now)
    }

    /// Closes the window of a key: the write was made, or the object is gone.
    pub(crate) fn clear(&self, key: &Key) {
        self.lock().remove(key);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Instant>> {
        self.due.lock().expect("no code panics under this lock")
    }
}
