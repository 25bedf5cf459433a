//! Flags of `k8e operator`: those of the agent-sandbox controller, so that a Deployment can change its image and keep
//! its arguments.

use crate::units::{Bind, duration};
use clap::{ArgAction, Args};
use std::path::PathBuf;
use std::time::Duration;

/// Domain of labels that claims may set, where nothing else is configured.
const DEFAULT_LABEL_DOMAIN: &str = "sandbox.users.io";
/// Where a ConfigMap with other domains is mounted.
const LABEL_DOMAINS_FILE: &str = "/etc/sandbox-config/allowed-label-domains";

/// What `k8e operator` is told.
#[derive(Args, Clone, Debug)]
pub struct OperatorOptions {
    /// Where the cluster is; by default $KUBECONFIG, ~/.kube/config, or the pod's own service account
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Only one of several operators works; the others hold the same knowledge and take over
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub leader_elect: bool,

    /// Namespace of the lease that elects the leader [default: the pod's, else agent-sandbox-system]
    #[arg(long, value_name = "NAMESPACE")]
    pub leader_election_namespace: Option<String>,

    /// Where Prometheus finds /metrics; `0` for nowhere
    #[arg(long, default_value = ":8080", value_name = "ADDRESS")]
    pub metrics_bind_address: Bind,

    /// Where /healthz and /readyz are; `0` for nowhere
    #[arg(long, default_value = ":8081", value_name = "ADDRESS")]
    pub health_probe_bind_address: Bind,

    #[command(flatten)]
    /// How the controllers behave.
    pub controllers: ControllerOptions,

    #[command(flatten)]
    /// Flags that are taken for compatibility.
    pub accepted: AcceptedOptions,
}

/// How the controllers behave.
#[derive(Args, Clone, Debug)]
pub struct ControllerOptions {
    /// Serve SandboxClaim, SandboxWarmPool and SandboxTemplate too, not only Sandbox
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub extensions: bool,

    /// Domain of the cluster's DNS, for status.serviceFQDN
    #[arg(long, default_value = "cluster.local", value_name = "DOMAIN")]
    pub cluster_domain: String,

    /// Sandboxes that are worked on at the same time
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = workers)]
    pub sandbox_concurrent_workers: usize,

    /// Claims that are worked on at the same time
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = workers)]
    pub sandbox_claim_concurrent_workers: usize,

    /// Warm pools that are worked on at the same time
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = workers)]
    pub sandbox_warm_pool_concurrent_workers: usize,

    /// Templates that are worked on at the same time
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = workers)]
    pub sandbox_template_concurrent_workers: usize,

    /// Sandboxes that one pass over a pool makes at most
    #[arg(long, default_value_t = 300, value_name = "N", value_parser = workers)]
    pub sandbox_warm_pool_max_batch_size: usize,

    /// How long a pool waits before it replaces sandboxes that were claimed
    #[arg(long, default_value = "0", value_name = "DURATION", value_parser = duration)]
    pub sandbox_warm_pool_replenish_delay: Duration,

    /// Sandboxes that a pool makes in a second at most; 0 for as many as the API server takes
    #[arg(long, default_value_t = 0.0, value_name = "N", value_parser = rate)]
    pub sandbox_warm_pool_max_refill_rate: f64,

    /// A waiting sandbox that is not ready after this long is replaced
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub sandbox_warm_pool_readiness_grace_period: Duration,

    /// How often a waiting sandbox that no node takes is looked at again
    #[arg(long, default_value = "1m", value_name = "DURATION", value_parser = duration)]
    pub sandbox_warm_pool_unschedulable_recheck_interval: Duration,

    /// Let the cluster autoscaler evict pods that nobody has claimed
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_warm_pool_eviction: bool,

    /// Write no Events about claims
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub disable_claim_events: bool,

    /// Write no Events about sandboxes
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub disable_sandbox_events: bool,

    /// Do not note on a claim when it was seen and ready: one write less for each claim
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub disable_claim_observability_annotations: bool,

    /// Domains of labels that claims may put on pods [default: the mounted ConfigMap, else sandbox.users.io]
    #[arg(long, value_name = "DOMAINS", value_delimiter = ',')]
    pub allowed_label_domains: Vec<String>,
}

/// Flags of the agent-sandbox controller that change nothing here; each is taken so that its Deployment starts.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Taken for compatibility, without effect")]
pub struct AcceptedOptions {
    /// Requests are not paced by the client: the API server's own fairness does that
    #[arg(long, allow_negative_numbers = true, value_name = "QPS")]
    pub kube_api_qps: Option<f64>,
    /// As above
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub kube_api_burst: Option<i64>,
    /// One HTTP/2 connection carries everything
    #[arg(long, value_name = "N")]
    pub api_connections: Option<i64>,
    /// Watches share that connection
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub separate_watch_connection: Option<bool>,
    /// Pods, Services and volumes are always watched by label
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub cache_label_selectors: Option<bool>,
    /// Pod labels are written at once, after the claim is ready
    #[arg(long, value_name = "DURATION")]
    pub sandbox_write_behind_window: Option<String>,
    /// A claim never waits for a candidate
    #[arg(long, value_name = "DURATION")]
    pub sandbox_claim_warm_candidate_grace_period: Option<String>,
    /// No traces are sent yet
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_tracing: Option<bool>,
    /// There is no Go profiler here
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_pprof: Option<bool>,
    /// As above
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_pprof_debug: Option<bool>,
    /// As above
    #[arg(long, value_name = "N")]
    pub pprof_block_profile_rate: Option<i64>,
    /// As above
    #[arg(long, value_name = "N")]
    pub pprof_mutex_profile_fraction: Option<i64>,
    /// Client metrics are always there
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_rest_client_metrics: Option<bool>,
    /// Log format of the Go controller; use RUST_LOG here
    #[arg(long, value_name = "LEVEL")]
    pub zap_log_level: Option<String>,
    /// As above
    #[arg(long, value_name = "ENCODER")]
    pub zap_encoder: Option<String>,
    /// As above
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub zap_devel: Option<bool>,
}

// === impl ControllerOptions ===

impl ControllerOptions {
    /// Reads what is configured beside the command line.
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
        _ => Err("a number from 1 to 10000".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.0..=10_000.0).contains(&rate) => Ok(rate),
        _ => Err("a number of sandboxes a second, from 0 to 10000".to_owned()),
    }
}

/// Go programs take `-flag` for `--flag`; Deployments are written that way.
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
    fn the_arguments_of_a_go_deployment_are_taken() {
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
        let options = Cli::try_parse_from(args).expect("taken").options;
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
    fn domains_are_separated_by_commas_or_lines() {
        assert_eq!(
            label_domains("a.io, b.io\nc.io\n"),
            ["a.io", "b.io", "c.io"]
        );
        assert_eq!(label_domains(" \n"), [DEFAULT_LABEL_DOMAIN]);
    }
}
