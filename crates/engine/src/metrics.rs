//! Prometheus metrics of the engine: names, descriptions, and one function per event.
//!
//! Counters are incremented where the event happens. Gauges (sandboxes ready, sessions alive) are set
//! from the current state at every scrape, so they cannot drift from it.
//!
//! Label cardinality is fixed at build time: no label has a value that a client can choose (session,
//! tenant, owner, path).

use crate::Error;
use crate::sessions::{Sessions, Shared};
use k8e_driver::Probe;
use k8e_model::{Code, Outcome, RunStatus, RuntimeKind, Template};
use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};
use std::collections::HashMap;
use std::time::Duration;

const POOL_READY: &str = "k8e_pool_ready";
const POOL_PENDING: &str = "k8e_pool_pending";
const POOL_TARGET: &str = "k8e_pool_target";
const POOL_CLAIMS: &str = "k8e_pool_claims_total";
const POOL_CLAIM_SECONDS: &str = "k8e_pool_claim_seconds";
const POOL_LAUNCHES: &str = "k8e_pool_launches_total";
const POOL_LAUNCH_FAILURES: &str = "k8e_pool_launch_failures_total";
const POOL_DEATHS: &str = "k8e_pool_deaths_total";
const SESSIONS_ACTIVE: &str = "k8e_sessions_active";
const SESSIONS_MAX: &str = "k8e_sessions_max";
const SESSIONS_CREATED: &str = "k8e_sessions_created_total";
const SESSIONS_RECOVERED: &str = "k8e_sessions_recovered_total";
const SESSIONS_ENDED: &str = "k8e_sessions_ended_total";
const SESSION_CREATE_FAILURES: &str = "k8e_session_create_failures_total";
const SESSION_CREATE_SECONDS: &str = "k8e_session_create_seconds";
const RUNS: &str = "k8e_runs_total";
const RUN_START_SECONDS: &str = "k8e_run_start_seconds";
const REFUSED: &str = "k8e_refused_total";
const FILE_READ_BYTES: &str = "k8e_file_read_bytes_total";
const FILE_WRITTEN_BYTES: &str = "k8e_file_written_bytes_total";
const RUNTIME_USABLE: &str = "k8e_runtime_usable";

/// Buckets of claim latency in seconds: a claim takes some hundred microseconds; a second is an outage.
const CLAIM_BUCKETS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
];

/// Buckets of creation latency in seconds: from a warm start to a cold one on a machine under load.
const CREATE_BUCKETS: &[f64] = &[
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Every histogram and the upper bounds of its buckets, to configure the metrics recorder with.
pub const HISTOGRAMS: [(&str, &[f64]); 3] = [
    (POOL_CLAIM_SECONDS, CLAIM_BUCKETS),
    (SESSION_CREATE_SECONDS, CREATE_BUCKETS),
    (RUN_START_SECONDS, CREATE_BUCKETS),
];

/// Label `start`: how a session got its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Warm,
    Cold,
    /// A sub-agent, in the sandbox of its parent.
    Shared,
    /// A fork of another session.
    Fork,
}

/// Label `outcome` of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunEnd {
    /// Exited by itself, with any exit code.
    Exited,
    /// Killed by a signal that the server did not send.
    Signalled,
    TimedOut,
    OomKilled,
    /// Cancelled by its caller, or by shutdown.
    Cancelled,
    /// Its sandbox or its guest failed.
    Failed,
    /// Not started: no such program, or a sandbox that takes no calls.
    NotStarted,
}

/// Label `reason` of a refused request (resource exhausted), which may be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// Session limit of the server, of an owner or of a tenant.
    Sessions,
    OwnerSessions,
    TenantSessions,
    /// Launch queue timeout.
    Launches,
    /// Concurrency limit of a session.
    SessionBusy,
    /// The guest's connection queue is full.
    GuestBusy,
    /// The machine has no disk, loop device or uids left.
    Machine,
}

/// Metric handles of a pool, looked up once: a claim takes a fraction of a millisecond.
pub(crate) struct PoolMetrics {
    pub(crate) hits: Counter,
    pub(crate) misses: Counter,
    pub(crate) unfit: Counter,
    pub(crate) claim_seconds: Histogram,
    pub(crate) launches: Counter,
    pub(crate) launch_failures: Counter,
    pub(crate) deaths: Counter,
}

// === impl Sessions ===

impl Sessions {
    /// Sets all gauges from the current state. Called at every scrape.
    pub fn observe(&self) {
        for pool in self.pools() {
            let labels = labels(&pool.template, pool.runtime);
            gauge!(POOL_READY, &labels).set(float(pool.ready));
            gauge!(POOL_PENDING, &labels).set(float(pool.pending));
            gauge!(POOL_TARGET, &labels).set(float(pool.target));
        }
        gauge!(SESSIONS_MAX).set(float(self.shared.config.sessions_max));
        let active = self.shared.active_by_runtime();
        for (runtime, probe) in self.shared.probed() {
            let usable = matches!(probe, Probe::Usable { .. });
            gauge!(RUNTIME_USABLE, "runtime" => runtime.as_str()).set(f64::from(usable));
            let active = active.get(&runtime).copied().unwrap_or(0);
            gauge!(SESSIONS_ACTIVE, "runtime" => runtime.as_str()).set(float(active));
        }
    }
}

