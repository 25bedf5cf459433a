//! What an operator decides about sessions.

use crate::gate::Denied;
use k8e_egress::Egress;
use k8e_model::{EgressPolicy, Lifetime, Limits, PoolSize, RUN_TIMEOUT_DEFAULT};
use std::sync::Arc;
use std::time::Duration;

/// What an operator decides about sessions. The doors fill requests from it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Of a session that does not say.
    pub limits: Limits,
    /// Of a session that does not say.
    pub lifetime: Lifetime,
    /// Sessions that may be alive at once, whoever owns them.
    pub sessions_max: usize,
    /// Sessions of one owner that may be alive at once. More than `sessions_max` means nothing.
    pub sessions_per_owner_max: usize,
    /// Sessions of one tenant that may be alive at once, whoever owns them. More than
    /// `sessions_max` means nothing.
    pub sessions_per_tenant_max: usize,
    /// What no session may ask beyond.
    pub limits_max: Limits,
    /// Whether sandboxes are made from the template `host`. Without it they cannot be made at all
    /// until there is another, and no pool is filled.
    pub host_template: bool,
    /// How many sandboxes wait for a session, for each template and runtime.
    pub pool: PoolSize,
    /// Sandboxes that are made at once; further ones wait their turn.
    pub launches_max: usize,
    /// Commands that may run at once in one session.
    pub runs_per_session_max: usize,
    /// Background runs that may be under way at once in one session; those that are over do not count.
    pub background_runs_per_session_max: usize,
    /// Terminals that may be open at once, whoever owns them.
    pub terminals_max: usize,
    /// Of a run that does not say.
    pub run_timeout: Duration,
    /// What a session may reach that does not say.
    pub egress_default: EgressPolicy,
    /// What no session may reach.
    pub denied: Denied,
    /// Makes the only way out of a sandbox; without it, nothing leaves one.
    pub gates: Option<Arc<Egress>>,
    /// Whether `sandbox.v1` clients, some of which can ask for nothing but gVisor, get another
    /// runtime where that does not work. Weaker isolation than was asked for, so an operator says so.
    pub gvisor_fallback: bool,
    /// How long the record of an ended session is kept.
    pub ended_kept: Duration,
    /// How many records of ended sessions are kept, however young.
    pub ended_max: usize,
    /// What the transcripts of ended sessions may hold together.
    pub ended_bytes_max: u64,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            lifetime: Lifetime::default(),
            // A machine with 64 GiB holds this many at the default memory limit.
            sessions_max: 128,
            // Whoever shares a server with nobody needs no share.
            sessions_per_owner_max: usize::MAX,
            sessions_per_tenant_max: usize::MAX,
            limits_max: Limits {
                memory_bytes: u64::MAX,
                cpu_millis: u32::MAX,
                pids: u32::MAX,
                disk_bytes: u64::MAX,
            },
            host_template: true,
            // Who wants sandboxes that nobody asked for says so.
            pool: PoolSize::OFF,
            // Making one is work for the CPU: more at once make all of them slow, and the machine.
            launches_max: 2 * std::thread::available_parallelism().map_or(1, usize::from),
            // With the file calls well under the guest's 512 connections.
            runs_per_session_max: 128,
            // K8E's, where finished ones counted too.
            background_runs_per_session_max: 5,
            // K8E's. One that is open costs the server a few hundred bytes.
            terminals_max: 10_000,
            run_timeout: RUN_TIMEOUT_DEFAULT,
            // Who wants sandboxes to reach anybody says whom.
            egress_default: EgressPolicy::None,
            denied: Denied::default(),
            gates: None,
            gvisor_fallback: false,
            ended_kept: Duration::from_secs(24 * 3600),
            // With a thousand events each, well under a gigabyte of database.
            ended_max: 1000,
            // 64 that wrote all that is kept of one.
            ended_bytes_max: 1024 * 1024 * 1024,
        }
    }
}
