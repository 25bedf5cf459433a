//! Warm pools: sandboxes that are made before anybody asks, one pool for each template and runtime.
//!
//! What waits in a pool has been greeted, belongs to no session and has run nothing but its guest.
//! A claim takes it out for good: it serves one session and is destroyed with it, as any other. The
//! store does not know of it before, so after a crash recovery sweeps it away like every sandbox
//! that no record names; a pool begins empty, after that sweep.

mod claim;
mod latency;
mod machine;
mod refill;

pub(crate) use claim::Claim;
pub(crate) use refill::start;

use crate::Config;
use crate::metrics::PoolMetrics;
use k8e_driver::{Driver, Probe, Sandbox};
use k8e_egress::Gate;
use k8e_model::{Limits, PoolDemand, PoolSize, RuntimeKind, SandboxId, Template};
use latency::Latencies;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// A pool, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// What its sandboxes are made from.
    pub template: Template,
    /// What its sandboxes are.
    pub runtime: RuntimeKind,
    /// Between which sizes it moves.
    pub size: PoolSize,
    /// How many it wants to have ready now.
    pub target: usize,
    /// To be claimed.
    pub ready: usize,
    /// Being launched.
    pub pending: usize,
    /// Sessions that got one.
    pub hits: u64,
    /// Sessions that could have, and got a new sandbox: none was ready.
    pub misses: u64,
    /// Sessions that could not have: they asked for limits that it cannot get any more.
    pub unfit: u64,
    /// Half of the last claims took no longer, in microseconds.
    pub claim_p50_us: u64,
    /// 99 of 100 of the last claims took no longer, in microseconds.
    pub claim_p99_us: u64,
    /// Why the last launch failed; empty when it did not.
    pub failure: String,
}

/// All pools of a server.
pub(crate) struct Pools(Vec<Arc<Pool>>);

/// Warm sandboxes of one template and runtime.
pub(crate) struct Pool {
    template: Template,
    driver: Arc<dyn Driver>,
    /// What its sandboxes are launched with.
    limits: Limits,
    size: PoolSize,
    // Held for a few instructions and never across an await.
    state: Mutex<State>,
    /// Wakes the task that refills it.
    wake: Notify,
    metrics: PoolMetrics,
}

struct State {
    ready: VecDeque<Warm>,
    pending: usize,
    /// To be destroyed.
    doomed: Vec<Arc<dyn Sandbox>>,
    /// The server stops: nothing goes in or out.
    closed: bool,
    /// As it was at `demand_at`.
    demand: PoolDemand,
    demand_at: Instant,
    hits: u64,
    misses: u64,
    unfit: u64,
    latencies: Latencies,
    /// Launches that failed since one worked.
    failures: u32,
    failure: String,
    /// Until when nothing is launched, after failures.
    retry_at: Option<Instant>,
}

/// A sandbox that waits to be claimed.
struct Warm {
    id: SandboxId,
    sandbox: Arc<dyn Sandbox>,
    /// Lets nothing through yet.
    gate: Option<Arc<Gate>>,
    /// Takes it out of the pool when it dies.
    watcher: AbortHandle,
}

// === impl Pools ===

impl Pools {
    /// One for each runtime that is installed here, all empty. Of one that is broken, launches are tried
    /// less and less often until one works.
    pub(crate) fn new(config: &Config, drivers: &[Arc<dyn Driver>], probes: &[Probe]) -> Self {
        let installed = |(driver, probe): (&Arc<dyn Driver>, &Probe)| {
            (!matches!(probe, Probe::Unusable { .. })).then(|| Arc::clone(driver))
        };
        let drivers = drivers.iter().zip(probes).filter_map(installed);
        let pool = |driver| Arc::new(Pool::new(Template::default(), driver, config));
        Self(match config.pool.is_off() || !config.host_template {
            true => Vec::new(),
            false => drivers.map(pool).collect(),
        })
    }

    pub(crate) fn status(&self) -> Vec<PoolStatus> {
        self.0.iter().map(|pool| pool.status()).collect()
    }
}

// === impl Pool ===

impl Pool {
    fn new(template: Template, driver: Arc<dyn Driver>, config: &Config) -> Self {
        Self {
            metrics: PoolMetrics::new(&template, driver.kind()),
            template,
            driver,
            limits: config.limits,
            size: config.pool,
            state: Mutex::new(State {
                ready: VecDeque::new(),
                pending: 0,
                doomed: Vec::new(),
                closed: false,
                demand: PoolDemand::default(),
                demand_at: Instant::now(),
                hits: 0,
                misses: 0,
                unfit: 0,
                latencies: Latencies::default(),
                failures: 0,
                failure: String::new(),
                retry_at: None,
            }),
            wake: Notify::new(),
        }
    }

    fn status(&self) -> PoolStatus {
        let mut state = self.state();
        let (claim_p50_us, claim_p99_us) = state.latencies.percentiles_us();
        PoolStatus {
            template: self.template.clone(),
            runtime: self.driver.kind(),
            size: self.size,
            target: self.size.target(state.fade(Instant::now())),
            ready: state.ready.len(),
            pending: state.pending,
            hits: state.hits,
            misses: state.misses,
            unfit: state.unfit,
            claim_p50_us,
            claim_p99_us,
            failure: state.failure.clone(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    /// The demand as it is now.
    fn fade(&mut self, now: Instant) -> PoolDemand {
        self.demand = self
            .demand
            .after(now.saturating_duration_since(self.demand_at));
        self.demand_at = now;
        self.demand
    }
}

// === impl Warm ===

impl Drop for Warm {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}
