//! Metrics of a sandbox, as E2B's control API and `envd` render them. There is no history: the newest sample is measured
//! when it is asked for.

use super::time::rfc3339;
use k8e_engine::SessionMetrics;
use serde_json::{Value, json};

/// A sample of the control API.
pub(super) fn sample(metrics: &SessionMetrics) -> Value {
    json!({
        "timestamp": rfc3339(metrics.at),
        "timestampUnix": metrics.at.div_euclid(1000),
        "cpuCount": metrics.cpu_millis.div_ceil(1000),
        "cpuUsedPct": percent(metrics),
        "memUsed": metrics.memory_used_bytes,
        "memTotal": metrics.memory_total_bytes,
        "memCache": metrics.memory_cache_bytes,
        "diskUsed": metrics.disk_used_bytes,
        "diskTotal": metrics.disk_total_bytes,
    })
}

/// The answer of `envd`.
pub(super) fn envd(metrics: &SessionMetrics) -> Value {
    json!({
        "ts": metrics.at.div_euclid(1000),
        "cpu_count": metrics.cpu_millis.div_ceil(1000),
        "cpu_used_pct": percent(metrics),
        "mem_used": metrics.memory_used_bytes,
        "mem_total": metrics.memory_total_bytes,
        "mem_cache": metrics.memory_cache_bytes,
        "mem_used_mib": metrics.memory_used_bytes >> 20,
        "mem_total_mib": metrics.memory_total_bytes >> 20,
        "disk_used": metrics.disk_used_bytes,
        "disk_total": metrics.disk_total_bytes,
    })
}

/// To two digits.
fn percent(metrics: &SessionMetrics) -> f64 {
    (metrics.cpu_used_percent * 100.0).round() / 100.0
}
