//! Prometheus metrics of the router, with the names of the agent-sandbox router, so that its dashboards work.
//!
//! Clients cannot create label values: namespaces are those with a sandbox, methods are a fixed list.

use hyper::Method;
use metrics::{
    SharedString, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use std::time::Instant;

const REQUESTS: &str = "sandbox_router_requests_total";
const DURATION: &str = "sandbox_router_request_duration_seconds";
const INFLIGHT: &str = "sandbox_router_inflight_requests";
const UPSTREAM_ERRORS: &str = "sandbox_router_upstream_errors_total";
const UPSTREAM_RETRIES: &str = "sandbox_router_upstream_retries_total";
const CACHE_INVALIDATIONS: &str = "sandbox_router_cache_invalidations_total";
const AUTHZ_DECISIONS: &str = "sandbox_router_authz_decisions_total";
const CERT_RELOADS: &str = "sandbox_router_cert_reloads_total";
const BUILD_INFO: &str = "sandbox_router_build_info";

/// Histogram buckets in seconds, up to the default of --proxy-timeout.
const BUCKETS: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0,
];

/// Label value for a namespace without sandboxes.
pub(super) const NO_NAMESPACE: &str = "-";

/// Metrics of one request: in flight until this is dropped, then counted.
pub(super) struct RequestMetrics {
    method: &'static str,
    pub(super) namespace: SharedString,
    pub(super) code: u16,
    since: Instant,
}

/// Installs the global metrics recorder and describes the metrics.
pub(super) fn install() -> Result<PrometheusHandle, BuildError> {
    let builder = PrometheusBuilder::new();
    let builder = builder.set_buckets_for_metric(Matcher::Full(DURATION.to_owned()), &BUCKETS)?;
    let handle = builder.install_recorder()?;
    describe_counter!(
        REQUESTS,
        "Completed requests, by method, code and namespace of the sandbox"
    );
    describe_histogram!(
        DURATION,
        "Seconds from the head of a request to the end of its response"
    );
    describe_gauge!(INFLIGHT, "Requests in flight");
    describe_counter!(
        UPSTREAM_ERRORS,
        "Requests without a response from the sandbox, by reason"
    );
    describe_counter!(UPSTREAM_RETRIES, "Retried connection attempts to sandboxes");
    describe_counter!(
        CACHE_INVALIDATIONS,
        "Failed connection attempts to an address that was no longer the sandbox's"
    );
    describe_counter!(AUTHZ_DECISIONS, "Authorization decisions, by outcome");
    describe_counter!(CERT_RELOADS, "Reloads of the TLS certificate, by outcome");
    describe_gauge!(BUILD_INFO, "Always 1; the labels have version and platform");
    let platform = format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH);
    gauge!(BUILD_INFO, "git_version" => env!("CARGO_PKG_VERSION"), "platform" => platform).set(1.0);
    Ok(handle)
}

pub(super) fn upstream_error(namespace: &str, reason: &'static str) {
    counter!(UPSTREAM_ERRORS, "sandbox_namespace" => namespace.to_owned(), "reason" => reason)
        .increment(1);
}

pub(super) fn upstream_retry(namespace: &str) {
    counter!(UPSTREAM_RETRIES, "sandbox_namespace" => namespace.to_owned()).increment(1);
}

pub(super) fn cache_invalidation(namespace: &str) {
    counter!(CACHE_INVALIDATIONS, "sandbox_namespace" => namespace.to_owned()).increment(1);
}

pub(super) fn authz_decision(namespace: SharedString, allowed: bool) {
    let decision = if allowed { "allow" } else { "deny" };
    counter!(AUTHZ_DECISIONS, "sandbox_namespace" => namespace, "decision" => decision)
        .increment(1);
}

pub(super) fn cert_reload(outcome: &'static str) {
    counter!(CERT_RELOADS, "outcome" => outcome).increment(1);
}

// === impl RequestMetrics ===

impl RequestMetrics {
    pub(super) fn new(method: &Method) -> Self {
        gauge!(INFLIGHT).increment(1.0);
        Self {
            method: method_name(method),
            namespace: SharedString::const_str(NO_NAMESPACE),
            // 499, client closed request: the code if the client goes away before the response.
            code: 499,
            since: Instant::now(),
        }
    }
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        gauge!(INFLIGHT).decrement(1.0);
        let labels = [
            ("method", SharedString::const_str(self.method)),
            ("code", SharedString::from(self.code.to_string())),
            ("sandbox_namespace", self.namespace.clone()),
        ];
        counter!(REQUESTS, &labels).increment(1);
        histogram!(DURATION, &labels).record(self.since.elapsed().as_secs_f64());
    }
}

fn method_name(method: &Method) -> &'static str {
    let known = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    let known = known.into_iter().find(|known| method.as_str() == *known);
    known.unwrap_or("other")
}
