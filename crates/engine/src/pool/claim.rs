//! Claim of a warm sandbox from its pool. Non-blocking.

use super::{Pool, Pools, State, Warm};
use crate::error::chain;
use futures::FutureExt as _;
use k8e_driver::Sandbox;
use k8e_egress::Gate;
use k8e_model::{Limits, RuntimeKind, SandboxId, Template};
use std::sync::Arc;
use tokio::time::Instant;

/// A sandbox taken out of its pool, for a session or to be discarded.
pub(crate) struct Claimed {
    pub(crate) id: SandboxId,
    pub(crate) sandbox: Arc<dyn Sandbox>,
    pub(crate) gate: Option<Arc<Gate>>,
    pub(crate) claim: Claim,
}

/// A claim in progress. Dropping it triggers the refill: not earlier, because a launch
/// would compete for the CPU with the session's creation.
pub(crate) struct Claim {
    pool: Arc<Pool>,
    since: Instant,
}

// === impl Pools ===

impl Pools {
    /// A warm sandbox for a session that asks for this, alive and with these limits; none when the
    /// session needs a new one.
    pub(crate) fn claim(
        &self,
        template: &Template,
        runtime: RuntimeKind,
        limits: &Limits,
    ) -> Option<Claimed> {
        let fits = |pool: &&Arc<Pool>| pool.template == *template && pool.driver.kind() == runtime;
        self.0.iter().find(fits)?.claim(limits)
    }
}

// === impl Pool ===

impl Pool {
    fn claim(self: &Arc<Self>, limits: &Limits) -> Option<Claimed> {
        let claim = Claim {
            pool: Arc::clone(self),
            since: Instant::now(),
        };
        if !self.driver.can_change_limits(&self.limits, limits) {
            // Not counted as demand: this pool cannot serve it.
            self.state().unfit += 1;
            self.metrics.unfit.increment(1);
            return None;
        }
        let mut state = self.state();
        state.demand = self.size.claimed(state.fade(claim.since));
        while let Some(warm) = state.take_living() {
            drop(state);
            match self.bind(&warm, limits) {
                Ok(()) => {
                    return Some(Claimed {
                        id: warm.id.clone(),
                        sandbox: Arc::clone(&warm.sandbox),
                        gate: warm.gate.clone(),
                        claim,
                    });
                }
                Err(failure) => {
                    tracing::warn!(sandbox = %warm.id, failure, "a warm sandbox cannot be used");
                    self.doom(&warm.sandbox);
                }
            }
            state = self.state();
        }
        state.misses += 1;
        self.metrics.misses.increment(1);
        None
    }

    /// Applies the limits that its session asks for.
    fn bind(&self, warm: &Warm, limits: &Limits) -> Result<(), String> {
        // Most sessions use the default limits, which it was launched with.
        if *limits == self.limits {
            return Ok(());
        }
        warm.sandbox.set_limits(limits).map_err(|e| chain(&e))
    }

    /// Queues a sandbox for destruction by the refill task.
    fn doom(&self, sandbox: &Arc<dyn Sandbox>) {
        self.state().doomed.push(Arc::clone(sandbox));
        self.wake.notify_one();
    }
}

// === impl State ===

impl State {
    /// Takes the oldest live one. A dead one is left to its watcher task, which removes it.
    fn take_living(&mut self) -> Option<Warm> {
        let lives = |warm: &Warm| warm.sandbox.died().now_or_never().is_none();
        let first = self.ready.iter().position(lives)?;
        self.ready.remove(first)
    }
}

// === impl Claimed ===

impl Claimed {
    /// Discards the sandbox: the session was not created.
    pub(crate) fn discard(self) {
        self.claim.pool.doom(&self.sandbox);
    }
}

// === impl Claim ===

impl Claim {
    /// Records the hit and its latency: the session is active.
    pub(crate) fn served(self) {
        let took = self.since.elapsed();
        self.pool.metrics.hits.increment(1);
        self.pool.metrics.claim_seconds.record(took);
        let mut state = self.pool.state();
        state.hits += 1;
        state.latencies.add(took);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.pool.wake.notify_one();
    }
}
