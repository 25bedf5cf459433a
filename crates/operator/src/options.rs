//! Flags of `k8e operator`, the same as of the agent-sandbox controller: a Deployment can change its image and keep its
//! arguments.

use crate::units::{Bind, duration};
use clap::{ArgAction, Args};
use std::path::PathBuf;
use std::time::Duration;

/// Default of `--allowed-label-domains`.
const DEFAULT_LABEL_DOMAIN: &str = "sandbox.users.io";
/// Mount path of a ConfigMap with other domains.
const LABEL_DOMAINS_FILE: &str = "/etc/sandbox-config/allowed-label-domains";

/// Flags of `k8e operator`.
#[derive(Args, Clone, Debug)]
pub struct OperatorOptions {
    /// Kubeconfig file of the cluster [default: $KUBECONFIG, ~/.kube/config, or the pod's service account]
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Leader election: one of several replicas reconciles, the others are hot standbys
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub leader_elect: bool,

    /// Namespace of the leader election lease [default: the pod's, else agent-sandbox-system]
    #[arg(long, value_name = "NAMESPACE")]
    pub leader_election_namespace: Option<String>,

    /// Bind address of /metrics (Prometheus); `0` is off
    #[arg(long, default_value = ":8080", value_name = "ADDRESS")]
    pub metrics_bind_address: Bind,

    /// Bind address of the probes /healthz and /readyz; `0` is off
    #[arg(long, default_value = ":8081", value_name = "ADDRESS")]
    pub health_probe_bind_address: Bind,

    #[command(flatten)]
    /// Flags of the controllers.
    pub controllers: ControllerOptions,

    #[command(flatten)]
    /// Flags that are accepted for compatibility and have no effect.
    pub accepted: AcceptedOptions,
}

/// Flags of the controllers.
#[derive(Args, Clone, Debug)]
pub struct ControllerOptions {
    /// Also reconcile SandboxClaim, SandboxWarmPool and SandboxTemplate, not only Sandbox
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub extensions: bool,

    /// DNS domain of the cluster, for status.serviceFQDN
    #[arg(long, default_value = "cluster.local", value_name = "DOMAIN")]
    pub cluster_domain: String,

    /// Workers of the Sandbox controller: concurrent reconciles
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = workers)]
    pub sandbox_concurrent_workers: usize,

    /// Workers of the SandboxClaim controller
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = workers)]
    pub sandbox_claim_concurrent_workers: usize,

    /// Workers of the SandboxWarmPool controller
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = workers)]
    pub sandbox_warm_pool_concurrent_workers: usize,

    /// Workers of the SandboxTemplate controller
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = workers)]
    pub sandbox_template_concurrent_workers: usize,

    /// Largest number of sandboxes that one reconcile of a pool creates
    #[arg(long, default_value_t = 300, value_name = "N", value_parser = workers)]
    pub sandbox_warm_pool_max_batch_size: usize,

    /// Delay before a pool replaces sandboxes that were claimed
    #[arg(long, default_value = "0", value_name = "DURATION", value_parser = duration)]
    pub sandbox_warm_pool_replenish_delay: Duration,

    /// Refill rate limit of a pool, in sandboxes per second; 0 is no limit
    #[arg(long, default_value_t = 0.0, value_name = "N", value_parser = rate)]
    pub sandbox_warm_pool_max_refill_rate: f64,

    /// Readiness grace period: a pooled sandbox that is not ready for this long is replaced
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub sandbox_warm_pool_readiness_grace_period: Duration,

    /// Recheck interval of a pooled sandbox whose pod is unschedulable
    #[arg(long, default_value = "1m", value_name = "DURATION", value_parser = duration)]
    pub sandbox_warm_pool_unschedulable_recheck_interval: Duration,

    /// Allow the cluster autoscaler to evict unclaimed pods
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_warm_pool_eviction: bool,

    /// Do not create Events about claims
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub disable_claim_events: bool,

    /// Do not create Events about sandboxes
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub disable_sandbox_events: bool,

    /// Do not write the observability annotations of claims (first observed, first ready): saves one write per claim
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub disable_claim_observability_annotations: bool,

    /// Domains of the labels that claims may set on pods [default: the mounted ConfigMap, else sandbox.users.io]
    #[arg(long, value_name = "DOMAINS", value_delimiter = ',')]
    pub allowed_label_domains: Vec<String>,
}