// === impl Shared ===

impl Shared {
    fn active_by_runtime(&self) -> HashMap<RuntimeKind, usize> {
        let mut active = HashMap::new();
        self.each_live(|live| *active.entry(live.record.runtime).or_default() += 1);
        active
    }
}

// === impl Start ===

impl Start {
    const ALL: [Self; 4] = [Self::Warm, Self::Cold, Self::Shared, Self::Fork];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
            Self::Shared => "shared",
            Self::Fork => "fork",
        }
    }
}

// === impl RunEnd ===

impl RunEnd {
    const ALL: [Self; 7] = [
        Self::Exited,
        Self::Signalled,
        Self::TimedOut,
        Self::OomKilled,
        Self::Cancelled,
        Self::Failed,
        Self::NotStarted,
    ];

    fn as_str(self) -> &'static str {
        match self {
            Self::Exited => "exited",
            Self::Signalled => "signalled",
            Self::TimedOut => "timed_out",
            Self::OomKilled => "oom_killed",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::NotStarted => "not_started",
        }
    }
}

impl From<&Outcome> for RunEnd {
    fn from(outcome: &Outcome) -> Self {
        match (outcome.status, outcome.signal) {
            (RunStatus::TimedOut, _) => Self::TimedOut,
            (RunStatus::OomKilled, _) => Self::OomKilled,
            (RunStatus::Completed, 0) => Self::Exited,
            (RunStatus::Completed, _) => Self::Signalled,
        }
    }
}

// === impl Refusal ===

impl Refusal {
    const ALL: [Self; 7] = [
        Self::Sessions,
        Self::OwnerSessions,
        Self::TenantSessions,
        Self::Launches,
        Self::SessionBusy,
        Self::GuestBusy,
        Self::Machine,
    ];

    fn as_str(self) -> &'static str {
        match self {
            Self::Sessions => "sessions",
            Self::OwnerSessions => "owner_sessions",
            Self::TenantSessions => "tenant_sessions",
            Self::Launches => "launches",
            Self::SessionBusy => "session_busy",
            Self::GuestBusy => "guest_busy",
            Self::Machine => "machine",
        }
    }

    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "every other error is no refusal"
    )]
    fn of(error: &Error) -> Option<Self> {
        match error {
            Error::SessionsFull { .. } => Some(Self::Sessions),
            Error::OwnerFull { .. } => Some(Self::OwnerSessions),
            Error::TenantFull { .. } => Some(Self::TenantSessions),
            Error::LaunchesFull(_) => Some(Self::Launches),
            Error::SessionBusy { .. } | Error::TerminalsFull { .. } => Some(Self::SessionBusy),
            Error::GuestBusy(_) => Some(Self::GuestBusy),
            Error::Launch(cause) if cause.code() == Code::Exhausted => Some(Self::Machine),
            _ => None,
        }
    }
}

// === impl PoolMetrics ===

impl PoolMetrics {
    pub(crate) fn new(template: &Template, runtime: RuntimeKind) -> Self {
        let labels = labels(template, runtime);
        let claims = |result: &'static str| {
            let [template, runtime] = labels.clone();
            counter!(
                POOL_CLAIMS,
                &[template, runtime, ("result", result.to_owned())]
            )
        };
        Self {
            hits: claims("hit"),
            misses: claims("miss"),
            unfit: claims("unfit"),
            claim_seconds: histogram!(POOL_CLAIM_SECONDS, &labels),
            launches: counter!(POOL_LAUNCHES, &labels),
            launch_failures: counter!(POOL_LAUNCH_FAILURES, &labels),
            deaths: counter!(POOL_DEATHS, &labels),
        }
    }
}

/// Registers descriptions, and counters at 0: a missing time series cannot be told from a broken
/// one.
pub(crate) fn start(runtimes: impl Iterator<Item = RuntimeKind>) {
    describe_pools();
    describe_sessions();
    for runtime in runtimes.map(RuntimeKind::as_str) {
        for start in Start::ALL.map(Start::as_str) {
            counter!(SESSIONS_CREATED, "runtime" => runtime, "start" => start).increment(0);
            let _ = histogram!(SESSION_CREATE_SECONDS, "runtime" => runtime, "start" => start);
        }
        for reason in ["destroyed", "expired", "died", "lost"] {
            counter!(SESSIONS_ENDED, "runtime" => runtime, "reason" => reason).increment(0);
        }
        counter!(SESSIONS_RECOVERED, "runtime" => runtime).increment(0);
        counter!(SESSION_CREATE_FAILURES, "runtime" => runtime).increment(0);
        for outcome in RunEnd::ALL.map(RunEnd::as_str) {
            counter!(RUNS, "runtime" => runtime, "outcome" => outcome).increment(0);
        }
        let _ = histogram!(RUN_START_SECONDS, "runtime" => runtime);
    }
    for reason in Refusal::ALL.map(Refusal::as_str) {
        counter!(REFUSED, "reason" => reason).increment(0);
    }
    file_read(0);
    file_written(0);
}

