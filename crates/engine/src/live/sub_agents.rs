//! A session and its sub-agents, which are paused and resumed together. Lock order: the parent's state
//! before a child's.

use super::Live;
use crate::Error;
use crate::metrics;
use k8e_model::Phase;
use std::sync::Arc;
use tokio::time::Instant;

/// Sub-agents per session: they share its limits and its guest's connections.
const SUB_AGENTS_MAX: usize = 16;

// === impl Live ===

impl Live {
    /// Active → paused, with its sub-agents. False when it is not active.
    pub(crate) fn pause(&self) -> bool {
        let mut state = self.state();
        if !self.advance(Phase::Paused) {
            return false;
        }
        for child in &state.children {
            child.advance(Phase::Paused);
        }
        self.wake(&mut state);
        true
    }

    /// Paused → active, with its sub-agents. False when it is not paused. Its idle timeout starts again.
    pub(crate) fn resume(&self) -> bool {
        let mut state = self.state();
        if self.phase() != Phase::Paused {
            return false;
        }
        state.resume();
        for child in &state.children {
            child.state().resume();
            if child.phase() == Phase::Paused {
                child.advance(Phase::Active);
            }
        }
        self.advance(Phase::Active)
    }

    /// Time of the last resume; none if it was never paused.
    pub(crate) fn resumed(&self) -> Option<Instant> {
        self.state().resumed
    }

    /// Locks freezing, thawing and removal of its sandbox.
    pub(crate) async fn pause_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.pause_turn.lock().await
    }

    /// Has followers of background runs, also of its sub-agents, close their connections to the guest. They attach
    /// again once the session is active.
    pub(crate) fn set_detached(&self, detached: bool) {
        self.detach.send_replace(detached);
    }

    /// Resolves when connections to the guest that the server itself keeps open are to be closed.
    pub(crate) async fn detached(&self) {
        let owner = self.parent.as_deref().unwrap_or(self);
        let mut detach = owner.detach.subscribe();
        // The sender is in the owner: it cannot be gone.
        detach.wait_for(|detached| *detached).await.ok();
    }

    /// Adds a sub-agent, up to `SUB_AGENTS_MAX`.
    pub(crate) fn add_sub_agent(&self, child: &Arc<Self>) -> Result<(), Error> {
        let mut state = self.state();
        self.check_phase(&state, false)?;
        if state.children.len() >= SUB_AGENTS_MAX {
            return Err(metrics::refused(Error::SessionBusy {
                id: self.record.id.clone(),
                what: "sub-agents",
                max: SUB_AGENTS_MAX,
            }));
        }
        state.children.push(Arc::clone(child));
        Ok(())
    }

    /// Adds a sub-agent in crash recovery: the limit was checked at its creation.
    pub(crate) fn restore_sub_agent(&self, child: &Arc<Self>) {
        self.state().children.push(Arc::clone(child));
    }

    /// Removes a sub-agent that has ended.
    pub(crate) fn remove_sub_agent(&self, child: &Arc<Self>) {
        let mut state = self.state();
        state.children.retain(|other| !Arc::ptr_eq(other, child));
    }

    /// Its live sub-agents.
    pub(crate) fn children(&self) -> Vec<Arc<Self>> {
        self.state().children.clone()
    }
}
