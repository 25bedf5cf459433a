//! Ending a session, whoever wants it: its owner, its lifetime, or the death of its sandbox.

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

/// Pauses between attempts to remove a sandbox: a busy mount is free a moment later.
const RETRY_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

// === impl Sessions ===

impl Sessions {
    /// Destroys a session. Commands under way in it end; a second caller waits for the same end.
    pub async fn destroy(&self, who: &Principal, id: &SessionId) -> Result<(), Error> {
        let audit = self.audited(who, "session.destroy", id.as_str());
        let Some(live) = self.shared.find(who, id) else {
            return audit.end(Err(Error::SessionNotFound(id.clone())));
        };
        let mut phases = live.phases();
        // One that is being made is first made: nothing else knows how far its launch is.
        phases.wait_for(|phase| *phase > Phase::Creating).await.ok();
        // What a sub-agent started can be ended only while its sandbox runs.
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
    /// Begins the end of a session, once; the rest happens by itself and [`Live::ended`] waits for it.
    pub(crate) fn end(self: &Arc<Self>, live: &Arc<Live>, event: &'static str, reason: &str) {
        if live.begin_end(reason) {
            self.end_begun(live, event, reason);
        }
    }

    /// The same of a session in which nothing has been started but one call that failed.
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
        // While the server stops nothing new begins: recovery ends what is recorded as not over. What began
        // before, it waits for.
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

    /// Ends a session because of its sandbox: of a sub-agent that is its parent's, who ends with it.
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
            tracing::error!(session = %id, sandbox = %live.record.sandbox, failure, "removing a sandbox failed");
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
            parent.disown(live);
        }
        live.finish_end(failure);
        self.trim().await;
    }

    /// Lets go of a session of which nothing is written down: what is recorded under its name is
    /// another's, and must not hear of it.
    pub(super) fn forget(&self, live: &Arc<Live>, reason: &str) {
        live.begin_end(reason);
        self.index().remove(live);
        live.finish_end(None);
    }

    /// A phase that cannot be written is not lost: recovery ends every record without a live sandbox.
    async fn record_phase(&self, id: &SessionId, phase: Phase, reason: &str) {
        if let Err(e) = self.store.set_phase(id, phase, reason, now_ms()).await {
            tracing::warn!(session = %id, phase = phase.as_str(), error = chain(&e), "a phase cannot be written");
        }
    }
}

/// Removes a session's own sandbox, once nobody freezes it.
async fn remove_sandbox(live: &Live) -> Result<(), DriverError> {
    let _turn = live.pause_turn().await;
    // Sockets of ours hold its network.
    live.set_gate(None);
    match live.sandbox() {
        Some(sandbox) => remove(sandbox).await,
        None => Ok(()),
    }
}

/// Destroys a sandbox, with some patience.
pub(crate) async fn remove(sandbox: &Arc<dyn Sandbox>) -> Result<(), DriverError> {
    for pause in RETRY_PAUSES {
        if sandbox.destroy().await.is_ok() {
            return Ok(());
        }
        sleep(pause).await;
    }
    sandbox.destroy().await
}

/// What to do about a memory limit that was too low. A session keeps the limits that it was made
/// with, so no flag of a later run raises it.
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

/// Ends the session when its sandbox dies by itself.
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
