//! End of a session: by its owner, by expiry, or by the death of its sandbox.

use super::{Sessions, Shared};
use crate::Error;
use crate::error::chain;
use crate::live::{Live, left_active};
use crate::metrics;
use crate::recorder::now_ms;
use k8e_driver::{DriverError, Sandbox};
use k8e_model::{Phase, Principal, SessionId};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Back-off between attempts to remove a sandbox: a busy mount is free a moment later.
const RETRY_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

// === impl Sessions ===

impl Sessions {
    /// Destroys a session and kills its commands. Idempotent: a second caller waits for the same end.
    pub async fn destroy(&self, who: &Principal, id: &SessionId) -> Result<(), Error> {
        let audit = self.audited(who, "session.destroy", id.as_str());
        let Some(live) = self.shared.find(who, id) else {
            return audit.end(Err(Error::SessionNotFound(id.clone())));
        };
        let mut phases = live.phases();
        // Waits for a creation in progress: only that knows how far its launch is.
        phases.wait_for(|phase| *phase > Phase::Creating).await.ok();
        // A sub-agent's processes can be killed only while its sandbox runs.
        if live.parent().is_some()
            && let Err(paused) = live.check_awake()
        {
            return audit.end(Err(paused));
        }
        self.shared
            .end(&live, "destroyed", "its owner destroyed it");
        audit.end(live.ended().await)
    }
}

// === impl Shared ===

impl Shared {
    /// Begins the end of a session, once; a background task finishes it, and [`Live::ended`] waits for that.
    pub(crate) fn end(self: &Arc<Self>, live: &Arc<Live>, event: &'static str, reason: &str) {
        if live.begin_end(reason) {
            self.end_begun(live, event, reason);
        }
    }

    /// The same for a session that was used by no more than one failed call; else a no-op.
    pub(crate) fn end_unused(
        self: &Arc<Self>,
        live: &Arc<Live>,
        event: &'static str,
        reason: &str,
    ) {
        if live.begin_end_unused(reason) {
            self.end_begun(live, event, reason);
        }
    }

    fn end_begun(self: &Arc<Self>, live: &Arc<Live>, event: &'static str, reason: &str) {
        metrics::ended(live.record.runtime, event);
        self.index().retire(live);
        // During shutdown no new work begins: the next start's recovery ends sessions that are not recorded as
        // ended. Work in progress is waited for.
        let Ok(work) = Arc::clone(&self.work).try_read_owned() else {
            live.finish_end(Some("the server is stopping".to_owned()));
            return;
        };
        let (shared, live, reason) = (Arc::clone(self), Arc::clone(live), reason.to_owned());
        self.runtime.spawn(async move {
            let _work = work;
            shared.finish_end(&live, event, reason).await;
        });
    }

    /// Ends a session because of its sandbox; for a sub-agent, which shares it, the parent too.
    pub(crate) fn end_sandbox(
        self: &Arc<Self>,
        live: &Arc<Live>,
        event: &'static str,
        reason: &str,
    ) {
        if let Some(parent) = live.parent() {
            self.end(parent, event, reason);
        }
        self.end(live, event, reason);
    }

    async fn finish_end(
        self: Arc<Self>,
        live: &Arc<Live>,
        event: &'static str,
        mut reason: String,
    ) {
        let id = &live.record.id;
        self.record_phase(id, Phase::Terminating, &reason).await;
        self.forget_exposures(live).await;
        self.end_sub_agents(live).await;
        let failure = match live.parent() {
            Some(parent) => {
                self.end_inside(live, parent).await;
                None
            }
            None => remove_sandbox(live).await.err().map(|e| chain(&e)),
        };
        self.forget_terminals(live).await;
        if let Some(failure) = &failure {
            tracing::error!(session = %id, sandbox = %live.record.sandbox, failure, "sandbox removal failed");
            reason = format!(
                "{reason}; removing its sandbox failed, the next start of the server tries again: {failure}"
            );
        }
        self.record_phase(id, Phase::Ended, &reason).await;
        let record = &live.record;
        self.recorder
            .event(record, event, json!({ "reason": reason }));
        self.store.close_transcript(&record.sandbox);
        self.index().remove(live);
        if let Some(parent) = live.parent() {
            parent.remove_sub_agent(live);
        }
        live.finish_end(failure);
        self.trim().await;
    }

    /// Drops a live session that has no record: the record under its id belongs to another session and
    /// must not change.
    pub(super) fn forget(&self, live: &Arc<Live>, reason: &str) {
        live.begin_end(reason);
        self.index().remove(live);
        live.finish_end(None);
    }

    /// Stores a phase. A failed write is repaired by recovery, which ends every record without a live sandbox.
    async fn record_phase(&self, id: &SessionId, phase: Phase, reason: &str) {
        if let Err(e) = self.store.set_phase(id, phase, reason, now_ms()).await {
            tracing::warn!(session = %id, phase = phase.as_str(), error = chain(&e), "a session's phase cannot be stored");
        }
    }
}

/// Removes a session's own sandbox, after a freeze or thaw in progress.
async fn remove_sandbox(live: &Live) -> Result<(), DriverError> {
    let _turn = live.pause_turn().await;
    // The gate's sockets keep the sandbox's network namespace alive.
    live.set_gate(None);
    match live.sandbox() {
        Some(sandbox) => remove(sandbox).await,
        None => Ok(()),
    }
}

/// Destroys a sandbox, with retries and back-off.
pub(crate) async fn remove(sandbox: &Arc<dyn Sandbox>) -> Result<(), DriverError> {
    for pause in RETRY_PAUSES {
        if sandbox.destroy().await.is_ok() {
            return Ok(());
        }
        sleep(pause).await;
    }
    sandbox.destroy().await
}

/// Hint for a session that ran out of memory. A session keeps the limits of its creation,
/// so no flag of a later run raises them.
fn more_memory(limit_bytes: u64, max_bytes: u64) -> String {
    let limit = k8e_model::size_text(limit_bytes);
    match limit_bytes.saturating_mul(2).min(max_bytes) {
        more if more > limit_bytes => format!(
            "its limit was {limit}, which a session keeps; make a new one with more, \
             as in `k8e sandbox create --memory {}`",
            k8e_model::size_text(more)
        ),
        _ => format!(
            "its limit was {limit}, the most that this server gives: use less memory, \
             or restart the server with a higher --max-memory"
        ),
    }
}

/// Background task: ends the session when its sandbox dies.
pub(super) async fn watch_over(shared: Arc<Shared>, live: Arc<Live>) {
    let Some(sandbox) = live.sandbox() else {
        return;
    };
    let mut phases = live.phases();
    tokio::select! {
        () = sandbox.died() => {}
        () = left_active(&mut phases) => return,
        () = shared.stopped() => return,
    }
    let reason = match live.limit_events().oom_kills {
        0 => "the sandbox died".to_owned(),
        kills => format!(
            "the sandbox died after {kills} of its processes were killed for memory: {}",
            more_memory(
                live.record.limits.memory_bytes,
                shared.config.limits_max.memory_bytes
            )
        ),
    };
    shared.end(&live, "died", &reason);
}
