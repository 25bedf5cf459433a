//! Prometheus metrics: those of the agent-sandbox controller, with its names and buckets, and finer ones of our own.

use crate::cache::Key;
use crate::context::Context;
use crate::crd::conditions::{READY, is_true};
use crate::crd::names::{
    CLIENT_REQUESTED_AT, CREATED_BY, LAUNCH_TYPE, TEMPLATE_REF, WEBHOOK_OBSERVED_AT, known_client,
};
use crate::crd::{OperatingMode, Sandbox, SandboxClaim, SandboxTemplate};
use crate::error::{Error, Result};
use crate::object_meta::{annotation, controller_of, label};
use crate::timing::Seen;
use k8s_openapi::jiff::Timestamp;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::collections::BTreeMap;

const WEBHOOK_LATENCY: &str = "agent_sandbox_claim_startup_latency_ms";
const CONTROLLER_LATENCY: &str = "agent_sandbox_claim_controller_startup_latency_ms";
const CLIENT_LATENCY: &str = "agent_sandbox_client_claim_startup_latency_ms";
const CREATION_LATENCY: &str = "agent_sandbox_creation_latency_ms";
const FINE_LATENCY: &str = "k8e_claim_ready_seconds";

const CLAIM_BOUNDS: [f64; 15] = [
    100.0, 250.0, 500.0, 750.0, 1000.0, 1250.0, 1500.0, 2000.0, 2500.0, 5000.0, 10_000.0, 30_000.0,
    60_000.0, 120_000.0, 240_000.0,
];
const CREATION_BOUNDS: [f64; 12] = [
    50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0, 30_000.0, 60_000.0, 240_000.0,
    600_000.0,
];
/// Buckets in seconds. Those of agent-sandbox begin at 100 ms, by which a warm claim has long been served.
const FINE_BOUNDS: [f64; 16] = [
    0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.1, 0.25, 1.0,
    5.0, 30.0,
];

/// Installs the global metrics recorder; the handle renders `/metrics`.
pub(crate) fn install() -> Result<PrometheusHandle> {
    let bounds = |builder: PrometheusBuilder, name: &str, bounds: &[f64]| {
        builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
    };
    let wrong = |e: metrics_exporter_prometheus::BuildError| Error::Start(format!("metrics: {e}"));
    let mut builder = PrometheusBuilder::new();
    for name in [WEBHOOK_LATENCY, CONTROLLER_LATENCY, CLIENT_LATENCY] {
        builder = bounds(builder, name, &CLAIM_BOUNDS).map_err(wrong)?;
    }
    builder = bounds(builder, CREATION_LATENCY, &CREATION_BOUNDS).map_err(wrong)?;
    builder = bounds(builder, FINE_LATENCY, &FINE_BOUNDS).map_err(wrong)?;
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    // A second operator in the same process (tests) uses the recorder of the first.
    let _already = metrics::set_global_recorder(recorder);
    describe();
    Ok(handle)
}

fn describe() {
    describe_histogram!(
        WEBHOOK_LATENCY,
        "Time from the admission webhook to Ready of a claim, in ms"
    );
    describe_histogram!(
        CONTROLLER_LATENCY,
        "Time from the first observation by the controller to Ready of a claim, in ms"
    );
    describe_histogram!(
        CLIENT_LATENCY,
        "Time from the client's request to Ready of a claim, in ms"
    );
    describe_histogram!(
        CREATION_LATENCY,
        "Time from creation to Ready of a sandbox, in ms"
    );
    describe_histogram!(
        FINE_LATENCY,
        "Time from the first observation by the controller to Ready of a claim, in seconds"
    );
    describe_counter!(
        "agent_sandbox_claim_creation_total",
        "Claims that got a sandbox"
    );
    describe_counter!("agent_sandbox_expired_total", "Sandboxes that expired");
    describe_counter!(
        "agent_sandbox_finished_total",
        "Sandboxes whose pod finished"
    );
    describe_gauge!("agent_sandboxes", "Sandboxes by state");
    describe_gauge!(
        "agent_sandbox_warmpool_size",
        "Unclaimed sandboxes, by pool and state"
    );
    describe_gauge!(
        "agent_sandbox_build_info",
        "Always 1; the labels have version and platform"
    );
    describe_counter!(
        "k8e_operator_writes_total",
        "Write requests to the API server, by kind and verb"
    );
    describe_counter!(
        "k8e_operator_events_dropped_total",
        "Events dropped because the queue was full"
    );
    describe_gauge!(
        "k8e_operator_queue_depth",
        "Keys in the work queue, ready or being reconciled, by controller"
    );
    gauge!(
        "agent_sandbox_build_info",
        "git_version" => concat!("k8e-", env!("CARGO_PKG_VERSION")),
        "git_commit" => "", "build_date" => "", "go_version" => "", "compiler" => "rustc",
        "platform" => platform()
    )
    .set(1.0);
}

