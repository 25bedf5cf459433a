//! Warm pools: sandboxes launched in advance, one pool per template and runtime.
//!
//! A warm sandbox has completed the guest handshake, belongs to no session and has run nothing but its guest.
//! A claim takes it out for good: it serves one session and is destroyed with it. Until then it is
//! not in the store, so crash recovery sweeps it like every sandbox that no record names; a pool
//! starts empty, after that sweep.

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

/// Status of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// Template of its sandboxes.
    pub template: Template,
    /// Runtime of its sandboxes.
    pub runtime: RuntimeKind,
    /// Configured minimum and maximum size.
    pub size: PoolSize,
    /// Current target of ready sandboxes, from demand and size.
    pub target: usize,
    /// Sandboxes that can be claimed now.
    pub ready: usize,
    /// Sandboxes being launched.
    pub pending: usize,
    /// Sessions created with a warm sandbox.
    pub hits: u64,
    /// Sessions that needed a new sandbox because none was ready.
    pub misses: u64,
    /// Sessions that needed a new sandbox because of limits that a launched one cannot get.
    pub unfit: u64,
    /// Median latency of the last claims, in microseconds.
    pub claim_p50_us: u64,
    /// 99th percentile of the latency of the last claims, in microseconds.
    pub claim_p99_us: u64,
    /// Error of the last launch; empty when it succeeded.
    pub failure: String,
}

/// All pools of a server.
pub(crate) struct Pools(Vec<Arc<Pool>>);

/// Warm sandboxes of one template and runtime.
pub(crate) struct Pool {
    template: Template,
    driver: Arc<dyn Driver>,
    /// Limits that its sandboxes are launched with.
    limits: Limits,
    size: PoolSize,
    // Held for a few instructions and never across an await.
    state: Mutex<State>,
    /// Wakes its refill task.
    wake: Notify,
    metrics: PoolMetrics,
}

struct State {
    ready: VecDeque<Warm>,
    pending: usize,
    /// Sandboxes to be destroyed by the refill task.
    doomed: Vec<Arc<dyn Sandbox>>,
    /// Set at shutdown: nothing is added or claimed.
    closed: bool,
    /// Demand estimate at `demand_at`; it decays since.
    demand: PoolDemand,
    demand_at: Instant,
    hits: u64,
    misses: u64,
    unfit: u64,
    latencies: Latencies,
    /// Consecutive failures, for the exponential back-off.
    failures: u32,
    failure: String,
    /// End of the back-off: nothing is launched before.
    retry_at: Option<Instant>,
}

/// A warm sandbox that can be claimed.
struct Warm {
    id: SandboxId,
    sandbox: Arc<dyn Sandbox>,
    /// Its egress gate, which denies everything until a session sets a policy.
    gate: Option<Arc<Gate>>,
    /// Task that removes it from the pool when it dies.
    watcher: AbortHandle,
}

// === impl Pools ===

impl Pools {
    /// One pool per installed runtime, all empty. For a broken runtime, launches are retried with
    /// exponential back-off.
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
    /// The demand estimate, decayed to `now`.
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
