//! Pausing a session and resuming it. Memory, files and processes stay as they are; nothing runs.
//!
//! What a record says is made true, never the other way round: it is written first, so that after a
//! crash at any point the next start freezes or thaws what the record says.

use super::{Sessions, Shared};
use crate::error::chain;
use crate::live::Live;
use crate::{Error, SessionView};
use k8e_driver::Sandbox;
use k8e_model::{Phase, Principal, SessionId};
use serde_json::json;
use std::sync::Arc;

// === impl Sessions ===

impl Sessions {
    /// Stops everything in a session, and in its sub-agents, until it is resumed.
    ///
    /// What is under way stands still and goes on later, streams stay open; clocks go on, so a
    /// command whose time is over by then ends when it is resumed. Its idle time does not count, its
    /// ttl does.
    pub async fn pause(&self, who: &Principal, id: &SessionId) -> Result<SessionView, Error> {
        let audit = self.audited(who, "session.pause", id.as_str());
        audit.end(self.set_paused(who, id, true).await)
    }

    /// Lets a paused session go on.
    pub async fn resume(&self, who: &Principal, id: &SessionId) -> Result<SessionView, Error> {
        let audit = self.audited(who, "session.resume", id.as_str());
        audit.end(self.set_paused(who, id, false).await)
    }

    /// What was begun is finished, also when this is dropped.
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
        // False when it ends just now, and then it is not paused here either.
        if !self.store.set_paused(id, true).await? || !live.pause() {
            return Err(live.gone());
        }
        if let Err(error) = sandbox.freeze().await {
            live.resume();
            self.store.set_paused(id, false).await?;
            return Err(Error::Freeze(error));
        }
        self.tell(live, "paused");
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
        if !self.store.set_paused(id, false).await? {
            return Err(live.gone());
        }
        if let Err(error) = sandbox.thaw().await {
            self.store.set_paused(id, true).await?;
            return Err(Error::Thaw(error));
        }
        if !live.resume() {
            return Err(live.gone());
        }
        self.tell(live, "resumed");
        let resumed = live.snapshot().last_used;
        self.recorder.touch(id, resumed);
        for child in live.children() {
            self.recorder.touch(&child.record.id, resumed);
        }
        Ok(())
    }

    fn tell(&self, live: &Live, event: &'static str) {
        self.recorder.event(&live.record, event, json!({}));
        for child in live.children() {
            self.recorder.event(&child.record, event, json!({}));
        }
    }

    /// Makes true what the record of a sandbox that was taken over says. One that cannot be frozen
    /// is active again: returns what it is now.
    pub(super) async fn settle(
        &self,
        id: &SessionId,
        phase: Phase,
        sandbox: &dyn Sandbox,
    ) -> Result<Phase, String> {
        if phase == Phase::Paused {
            let Err(error) = sandbox.freeze().await else {
                return Ok(Phase::Paused);
            };
            tracing::warn!(session = %id, error = chain(&error), "a session that was paused cannot be: it is active again");
            self.store
                .set_paused(id, false)
                .await
                .map_err(|error| chain(&error))?;
        }
        sandbox.thaw().await.map_err(|error| chain(&error))?;
        Ok(Phase::Active)
    }
}
