//! TTL expiry and idle expiry of sessions, and retention of the records of ended ones. One background task, woken at the
//! next deadline.

use super::Shared;
use crate::error::chain;
use crate::recorder::now_ms;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Longest interval between retention passes.
const PURGE_EVERY: Duration = Duration::from_secs(600);

/// Background task: expires sessions until shutdown.
pub(super) async fn expire(shared: Arc<Shared>) {
    let mut purge_at = Instant::now();
    loop {
        let now = Instant::now();
        if purge_at <= now {
            shared.purge().await;
            purge_at = Instant::now()
                + PURGE_EVERY.min(shared.config.ended_kept.max(Duration::from_secs(1)));
        }
        let next = shared.expire_due(now).unwrap_or(purge_at).min(purge_at);
        tokio::select! {
            () = shared.stopped() => return,
            () = sleep_until(next) => {}
            () = shared.expiry.notified() => {}
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Ends sessions that are due; returns the next deadline. A use only ever postpones expiry,
    /// so it does not touch the queue of deadlines: a session used since is rescheduled here.
    fn expire_due(self: &Arc<Self>, now: Instant) -> Option<Instant> {
        loop {
            let mut index = self.index();
            let (at, id) = index.deadlines.first().cloned()?;
            if at > now {
                return Some(at);
            }
            index.deadlines.remove(&(at, id.clone()));
            let Some(live) = index.sessions.get(&id).cloned() else {
                continue;
            };
            match live.ends_at(now) {
                Some(ends_at) if ends_at > now => index.schedule(&live, ends_at),
                Some(_) => {
                    drop(index);
                    self.end(&live, "expired", &live.expiry_reason(now));
                }
                None => {}
            }
        }
    }

    async fn purge(&self) {
        let kept = i64::try_from(self.config.ended_kept.as_millis()).unwrap_or(i64::MAX);
        match self.store.purge_ended(now_ms().saturating_sub(kept)).await {
            Ok(0) => {}
            Ok(sessions) => tracing::debug!(sessions, "retention: removed expired records"),
            Err(e) => tracing::warn!(
                error = chain(&e),
                "retention: expired records cannot be removed"
            ),
        }
        self.trim().await;
    }

    /// Retention by count and size of what ended sessions leave. Called at every end; single-flight.
    pub(super) async fn trim(&self) {
        self.trim_again.store(true, Ordering::SeqCst);
        // Single-flight: one caller trims for all. A caller that comes after its last check of the flag
        // runs the loop itself.
        while self.trim_again.load(Ordering::SeqCst) {
            let Ok(_trimming) = self.trimming.try_lock() else {
                return;
            };
            while self.trim_again.swap(false, Ordering::SeqCst) {
                self.trim_once().await;
            }
        }
    }

    async fn trim_once(&self) {
        let (records_max, bytes_max) = (self.config.ended_max, self.config.ended_bytes_max);
        let trimmed = async {
            if !self.store.ended_too_many(records_max, bytes_max).await? {
                return Ok(0);
            }
            // Queued output would create a removed transcript again.
            self.recorder.flush().await;
            self.store.trim_ended(records_max, bytes_max).await
        };
        match trimmed.await {
            Ok(0) => {}
            Ok(sessions) => tracing::debug!(sessions, "retention: removed records over the limit"),
            Err(e) => tracing::warn!(
                error = chain(&e),
                "retention: records over the limit cannot be removed"
            ),
        }
    }
}
