//! When claims were first seen and first ready, for metrics and annotations; kept in memory, off the path of a claim.

use crate::cache::Key;
use crate::crd::SandboxClaim;
use crate::crd::conditions::{READY, is_true};
use k8s_openapi::jiff::Timestamp;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Claims come in while the last one is not older than this.
const CALM: Duration = Duration::from_millis(500);

/// What is known of a claim's way to its sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) uid: String,
    pub(crate) observed: Timestamp,
    pub(crate) ready: Option<Timestamp>,
    /// It was ready when this process began: nothing is measured.
    pub(crate) old: bool,
}

#[derive(Default)]
pub(crate) struct Timings {
    seen: Mutex<HashMap<Key, Seen>>,
    last_claim: Mutex<Option<Instant>>,
}

// === impl Timings ===

impl Timings {
    pub(crate) fn saw(&self, claim: &SandboxClaim) {
        let seen = Seen {
            uid: claim.metadata.uid.clone().unwrap_or_default(),
            observed: Timestamp::now(),
            ready: None,
            old: is_true(claim.condition(READY)),
        };
        if !seen.old {
            *self
                .last_claim
                .lock()
                .expect("no holder of the time panics") = Some(Instant::now());
        }
        self.lock().insert(Key::of(&claim.metadata), seen);
    }

    /// The claim is ready; what was measured, the first time.
    pub(crate) fn became_ready(&self, key: &Key) -> Option<Seen> {
        let mut all = self.lock();
        let seen = all.get_mut(key).filter(|seen| seen.ready.is_none())?;
        seen.ready = Some(Timestamp::now());
        (!seen.old).then(|| seen.clone())
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Seen> {
        self.lock().get(key).cloned()
    }

    /// Whether somebody asked for a sandbox lately.
    pub(crate) fn claims_come_in(&self) -> bool {
        let last = *self
            .last_claim
            .lock()
            .expect("no holder of the time panics");
        last.is_some_and(|last| last.elapsed() <= CALM)
    }

    pub(crate) fn forget(&self, key: &Key) {
        self.lock().remove(key);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Seen>> {
        self.seen.lock().expect("no holder of the times panics")
    }
}
