//! Background refill of warm pools, up to the target size that `k8e_model::PoolSize` computes.

use super::machine::Machine;
use super::{Pool, Pools, Warm};
use crate::error::chain;
use crate::gate;
use crate::sessions::{Shared, greet, remove};
use futures::StreamExt as _;
use k8e_driver::{Sandbox, SandboxSpec};
use k8e_egress::Gate;
use k8e_model::{PoolState, SandboxId, Spare};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// Refill interval without claims: demand decays and free memory changes.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Refill delay after a claim, while the pool is not empty: a launch keeps a CPU busy, just when the reply is sent and
/// the first command comes.
const LULL: Duration = Duration::from_millis(3);

/// Exponential back-off after failed launches: first delay, doubled up to `RETRY_MAX`.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Sandboxes that are destroyed at once when pools are emptied.
const DESTROYED_AT_ONCE: usize = 16;

/// Counts a launch in progress as pending until dropped.
struct Pending(Arc<Pool>);

/// One refill pass: launches to start, sandboxes to destroy, time of the next pass.
struct Step {
    start: usize,
    doomed: Vec<Arc<dyn Sandbox>>,
    again_at: Instant,
}

/// Starts the refill task of every pool. Called after crash recovery, whose sweep must not see warm sandboxes.
pub(crate) fn start(shared: &Arc<Shared>) {
    for pool in &shared.pools.0 {
        let task = refill(Arc::clone(pool), Arc::clone(shared));
        shared.runtime.spawn(task);
    }
}

/// Background task: refills one pool until shutdown.
async fn refill(pool: Arc<Pool>, shared: Arc<Shared>) {
    let mut machine = Machine::default();
    loop {
        let step = pool.step(machine.spare());
        for _ in 0..step.start {
            let task = launch(Pending(Arc::clone(&pool)), Arc::clone(&shared));
            shared.runtime.spawn(task);
        }
        for sandbox in step.doomed {
            let shared = Arc::clone(&shared);
            pool_task(&shared, async move { discard(&sandbox).await });
        }
        tokio::select! {
            () = shared.stopped() => return,
            () = pool.wake.notified() => {
                if pool.has_ready() {
                    sleep(LULL).await;
                }
            }
            () = sleep_until(step.again_at) => {}
        }
    }
}

/// Spawns work that graceful shutdown waits for. After shutdown began nothing is spawned: the next start sweeps.
fn pool_task(shared: &Arc<Shared>, task: impl Future<Output = ()> + Send + 'static) {
    if let Ok(work) = Arc::clone(&shared.work).try_read_owned() {
        shared.runtime.spawn(async move {
            task.await;
            drop(work);
        });
    }
}

async fn launch(pending: Pending, shared: Arc<Shared>) {
    let Ok(_work) = Arc::clone(&shared.work).try_read_owned() else {
        return;
    };
    let pool = &pending.0;
    let id = SandboxId::random();
    // Shares the launch limit with session creation.
    let turn = shared.launches.acquire().await;
    let launched = pool.launch(&id, &shared).await;
    drop(turn);
    match launched {
        Ok((sandbox, gate)) => {
            pool.metrics.launches.increment(1);
            let watcher = shared
                .runtime
                .spawn(watch(Arc::clone(pool), id.clone(), Arc::clone(&sandbox)))
                .abort_handle();
            let warm = Warm {
                id,
                sandbox,
                gate,
                watcher,
            };
            if let Err(unwanted) = pool.put(warm) {
                discard(&unwanted.sandbox).await;
            }
        }
        Err(failure) => {
            pool.metrics.launch_failures.increment(1);
            pool.failed(&failure, 1);
        }
    }
}

/// Takes a sandbox that died out of its pool.
async fn watch(pool: Arc<Pool>, id: SandboxId, sandbox: Arc<dyn Sandbox>) {
    sandbox.died().await;
    pool.lose(&id);
}

async fn discard(sandbox: &Arc<dyn Sandbox>) {
    if let Err(e) = remove(sandbox).await {
        tracing::warn!(
            error = chain(&e),
            "a warm sandbox cannot be removed: the next start tries again"
        );
    }
}

// === impl Pools ===

