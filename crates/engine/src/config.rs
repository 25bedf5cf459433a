//! Configuration of the session service: defaults, limits, retention.

use crate::gate::Denied;
use k8e_driver::LayerStore;
use k8e_egress::Egress;
use k8e_image::RegistryPolicy;
use k8e_model::{EgressPolicy, Lifetime, Limits, PoolSize, RUN_TIMEOUT_DEFAULT};
use std::sync::Arc;
use std::time::Duration;

/// What an operator decides about sessions. The doors fill requests from it.
#[derive(Clone)]
pub struct Config {
    /// Default resource limits (when the request sets none).
    pub limits: Limits,
    /// Default TTL and idle timeout (when the request sets none).
    pub lifetime: Lifetime,
    /// Live sessions of all owners together.
    pub sessions_max: usize,
    /// Live sessions per owner. A value above `sessions_max` has no effect.
    pub sessions_per_owner_max: usize,
    /// Live sessions per tenant, of all owners together. A value above
    /// `sessions_max` has no effect.
    pub sessions_per_tenant_max: usize,
    /// Upper bound of the limits that a request may ask for.
    pub limits_max: Limits,
    /// Whether sandboxes are made from the template `host`. Without it they cannot be made at all
    /// until there is another, and no pool is filled.
    pub host_template: bool,
    /// Size of the warm pool, per template and runtime.
    pub pool: PoolSize,
    /// Concurrent sandbox launches; further ones queue.
    pub launches_max: usize,
    /// Concurrent foreground runs per session.
    pub runs_per_session_max: usize,
    /// Concurrent background runs per session; ended ones do not count.
    pub background_runs_per_session_max: usize,
    /// Open terminals of all owners together.
    pub terminals_max: usize,
    /// Default timeout of a foreground run (when the request sets none).
    pub run_timeout: Duration,
    /// Default egress policy (when the request sets none).
    pub egress_default: EgressPolicy,
    /// Egress deny list: what no session may reach, whatever it asks for.
    pub denied: Denied,
    /// Egress proxy, the only way out of a sandbox; without it, sandboxes have no network.
    pub gates: Option<Arc<Egress>>,
    /// Where layers of images are unpacked; without it there is no template but `host`.
    pub layers: Option<Arc<dyn LayerStore>>,
    /// Which registries images are fetched from.
    pub registries: RegistryPolicy,
    /// What the layers of all templates may take on disk.
    pub templates_bytes_max: u64,
    /// Snapshots of one owner.
    pub snapshots_per_owner_max: usize,
    /// Bytes on disk of the snapshots of one owner, chunks that they share counted once.
    pub snapshot_bytes_per_owner_max: u64,
    /// Bytes on disk of the snapshots of one tenant, each counted as if it shared nothing.
    pub snapshot_bytes_per_tenant_max: u64,
    /// Whether `sandbox.v1` clients, some of which can ask for nothing but gVisor, get another
    /// runtime where that does not work. Isolation is weaker than requested, so it is off by default.
    pub gvisor_fallback: bool,
    /// Retention time of the records of ended sessions.
    pub ended_kept: Duration,
    /// Retention by count: records of ended sessions, the newest are kept.
    pub ended_max: usize,
    /// Retention by size: bytes of all transcripts of ended sessions together.
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
            // No per-owner or per-tenant quota on a server with one user.
            sessions_per_owner_max: usize::MAX,
            sessions_per_tenant_max: usize::MAX,
            limits_max: Limits {
                memory_bytes: u64::MAX,
                cpu_millis: u32::MAX,
                pids: u32::MAX,
                disk_bytes: u64::MAX,
            },
            host_template: true,
            // Warm pools are opt-in.
            pool: PoolSize::OFF,
            // Making one is work for the CPU: more at once make all of them slow, and the machine.
            launches_max: 2 * std::thread::available_parallelism().map_or(1, usize::from),
            // With the file calls well under the guest's 512 connections.
            runs_per_session_max: 128,
            // The limit of the Go K8E, where finished runs counted too.
            background_runs_per_session_max: 5,
            // The limit of the Go K8E. An open terminal costs the server a few hundred bytes.
            terminals_max: 10_000,
            run_timeout: RUN_TIMEOUT_DEFAULT,
            // Egress is opt-in.
            egress_default: EgressPolicy::None,
            denied: Denied::default(),
            gates: None,
            layers: None,
            registries: RegistryPolicy::default(),
            // Some fifty images of the usual size.
            templates_bytes_max: 64 * 1024 * 1024 * 1024,
            // Each is a row; their bytes have a limit of their own.
            snapshots_per_owner_max: 1000,
            // Some twenty full workspaces of the default size.
            snapshot_bytes_per_owner_max: 32 * 1024 * 1024 * 1024,
            snapshot_bytes_per_tenant_max: u64::MAX,
            gvisor_fallback: false,
            ended_kept: Duration::from_secs(24 * 3600),
            // With a thousand events each, well under a gigabyte of database.
            ended_max: 1000,
            // 64 transcripts of maximum size.
            ended_bytes_max: 1024 * 1024 * 1024,
        }
    }
}