/// Flags of the agent-sandbox controller without an effect here; they are accepted so that its Deployment starts.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Accepted for compatibility, without effect")]
pub struct AcceptedOptions {
    /// Client-side rate limit; here, API Priority and Fairness of the API server applies
    #[arg(long, allow_negative_numbers = true, value_name = "QPS")]
    pub kube_api_qps: Option<f64>,
    /// Burst of the client-side rate limit; see --kube-api-qps
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub kube_api_burst: Option<i64>,
    /// Connections to the API server; here, one HTTP/2 connection is used
    #[arg(long, value_name = "N")]
    pub api_connections: Option<i64>,
    /// Separate connection for watches; here, they share the connection
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub separate_watch_connection: Option<bool>,
    /// Watch by label; here, pods, Services and volumes always are
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub cache_label_selectors: Option<bool>,
    /// Delay of pod label writes; here, they are written at once after the claim is ready
    #[arg(long, value_name = "DURATION")]
    pub sandbox_write_behind_window: Option<String>,
    /// How long a claim waits for a warm candidate; here, it never does
    #[arg(long, value_name = "DURATION")]
    pub sandbox_claim_warm_candidate_grace_period: Option<String>,
    /// OpenTelemetry traces; not supported yet
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_tracing: Option<bool>,
    /// Profiler of Go programs; not available
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_pprof: Option<bool>,
    /// Profiler of Go programs; not available
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_pprof_debug: Option<bool>,
    /// Profiler of Go programs; not available
    #[arg(long, value_name = "N")]
    pub pprof_block_profile_rate: Option<i64>,
    /// Profiler of Go programs; not available
    #[arg(long, value_name = "N")]
    pub pprof_mutex_profile_fraction: Option<i64>,
    /// Metrics of the API client; always on
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_rest_client_metrics: Option<bool>,
    /// Log level of Go programs; use RUST_LOG instead
    #[arg(long, value_name = "LEVEL")]
    pub zap_log_level: Option<String>,
    /// Log format of Go programs
    #[arg(long, value_name = "ENCODER")]
    pub zap_encoder: Option<String>,
    /// Log format of Go programs
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub zap_devel: Option<bool>,
}

// === impl ControllerOptions ===

impl ControllerOptions {
    /// Adds the configuration that is not on the command line: the mounted ConfigMap.
    pub(crate) fn complete(mut self) -> Self {
        if self.allowed_label_domains.is_empty() {
            let mounted = std::fs::read_to_string(LABEL_DOMAINS_FILE).unwrap_or_default();
            self.allowed_label_domains = label_domains(&mounted);
        }
        self
    }
}

fn label_domains(text: &str) -> Vec<String> {
    let domains = text
        .split([',', '\n'])
        .map(str::trim)
        .filter(|d| !d.is_empty());
    let domains: Vec<String> = domains.map(str::to_owned).collect();
    if domains.is_empty() {
        vec![DEFAULT_LABEL_DOMAIN.to_owned()]
    } else {
        domains
    }
}

fn workers(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=10_000) => Ok(n),
        _ => Err("use a number from 1 to 10000".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.0..=10_000.0).contains(&rate) => Ok(rate),
        _ => Err("use a number of sandboxes per second, from 0 to 10000".to_owned()),
    }
}

/// Rewrites `-flag` to `--flag`: Go programs accept both, and Deployments use the former.
pub fn with_double_dashes(
    args: impl Iterator<Item = std::ffi::OsString>,
) -> Vec<std::ffi::OsString> {
    args.map(|arg| match arg.to_str() {
        Some(text) if text.len() > 2 && text.starts_with('-') && !text.starts_with("--") => {
            format!("-{text}").into()
        }
        _ => arg,
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: OperatorOptions,
    }

    #[test]
    fn the_arguments_of_an_agent_sandbox_deployment_are_accepted() {
        let args = [
            "x",
            "-leader-elect=true",
            "--extensions",
            "--sandbox-concurrent-workers=100",
            "--kube-api-qps=-1.000000",
            "--kube-api-burst=10",
            "--metrics-bind-address=:8081",
            "-sandbox-warm-pool-readiness-grace-period=1m30s",
        ];
        let args = with_double_dashes(args.iter().map(std::ffi::OsString::from));
        let options = Cli::try_parse_from(args).expect("accepted").options;
        assert!(options.leader_elect && options.controllers.extensions);
        assert_eq!(options.accepted.kube_api_qps, Some(-1.0));
        assert_eq!(options.metrics_bind_address, Bind::Any(8081));
        assert_eq!(
            options
                .controllers
                .sandbox_warm_pool_readiness_grace_period
                .as_secs(),
            90
        );
    }

    #[test]
    fn label_domains_are_separated_by_commas_or_newlines() {
        assert_eq!(
            label_domains("a.io, b.io\nc.io\n"),
            ["a.io", "b.io", "c.io"]
        );
        assert_eq!(label_domains(" \n"), [DEFAULT_LABEL_DOMAIN]);
    }
}