impl Pools {
    /// Closes all pools and destroys their warm sandboxes, which belong to no session.
    pub(crate) async fn drain(&self) {
        let mut left = Vec::new();
        for pool in &self.0 {
            let mut state = pool.state();
            state.closed = true;
            left.append(&mut state.doomed);
            let ready = state.ready.drain(..);
            left.extend(ready.map(|warm| Arc::clone(&warm.sandbox)));
        }
        futures::stream::iter(&left)
            .for_each_concurrent(DESTROYED_AT_ONCE, discard)
            .await;
    }
}

// === impl Pool ===

impl Pool {
    fn has_ready(&self) -> bool {
        !self.state().ready.is_empty()
    }

    /// Plans a refill pass, and counts its launches as pending.
    fn step(&self, spare: Spare) -> Step {
        let now = Instant::now();
        let mut state = self.state();
        let mut plan = self.size.plan(&PoolState {
            ready: state.ready.len(),
            pending: state.pending,
            demand: state.fade(now),
            spare,
        });
        let mut again_at = now + LOOK_EVERY;
        if let Some(retry_at) = state.retry_at.filter(|at| *at > now) {
            plan.start = 0;
            again_at = again_at.min(retry_at);
        }
        if state.closed {
            plan.start = 0;
        }
        state.pending += plan.start;
        let stopped: Vec<_> = state.ready.drain(..plan.stop).collect();
        let mut doomed = std::mem::take(&mut state.doomed);
        doomed.extend(stopped.iter().map(|warm| Arc::clone(&warm.sandbox)));
        Step {
            start: plan.start,
            doomed,
            again_at,
        }
    }

    /// Launches a sandbox, waits for the guest handshake, and attaches its egress gate.
    async fn launch(
        &self,
        id: &SandboxId,
        shared: &Shared,
    ) -> Result<(Arc<dyn Sandbox>, Option<Arc<Gate>>), String> {
        let spec = SandboxSpec {
            id: id.clone(),
            template: self.template.clone(),
            // Pools are of the template `host`.
            layers: Vec::new(),
            limits: self.limits,
        };
        let launched = self.driver.launch(&spec).await;
        let sandbox: Arc<dyn Sandbox> = launched.map_err(|e| chain(&e))?.into();
        let gates = shared.config.gates.as_ref();
        let ready = async {
            greet(sandbox.as_ref()).await?;
            gate::attach(gates, sandbox.as_ref()).await
        };
        match ready.await {
            Ok(gate) => {
                sandbox.idle_stop();
                Ok((sandbox, gate))
            }
            Err(e) => {
                discard(&sandbox).await;
                Err(e.to_string())
            }
        }
    }

    /// Adds a warm sandbox; returns it when the pool is closed.
    fn put(&self, warm: Warm) -> Result<(), Warm> {
        let mut state = self.state();
        if state.closed {
            return Err(warm);
        }
        state.ready.push_back(warm);
        // One step only: sandboxes that die soon after launch must not reset the back-off.
        state.failures = state.failures.saturating_sub(1);
        state.retry_at = None;
        state.failure.clear();
        Ok(())
    }

    /// Removes a warm sandbox that died before it was claimed.
    fn lose(&self, id: &SandboxId) {
        let lost = {
            let mut state = self.state();
            let place = state.ready.iter().position(|warm| warm.id == *id);
            let lost = place.and_then(|place| state.ready.remove(place));
            if let Some(warm) = &lost {
                state.doomed.push(Arc::clone(&warm.sandbox));
            }
            lost.is_some()
        };
        if lost {
            self.metrics.deaths.increment(1);
            // Weight 2: the launch before it took one failure off, so the back-off still grows.
            self.failed("a warm sandbox died", 2);
            self.wake.notify_one();
        }
    }

    fn failed(&self, failure: &str, weight: u32) {
        let mut state = self.state();
        if state.failures == 0 {
            tracing::warn!(runtime = %self.driver.kind(), failure, "launch of a warm sandbox failed: retrying with back-off");
        }
        state.failures = state.failures.saturating_add(weight);
        failure.clone_into(&mut state.failure);
        let doubled = 2u32.saturating_pow(state.failures - 1);
        let pause = RETRY_FIRST.saturating_mul(doubled).min(RETRY_MAX);
        state.retry_at = Some(Instant::now() + pause);
    }
}

// === impl Pending ===

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.state().pending -= 1;
        self.0.wake.notify_one();
    }
}
