//! `k8e sandbox pool`: shows the warm pool.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

pub(super) const LONG_ABOUT: &str = "\
Show the warm pool: sandboxes that were created ahead of their session.

A server keeps some ready for each template and runtime, so that a new session need not wait for a
launch. Their number follows recent demand, between --pool-min and --pool-max of `k8e server`. A
session with another --disk than the server's default never gets a warm sandbox; with gVisor, neither
does one with another --pids.";

/// Arguments of `k8e sandbox pool`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox pool | jq '.pools[] | {runtime, ready, hit_rate}'")]
pub struct PoolArgs {}

#[derive(Serialize)]
struct PoolsJson {
    pools: Vec<PoolJson>,
}

#[derive(Serialize)]
struct PoolJson {
    template: String,
    runtime: String,
    min: u32,
    max: u32,
    target: u32,
    ready: u32,
    pending: u32,
    claims: u64,
    hits: u64,
    misses: u64,
    unfit: u64,
    /// Hits divided by claims; `None` before the first claim.
    hit_rate: Option<f64>,
    claim_p50_ms: f64,
    claim_p99_ms: f64,
    #[serde(skip_serializing_if = "String::is_empty")]
    failure: String,
}

pub(crate) async fn run(_args: PoolArgs, mut client: Client) -> Result<u8, Failure> {
    let pools = client.get_pools(v1::GetPoolsRequest {}).await?.into_inner();
    let pools = pools.pools.into_iter().map(PoolJson::from).collect();
    output::json(&PoolsJson { pools }).map(|()| 0)
}

// === impl PoolJson ===

impl From<v1::Pool> for PoolJson {
    fn from(pool: v1::Pool) -> Self {
        let claims = pool.hits.saturating_add(pool.misses);
        Self {
            template: pool.template,
            runtime: pool.runtime,
            min: pool.min,
            max: pool.max,
            target: pool.target,
            ready: pool.ready,
            pending: pool.pending,
            claims,
            hits: pool.hits,
            misses: pool.misses,
            unfit: pool.unfit,
            hit_rate: (claims > 0).then(|| float(pool.hits) / float(claims)),
            claim_p50_ms: float(pool.claim_p50_us) / 1000.0,
            claim_p99_ms: float(pool.claim_p99_us) / 1000.0,
            failure: pool.failure,
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "for people: nobody counts claims to the last of 2^53"
)]
fn float(n: u64) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_times_are_for_people() {
        let pool = v1::Pool {
            hits: 3,
            misses: 1,
            claim_p50_us: 1500,
            ..Default::default()
        };
        let json = serde_json::to_value(PoolJson::from(pool)).unwrap();
        assert_eq!(json["claims"], 4);
        assert_eq!(json["hit_rate"], 0.75);
        assert_eq!(json["claim_p50_ms"], 1.5);
        let unused = serde_json::to_value(PoolJson::from(v1::Pool::default())).unwrap();
        assert!(unused["hit_rate"].is_null());
    }
}
