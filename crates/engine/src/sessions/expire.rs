//! Ends sessions whose time is over, and removes old records. One task, woken at the next deadline.

use super::Shared;
use crate::error::chain;
use crate::recorder::now_ms;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// How often old records are looked for, at least.
const PURGE_EVERY: Duration = Duration::from_secs(600);

/// Runs until shutdown.
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
    /// Ends what is due; returns when the next one may be. A use only ever moves an end further
    /// away, so it does not touch the deadlines: one that was used since is put back here.
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
            Ok(sessions) => tracing::debug!(sessions, "removed old records"),
            Err(e) => tracing::warn!(error = chain(&e), "old records cannot be removed"),
        }
        self.trim().await;
    }

    /// Keeps what is left of ended sessions within its bounds. Called at every end.
    pub(super) async fn trim(&self) {
        self.trim_again.store(true, Ordering::SeqCst);
        // One does it for all. Who asks when that one has looked for the last time does it himself.
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
            // What is still on its way would make a removed transcript anew.
            self.recorder.flush().await;
            self.store.trim_ended(records_max, bytes_max).await
        };
        match trimmed.await {
            Ok(0) => {}
            Ok(sessions) => tracing::debug!(sessions, "removed records: there were too many"),
            Err(e) => tracing::warn!(error = chain(&e), "surplus records cannot be removed"),
        }
    }
}