fn describe_pools() {
    let count = Unit::Count;
    describe_gauge!(POOL_READY, count, "Warm sandboxes that can be claimed");
    describe_gauge!(POOL_PENDING, count, "Warm sandboxes being launched");
    describe_gauge!(POOL_TARGET, count, "Warm sandboxes the pool wants ready");
    describe_counter!(
        POOL_CLAIMS,
        "Sessions that asked a pool: hit, miss (none was ready) or unfit (limits a warm one cannot get)"
    );
    describe_histogram!(
        POOL_CLAIM_SECONDS,
        Unit::Seconds,
        "From a claim to a session that can be used"
    );
    describe_counter!(
        POOL_LAUNCHES,
        "Warm sandboxes launched, guest handshake included"
    );
    describe_counter!(
        POOL_LAUNCH_FAILURES,
        "Warm sandboxes that could not be launched"
    );
    describe_counter!(
        POOL_DEATHS,
        "Warm sandboxes that died before they were claimed"
    );
}

fn describe_sessions() {
    let (count, bytes) = (Unit::Count, Unit::Bytes);
    describe_gauge!(SESSIONS_ACTIVE, count, "Live sessions");
    describe_gauge!(SESSIONS_MAX, count, "Sessions that may be alive at once");
    describe_counter!(SESSIONS_CREATED, "Sessions made");
    describe_counter!(
        SESSIONS_RECOVERED,
        "Sessions adopted from an earlier server (crash recovery)"
    );
    describe_counter!(
        SESSIONS_ENDED,
        "Sessions that ended; lost is one that an earlier server left and this one could not go on with"
    );
    describe_counter!(
        SESSION_CREATE_FAILURES,
        "Sessions that were admitted and could not be made"
    );
    describe_histogram!(
        SESSION_CREATE_SECONDS,
        Unit::Seconds,
        "From the request to a session that can be used"
    );
    describe_counter!(RUNS, "Commands, by how they ended");
    describe_histogram!(
        RUN_START_SECONDS,
        Unit::Seconds,
        "From a command's request, in a session that is there, to its start"
    );
    describe_counter!(
        REFUSED,
        "Requests refused as resource exhausted, by what was"
    );
    describe_counter!(FILE_READ_BYTES, bytes, "Bytes of files read by clients");
    describe_counter!(
        FILE_WRITTEN_BYTES,
        bytes,
        "Bytes of files written by clients"
    );
    describe_gauge!(RUNTIME_USABLE, count, "1 when the runtime works here");
}

pub(crate) fn created(runtime: RuntimeKind, start: Start, took: Duration) {
    let (runtime, start) = (runtime.as_str(), start.as_str());
    counter!(SESSIONS_CREATED, "runtime" => runtime, "start" => start).increment(1);
    histogram!(SESSION_CREATE_SECONDS, "runtime" => runtime, "start" => start).record(took);
}

pub(crate) fn recovered(runtime: RuntimeKind) {
    counter!(SESSIONS_RECOVERED, "runtime" => runtime.as_str()).increment(1);
}

/// Counts the end of a session. `event` is the kind of its last event.
pub(crate) fn ended(runtime: RuntimeKind, event: &'static str) {
    let runtime = runtime.as_str();
    match event {
        "create_failed" => counter!(SESSION_CREATE_FAILURES, "runtime" => runtime).increment(1),
        // A session of an earlier server that could not be recovered.
        "ended" => counter!(SESSIONS_ENDED, "runtime" => runtime, "reason" => "lost").increment(1),
        event => counter!(SESSIONS_ENDED, "runtime" => runtime, "reason" => event).increment(1),
    }
}

pub(crate) fn run_started(runtime: RuntimeKind, took: Duration) {
    histogram!(RUN_START_SECONDS, "runtime" => runtime.as_str()).record(took);
}

pub(crate) fn run_ended(runtime: RuntimeKind, end: RunEnd) {
    counter!(RUNS, "runtime" => runtime.as_str(), "outcome" => end.as_str()).increment(1);
}

/// Counts an error of exhausted resources; returns every error unchanged.
pub(crate) fn refused(error: Error) -> Error {
    if let Some(refusal) = Refusal::of(&error) {
        counter!(REFUSED, "reason" => refusal.as_str()).increment(1);
    }
    error
}

pub(crate) fn file_read(bytes: u64) {
    counter!(FILE_READ_BYTES).increment(bytes);
}

pub(crate) fn file_written(bytes: u64) {
    counter!(FILE_WRITTEN_BYTES).increment(bytes);
}

fn labels(template: &Template, runtime: RuntimeKind) -> [(&'static str, String); 2] {
    [
        ("template", template.to_string()),
        ("runtime", runtime.to_string()),
    ]
}

#[expect(
    clippy::cast_precision_loss,
    reason = "no machine holds 2^53 sandboxes"
)]
fn float(count: usize) -> f64 {
    count as f64
}