/// Platform in Go notation (`linux/amd64`), as on the dashboards of agent-sandbox.
fn platform() -> String {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{}/{arch}", std::env::consts::OS)
}

/// Counts a claim that was bound to a sandbox.
pub(crate) fn claim_created(
    claim: &SandboxClaim,
    template: &SandboxTemplate,
    launch: &'static str,
    ready: bool,
) {
    counter!(
        "agent_sandbox_claim_creation_total",
        "namespace" => claim.metadata.namespace.clone().unwrap_or_default(),
        "sandbox_template" => template.metadata.name.clone().unwrap_or_default(),
        "launch_type" => launch,
        "warmpool_name" => claim.spec.warm_pool_ref.name.clone(),
        "pod_condition" => if ready { "ready" } else { "not_ready" },
        "created_by" => known_client(label(&claim.metadata, CREATED_BY))
    )
    .increment(1);
}

/// Records the startup latency of a claim, when it is ready for the first time.
pub(crate) fn claim_ready(ctx: &Context, claim: &SandboxClaim, sandbox: &Sandbox, seen: &Seen) {
    let Some(ready) = seen.ready else {
        return;
    };
    let launch = launch_of(sandbox);
    let template = ctx.template_of(sandbox);
    let since = |start: Timestamp| ready.duration_since(start).as_secs_f64().max(0.0);
    let record = |name: &'static str, milliseconds: f64| {
        histogram!(name, "launch_type" => launch, "sandbox_template" => template.clone())
            .record(milliseconds);
    };
    record(CONTROLLER_LATENCY, since(seen.observed) * 1000.0);
    histogram!(FINE_LATENCY, "launch_type" => launch).record(since(seen.observed));
    for (name, key) in [
        (CLIENT_LATENCY, CLIENT_REQUESTED_AT),
        (WEBHOOK_LATENCY, WEBHOOK_OBSERVED_AT),
    ] {
        let start = annotation(&claim.metadata, key).and_then(|text| text.parse().ok());
        if let Some(start) = start {
            record(name, since(start) * 1000.0);
        }
    }
}

/// Records the creation latency of a sandbox, when it becomes ready.
pub(crate) fn sandbox_ready(ctx: &Context, sandbox: &Sandbox) {
    let Some(created) = &sandbox.metadata.creation_timestamp else {
        return;
    };
    let age = Timestamp::now().duration_since(created.0).as_secs_f64() * 1000.0;
    histogram!(
        CREATION_LATENCY,
        "namespace" => sandbox.metadata.namespace.clone().unwrap_or_default(),
        "launch_type" => launch_of(sandbox),
        "sandbox_template" => ctx.template_of(sandbox)
    )
    .record(age.max(0.0));
}

/// Counts a sandbox that expired.
pub(crate) fn sandbox_expired(ctx: &Context, sandbox: &Sandbox) {
    counter!(
        "agent_sandbox_expired_total",
        "namespace" => sandbox.metadata.namespace.clone().unwrap_or_default(),
        "sandbox_template" => ctx.template_of(sandbox),
        "owned_by" => owned_by(sandbox),
        "shutdown_policy" => format!("{:?}", sandbox.spec.shutdown_policy.unwrap_or_default())
    )
    .increment(1);
}

/// Counts a sandbox whose pod finished.
pub(crate) fn sandbox_finished(ctx: &Context, sandbox: &Sandbox, reason: &str) {
    counter!(
        "agent_sandbox_finished_total",
        "namespace" => sandbox.metadata.namespace.clone().unwrap_or_default(),
        "sandbox_template" => ctx.template_of(sandbox),
        "owned_by" => owned_by(sandbox),
        "reason" => reason.to_owned()
    )
    .increment(1);
}

