//! When claims were first observed and first ready, for latency metrics and annotations. In memory only, so that it
//! does not delay a claim.

use crate::cache::Key;
use crate::crd::SandboxClaim;
use crate::crd::conditions::{READY, is_true};
use k8s_openapi::jiff::Timestamp;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The operator counts as busy with claims until this long after the last new one.
const BUSY_FOR: Duration = Duration::from_millis(500);

/// Timestamps of one claim.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) uid: String,
    pub(crate) observed: Timestamp,
    pub(crate) ready: Option<Timestamp>,
    /// It was ready when this process started: its latency is not known.
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
                .expect("no code panics under this lock") = Some(Instant::now());
        }
        self.lock().insert(Key::of(&claim.metadata), seen);
    }

    /// Records that the claim is ready. Returns its timestamps the first time.
    pub(crate) fn became_ready(&self, key: &Key) -> Option<Seen> {
        let mut all = self.lock();
        let seen = all.get_mut(key).filter(|seen| seen.ready.is_none())?;
        seen.ready = Some(Timestamp::now());
        (!seen.old).then(|| seen.clone())
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Seen> {
        self.lock().get(key).cloned()
    }

    /// Whether a new claim was observed within the last 500 ms.
    pub(crate) fn is_busy(&self) -> bool {
        let last = *self
            .last_claim
            .lock()
            .expect("no code panics under this lock");
        last.is_some_and(|last| last.elapsed() <= BUSY_FOR)
    }

    pub(crate) fn forget(&self, key: &Key) {
        self.lock().remove(key);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Seen>> {
        self.seen.lock().expect("no code panics under this lock")
    }
}
