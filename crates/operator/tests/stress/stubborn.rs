//! Conditions that need an API server with a permanent fault.

use crate::child::Operator;
use crate::faults::Faults;
use crate::kinds::{connect, install_kinds};
use crate::load::{api, claim, make_pool, pool_is_full};
use k8e_kube_dev::{Cluster, Options};
use k8e_operator::crd::{Sandbox, SandboxClaim, SandboxWarmPool};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Client;
use kube::api::PostParams;
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const AT_MOST: Duration = Duration::from_secs(120);

#[test]
fn permanent_faults_are_reported_in_conditions_and_retried() {
    let cluster = Cluster::up(Options::default()).expect("a cluster");
    let kubeconfig = cluster.kubeconfig();
    let runtime = Runtime::new().expect("a runtime");
    let client = runtime.block_on(async {
        let client = connect(&kubeconfig).await;
        install_kinds(&client).await;
        client
    });
    let healthy = Operator::start(&kubeconfig, Faults::None);
    runtime.block_on(async {
        make_pool(&client, 2).await;
        pool_is_full(&client, 2, AT_MOST).await;
    });
    drop(healthy);
    let stubborn = Operator::start(&kubeconfig, Faults::Stubborn);
    runtime.block_on(async {
        make_objects(&client).await;
        let conflict = |c: &SandboxClaim| c.condition("Ready").cloned();
        let said = says(&client, "warm", "AdoptionConflict", conflict).await;
        assert!(
            said.message
                .ends_with("; the next pass retries from a converged view")
        );
        let said = says(&client, "cold", "SandboxCreatePending", conflict).await;
        assert_eq!(
            said.message,
            "Sandbox already created; waiting for cache to converge"
        );
        let suspended = |s: &Sandbox| s.condition("Suspended").cloned();
        let said = says(&client, "asleep", "PodStateUnknown", suspended).await;
        assert_eq!(said.status, "Unknown");
        assert_eq!(
            said.message,
            "Pod state is unknown. Sandbox suspension cannot be confirmed"
        );
    });
    drop(stubborn);
    let _healthy = Operator::start(&kubeconfig, Faults::None);
    runtime.block_on(async {
        let ready = |c: &SandboxClaim| c.condition("Ready").cloned();
        says(&client, "warm", "DependenciesReady", ready).await;
        says(&client, "cold", "DependenciesReady", ready).await;
        let suspended = |s: &Sandbox| s.condition("Suspended").cloned();
        says(&client, "asleep", "PodTerminated", suspended).await;
    });
}

async fn make_objects(client: &Client) {
    let empty: SandboxWarmPool = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool", "metadata": {"name": "empty"},
        "spec": {"replicas": 0, "sandboxTemplateRef": {"name": "t"}},
    }))
    .expect("a pool");
    let asleep: Sandbox = serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "asleep"},
        "spec": {"operatingMode": "Suspended", "podTemplate": {"spec": {"containers": [{"name": "main", "image": "none"}]}}},
    }))
    .expect("a sandbox");
    let mut cold = claim("cold");
    cold.spec.warm_pool_ref.name = "empty".to_owned();
    let new = PostParams::default();
    api::<SandboxWarmPool>(client)
        .create(&new, &empty)
        .await
        .expect("taken");
    api::<Sandbox>(client)
        .create(&new, &asleep)
        .await
        .expect("taken");
    api::<SandboxClaim>(client)
        .create(&new, &claim("warm"))
        .await
        .expect("taken");
    api::<SandboxClaim>(client)
        .create(&new, &cold)
        .await
        .expect("taken");
}

/// Waits until an object's condition has this reason.
async fn says<K>(
    client: &Client,
    name: &str,
    reason: &str,
    condition: fn(&K) -> Option<Condition>,
) -> Condition
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + serde::de::DeserializeOwned
        + std::fmt::Debug,
{
    let started = Instant::now();
    loop {
        let object = api::<K>(client).get(name).await.expect("it is there");
        match condition(&object) {
            Some(condition) if condition.reason == reason => return condition,
            other => assert!(
                started.elapsed() < AT_MOST,
                "{name} says {other:?}, not {reason}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
