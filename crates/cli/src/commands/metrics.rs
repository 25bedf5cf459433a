//! `k8e sandbox metrics`: CPU, memory and disk that a session uses, and its limits.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// Arguments of `k8e sandbox metrics`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox metrics $SID | jq '.memory_used_bytes / .memory_total_bytes'")]
pub struct MetricsArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
}

#[derive(Serialize)]
struct MetricsJson {
    at_unix_ms: i64,
    cpus: f64,
    cpu_used_percent: f64,
    cpu_time_us: u64,
    memory_used_bytes: u64,
    memory_total_bytes: u64,
    memory_cache_bytes: u64,
    disk_used_bytes: u64,
    disk_total_bytes: u64,
}

pub(crate) async fn run(args: MetricsArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::GetSessionMetricsRequest {
        session_id: args.session_id,
    };
    let metrics = client.get_session_metrics(request).await?.into_inner();
    output::json(&MetricsJson::from(metrics)).map(|()| 0)
}

// === impl MetricsJson ===

impl From<v1::SessionMetrics> for MetricsJson {
    fn from(metrics: v1::SessionMetrics) -> Self {
        Self {
            at_unix_ms: metrics.at_unix_ms,
            cpus: f64::from(metrics.cpu_millis) / 1000.0,
            cpu_used_percent: (metrics.cpu_used_percent * 10.0).round() / 10.0,
            cpu_time_us: metrics.cpu_time_us,
            memory_used_bytes: metrics.memory_used_bytes,
            memory_total_bytes: metrics.memory_total_bytes,
            memory_cache_bytes: metrics.memory_cache_bytes,
            disk_used_bytes: metrics.disk_used_bytes,
            disk_total_bytes: metrics.disk_total_bytes,
        }
    }
}
