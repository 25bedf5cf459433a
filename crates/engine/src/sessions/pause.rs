//! Pause and resume of a session. Memory, files and processes stay as they are; nothing runs.
//!
//! A sandbox that can be is saved: its memory is written to disk and its processes end. Otherwise, or when that does
//! not work at the moment, it is frozen (cgroup freezer) and keeps its memory; the event says why.
//!
//! The record is the desired state and is written first, so that after a crash at any point the next
//! start reconciles the sandbox with it. Whether a sandbox is saved only its driver knows, whose state on disk is
//! complete or not there.

use super::{Sessions, Shared};
use crate::error::chain;
use crate::live::Live;
use crate::{Error, SessionView};
use k8e_driver::{Restored, Sandbox};
use k8e_model::{Phase, Principal, SessionId};
use serde_json::{Value, json};
use std::sync::Arc;

// === impl Sessions ===

impl Sessions {
    /// Stops everything in a session, and in its sub-agents, until it is resumed.
    ///
    /// Running commands go on after resume, streams stay open: a session with open streams is frozen and not saved.
    /// Clocks go on, so a command whose timeout passed meanwhile ends at resume. The idle timeout does not count, the
    /// TTL does.
    pub async fn pause(&self, who: &Principal, id: &SessionId) -> Result<SessionView, Error> {
        let audit = self.audited(who, "session.pause", id.as_str());
        audit.end(self.set_paused(who, id, true).await)
    }

    /// Resumes a paused session.
    pub async fn resume(&self, who: &Principal, id: &SessionId) -> Result<SessionView, Error> {
        let audit = self.audited(who, "session.resume", id.as_str());
        audit.end(self.set_paused(who, id, false).await)
    }

    /// Runs in its own task, to the end also when this future is dropped.
    async fn set_paused(
        &self,
        who: &Principal,
        id: &SessionId,
        paused: bool,
    ) -> Result<SessionView, Error> {
        let live = self.live(who, id).await?;
        if let Some(parent) = live.parent() {
            return Err(Error::SharedWithParent {
                id: id.clone(),
                parent: parent.record.id.clone(),
                what: "sandbox",
            });
        }
        let Ok(work) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let (shared, changing) = (Arc::clone(&self.shared), Arc::clone(&live));
        let change = self.shared.runtime.spawn(async move {
            let _work = work;
            match paused {
                true => shared.freeze(&changing).await,
                false => shared.thaw(&changing).await,
            }
        });
        change.await.unwrap_or(Err(Error::Stopping))?;
        Ok(self.view(&live))
    }
}

// === impl Shared ===

impl Shared {
    async fn freeze(&self, live: &Arc<Live>) -> Result<(), Error> {
        let _turn = live.pause_turn().await;
        let id = &live.record.id;
        let phase = live.phase();
        let (Phase::Active, Some(sandbox)) = (phase, live.sandbox()) else {
            let (id, phase) = (id.clone(), phase.as_str());
            return Err(Error::NotActive { id, phase });
        };
        // False when the session is ending: then it is not paused.
        if !self.store.set_paused(id, true).await? || !live.pause() {
            return Err(live.gone());
        }
        let detail = match self.save(live, sandbox.as_ref()).await {
            Ok(()) => json!({ "memory": "saved" }),
            Err(reason) => {
                if let Err(error) = sandbox.freeze().await {
                    live.set_detached(false);
                    live.resume();
                    self.store.set_paused(id, false).await?;
                    return Err(Error::Freeze(error));
                }
                json!({ "memory": "kept", "reason": reason })
            }
        };
        self.record_event(live, "paused", &detail);
        Ok(())
    }

    /// Writes the sandbox to disk and ends its processes; otherwise it runs on, and the reason is returned.
    async fn save(&self, live: &Live, sandbox: &dyn Sandbox) -> Result<(), String> {
        live.set_detached(true);
        sandbox.save().await.map_err(|error| chain(&error))?;
        // The gate's sockets keep its network namespace alive.
        live.set_gate(None);
        Ok(())
    }

    async fn thaw(&self, live: &Arc<Live>) -> Result<(), Error> {
        let _turn = live.pause_turn().await;
        let id = &live.record.id;
        let phase = live.phase();
        let (Phase::Paused, Some(sandbox)) = (phase, live.sandbox()) else {
            let (id, phase) = (id.clone(), phase.as_str());
            return Err(Error::NotPaused { id, phase });
        };
        let saved = sandbox.is_saved();
        let detail = match saved {
            true => self.restore(live, sandbox.as_ref()).await?,
            false => json!({ "memory": "kept" }),
        };
        if !self.store.set_paused(id, false).await? {
            return Err(live.gone());
        }
        if !saved && let Err(error) = sandbox.thaw().await {
            self.store.set_paused(id, true).await?;
            return Err(Error::Thaw(error));
        }
        live.set_detached(false);
        if !live.resume() {
            return Err(live.gone());
        }
        if saved && let Err(error) = sandbox.forget_state().await {
            // The next start of the server does it.
            tracing::warn!(session = %id, error = chain(&error), "the saved state of a resumed session cannot be removed");
        }
        self.record_event(live, "resumed", &detail);
        let resumed = live.snapshot().last_used;
        self.recorder.touch(id, resumed);
        for child in live.children() {
            self.recorder.touch(&child.record.id, resumed);
        }
        Ok(())
    }

    /// Makes a saved sandbox run again, behind its gate. When that fails it stays paused, and nothing is lost.
    async fn restore(&self, live: &Arc<Live>, sandbox: &dyn Sandbox) -> Result<Value, Error> {
        let restored = sandbox.restore().await.map_err(Error::Thaw)?;
        if let Err(error) = self.apply_egress(live, &live.egress()).await {
            // From now on it is more than its state.
            sandbox.freeze().await.map_err(Error::Freeze)?;
            return Err(error);
        }
        Ok(match restored {
            Restored::Memory => json!({ "memory": "restored" }),
            Restored::Files { reason } => json!({ "memory": "lost", "reason": reason }),
        })
    }

    /// Records an event for a session and its sub-agents.
    fn record_event(&self, live: &Live, event: &'static str, detail: &Value) {
        self.recorder.event(&live.record, event, detail.clone());
        for child in live.children() {
            self.recorder.event(&child.record, event, detail.clone());
        }
    }

    /// Reconciles an adopted sandbox with its recorded phase. One that cannot be frozen becomes
    /// active: returns the actual phase.
    pub(super) async fn reconcile(
        &self,
        id: &SessionId,
        phase: Phase,
        sandbox: &dyn Sandbox,
    ) -> Result<Phase, String> {
        if sandbox.is_saved() {
            if phase != Phase::Paused {
                self.store
                    .set_paused(id, true)
                    .await
                    .map_err(|error| chain(&error))?;
            }
            return Ok(Phase::Paused);
        }
        if phase == Phase::Paused {
            let Err(error) = sandbox.freeze().await else {
                return Ok(Phase::Paused);
            };
            tracing::warn!(session = %id, error = chain(&error), "a paused session cannot be frozen again: it is active");
            self.store
                .set_paused(id, false)
                .await
                .map_err(|error| chain(&error))?;
        }
        sandbox.thaw().await.map_err(|error| chain(&error))?;
        Ok(Phase::Active)
    }
}
