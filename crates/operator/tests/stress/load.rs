//! Test objects, and a watch that records what happens to them.

use futures::{StreamExt, TryStreamExt};
use k8e_operator::crd::names::CLAIM_UID;
use k8e_operator::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use kube::api::{Api, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const NAMESPACE: &str = "default";
pub(crate) const POOL: &str = "pool";

/// Everything that the watch observed.
#[derive(Default)]
pub(crate) struct Seen {
    /// Time at which each claim was first ready.
    pub(crate) ready: BTreeMap<String, Instant>,
    /// UIDs of the claims that each sandbox was ever bound to.
    pub(crate) claims_of: BTreeMap<String, BTreeSet<String>>,
}

pub(crate) fn api<K>(client: &Client) -> Api<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(client.clone(), NAMESPACE)
}

/// Watches claims and sandboxes from now on.
pub(crate) fn observe(client: &Client) -> Arc<Mutex<Seen>> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let (claims, sandboxes) = (seen.clone(), seen.clone());
    let watch = watcher::watcher(api::<SandboxClaim>(client), watcher::Config::default());
    tokio::spawn(
        watch
            .default_backoff()
            .touched_objects()
            .into_stream()
            .for_each(move |claim| {
                let Ok(claim) = claim else {
                    return std::future::ready(());
                };
                if claim.condition("Ready").is_some_and(|c| c.status == "True") {
                    let mut seen = claims.lock().expect("no code panics under this lock");
                    seen.ready
                        .entry(claim.name_any())
                        .or_insert_with(Instant::now);
                }
                std::future::ready(())
            }),
    );
    let watch = watcher::watcher(api::<Sandbox>(client), watcher::Config::default());
    tokio::spawn(
        watch
            .default_backoff()
            .touched_objects()
            .into_stream()
            .for_each(move |sandbox| {
                let Ok(sandbox) = sandbox else {
                    return std::future::ready(());
                };
                if let Some(claim) = sandbox.labels().get(CLAIM_UID) {
                    let mut seen = sandboxes.lock().expect("no code panics under this lock");
                    seen.claims_of
                        .entry(sandbox.uid().unwrap_or_default())
                        .or_default()
                        .insert(claim.clone());
                }
                std::future::ready(())
            }),
    );
    seen
}

pub(crate) async fn make_pool(client: &Client, replicas: usize) {
    let template: SandboxTemplate = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate", "metadata": {"name": "t"},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "none"}]}}},
    }))
    .expect("a template");
    api::<SandboxTemplate>(client)
        .create(&PostParams::default(), &template)
        .await
        .expect("taken");
    let pool: SandboxWarmPool = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool", "metadata": {"name": POOL},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": "t"}},
    }))
    .expect("a pool");
    api::<SandboxWarmPool>(client)
        .create(&PostParams::default(), &pool)
        .await
        .expect("taken");
}

pub(crate) fn claim(name: &str) -> SandboxClaim {
    serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim", "metadata": {"name": name},
        "spec": {"warmPoolRef": {"name": POOL}},
    }))
    .expect("a claim")
}

/// Waits until the pool has exactly this many sandboxes, all ready.
pub(crate) async fn pool_is_full(client: &Client, replicas: usize, at_most: Duration) {
    let started = Instant::now();
    let wanted = i32::try_from(replicas).ok();
    loop {
        let pool = api::<SandboxWarmPool>(client).get(POOL).await;
        let status = pool.ok().and_then(|p| p.status).unwrap_or_default();
        if status.ready_replicas == wanted && status.replicas == wanted {
            return;
        }
        assert!(
            started.elapsed() < at_most,
            "the pool is not full: {status:?}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Asserts that no sandbox was ever bound to two claims.
pub(crate) fn none_twice(seen: &Mutex<Seen>) {
    let seen = seen.lock().expect("no code panics under this lock");
    for (sandbox, claims) in &seen.claims_of {
        assert_eq!(claims.len(), 1, "sandbox {sandbox} had claims {claims:?}");
    }
}
