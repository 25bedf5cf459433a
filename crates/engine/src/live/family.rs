//! A session and its sub-agents: what becomes of one becomes of all. A parent's state is held before
//! a child's.

use super::Live;
use crate::Error;
use crate::metrics;
use k8e_model::Phase;
use std::sync::Arc;
use tokio::time::Instant;

/// Sub-agents of one session: they share its limits, and its guest's connections.
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

    /// Paused → active, with its sub-agents. False when it is not paused. Its idle time begins anew.
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

    /// When it was last resumed by who paused it.
    pub(crate) fn resumed(&self) -> Option<Instant> {
        self.state().resumed
    }

    /// Waits until nobody else freezes, thaws or removes its sandbox.
    pub(crate) async fn pause_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.pause_turn.lock().await
    }

    /// Takes a sub-agent in, if there is room.
    pub(crate) fn adopt(&self, child: &Arc<Self>) -> Result<(), Error> {
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

    /// The same with one of an earlier server's: it was let in then.
    pub(crate) fn adopt_again(&self, child: &Arc<Self>) {
        self.state().children.push(Arc::clone(child));
    }

    /// Lets go of a sub-agent that is over.
    pub(crate) fn disown(&self, child: &Arc<Self>) {
        let mut state = self.state();
        state.children.retain(|other| !Arc::ptr_eq(other, child));
    }

    /// Its sub-agents that are not over.
    pub(crate) fn children(&self) -> Vec<Arc<Self>> {
        self.state().children.clone()
    }
}