impl Context {
    /// Updates the gauges; called for each scrape of `/metrics`.
    pub(crate) fn measure(&self) {
        let mut counts: BTreeMap<[String; 8], u32> = BTreeMap::new();
        for sandbox in self.caches.sandboxes.all() {
            *counts.entry(self.state_of(&sandbox)).or_default() += 1;
        }
        // Label sets without sandboxes must not keep their last value.
        let mut last = self
            .measured
            .lock()
            .expect("no code panics under this lock");
        for gone in last.iter().filter(|labels| !counts.contains_key(*labels)) {
            set_sandboxes(gone, 0);
        }
        for (labels, count) in &counts {
            set_sandboxes(labels, *count);
        }
        *last = counts.into_keys().collect();
        for (name, queue) in self.queues.all() {
            gauge!("k8e_operator_queue_depth", "controller" => name)
                .set(f64::from(u32::try_from(queue.depth()).unwrap_or(u32::MAX)));
        }
        for pool in self.caches.pools.all() {
            self.measure_pool(&pool);
        }
    }

    fn measure_pool(&self, pool: &crate::crd::SandboxWarmPool) {
        let members = self.members_of(pool);
        let ready = members
            .iter()
            .filter(|m| is_true(m.condition(READY)))
            .count();
        for (state, count) in [("ready", ready), ("not_ready", members.len() - ready)] {
            gauge!(
                "agent_sandbox_warmpool_size",
                "namespace" => pool.metadata.namespace.clone().unwrap_or_default(),
                "warmpool_name" => pool.metadata.name.clone().unwrap_or_default(),
                "sandbox_template" => pool.spec.sandbox_template_ref.name.clone(),
                "sandbox_status" => state
            )
            .set(f64::from(u32::try_from(count).unwrap_or(u32::MAX)));
        }
    }
}

fn set_sandboxes(labels: &[String; 8], count: u32) {
    let [
        namespace,
        ready,
        expired,
        launch,
        template,
        owner,
        client,
        mode,
    ] = labels.clone();
    gauge!(
        "agent_sandboxes",
        "namespace" => namespace, "ready_condition" => ready, "expired" => expired,
        "launch_type" => launch, "sandbox_template" => template, "owned_by" => owner,
        "created_by" => client, "operating_mode" => mode
    )
    .set(f64::from(count));
}

// Cardinality: label values are few, and users cannot create them, since a series stays for ever.

impl Context {
    fn state_of(&self, sandbox: &Sandbox) -> [String; 8] {
        let meta = &sandbox.metadata;
        let ready = sandbox.condition(READY);
        let expired = ready.is_some_and(|c| c.reason == "SandboxExpired");
        let mode = match sandbox.operating_mode() {
            OperatingMode::Running => "Running",
            OperatingMode::Suspended => "Suspended",
        };
        [
            meta.namespace.clone().unwrap_or_default(),
            is_true(ready).to_string(),
            expired.to_string(),
            launch_of(sandbox).to_owned(),
            self.template_of(sandbox),
            owned_by(sandbox).to_owned(),
            known_client(label(meta, CREATED_BY)).to_owned(),
            mode.to_owned(),
        ]
    }

    /// The template of a sandbox, if a template of that name exists; else "unknown".
    fn template_of(&self, sandbox: &Sandbox) -> String {
        let meta = &sandbox.metadata;
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let name = annotation(meta, TEMPLATE_REF).unwrap_or_default();
        match self.caches.templates.get(&Key::new(namespace, name)) {
            Some(_) => name.to_owned(),
            None => "unknown".to_owned(),
        }
    }
}

fn launch_of(sandbox: &Sandbox) -> &'static str {
    match label(&sandbox.metadata, LAUNCH_TYPE) {
        Some("warm") => "warm",
        Some("cold") => "cold",
        _ => "unknown",
    }
}

fn owned_by(sandbox: &Sandbox) -> &'static str {
    match controller_of(&sandbox.metadata).map(|owner| owner.kind.as_str()) {
        Some("SandboxClaim") => "SandboxClaim",
        Some("SandboxWarmPool") => "SandboxWarmPool",
        Some(_) => "Other",
        None => "None",
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_platform_is_in_go_notation() {
        let want = match () {
            () if cfg!(all(target_os = "linux", target_arch = "x86_64")) => "linux/amd64",
            () if cfg!(all(target_os = "linux", target_arch = "aarch64")) => "linux/arm64",
            () => return,
        };
        assert_eq!(super::platform(), want);
    }
}
