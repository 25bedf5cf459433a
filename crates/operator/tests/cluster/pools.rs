//! SandboxWarmPool: fill, scale, update strategies.

use crate::rig::test;
use k8e_operator::crd::names::{
    self, CREATED_BY, LAUNCH_TYPE, TEMPLATE_REF, TEMPLATE_REF_HASH, WARM_POOL,
};
use k8e_operator::crd::{Sandbox, SandboxTemplate, SandboxWarmPool};
use kube::ResourceExt;
use serde_json::{Value, json};
use std::collections::BTreeSet;

async fn members(space: &crate::rig::Space) -> BTreeSet<String> {
    let sandboxes = space.list::<Sandbox>().await;
    let alive = sandboxes
        .iter()
        .filter(|s| s.metadata.deletion_timestamp.is_none());
    alive.map(ResourceExt::name_any).collect()
}

fn image(name: &str) -> Value {
    json!({"spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": name}]}}}})
}

#[test]
fn a_pool_is_filled_and_scaled() {
    test(async |space| {
        space.ready_pool("pool", 3).await;
        let pool = space.pool_has("pool", 3).await;
        let status = pool.status.expect("a status");
        assert_eq!(
            status.selector,
            Some(format!("{WARM_POOL}={}", names::hash("pool")))
        );
        assert_eq!(status.observed_generation, pool.metadata.generation);
        for sandbox in space.list::<Sandbox>().await {
            assert!(sandbox.name_any().starts_with("pool-"));
            let owner = &sandbox.owner_references()[0];
            assert_eq!(
                (owner.kind.as_str(), owner.controller),
                ("SandboxWarmPool", Some(true))
            );
            let label = |key: &str| sandbox.labels().get(key).cloned();
            assert_eq!(label(WARM_POOL), Some(names::hash("pool")));
            assert_eq!(label(TEMPLATE_REF_HASH), Some(names::hash("t")));
            assert_eq!(label(CREATED_BY).as_deref(), Some("controller"));
            assert!(label(LAUNCH_TYPE).is_some());
            assert_eq!(
                sandbox.annotations().get(TEMPLATE_REF).map(String::as_str),
                Some("t")
            );
        }
        space
            .patch::<SandboxWarmPool>("pool", json!({"spec": {"replicas": 5}}))
            .await;
        space.pool_has("pool", 5).await;
        space
            .patch::<SandboxWarmPool>("pool", json!({"spec": {"replicas": 1}}))
            .await;
        space.pool_has("pool", 1).await;
        space
            .eventually("one is left", async || members(&space).await.len() == 1)
            .await;
        space.delete::<SandboxWarmPool>("pool").await;
        space
            .eventually("none is left", async || members(&space).await.is_empty())
            .await;
    });
}

#[test]
fn a_deleted_sandbox_is_replaced() {
    test(async |space| {
        space.ready_pool("pool", 2).await;
        let before = members(&space).await;
        let lost = before.first().expect("one");
        space.delete::<Sandbox>(lost).await;
        space
            .eventually("another came", async || {
                let now = members(&space).await;
                now.len() == 2 && !now.contains(lost)
            })
            .await;
        space.pool_has("pool", 2).await;
    });
}

#[test]
fn a_sandbox_whose_pod_finished_is_replaced() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        let before = members(&space).await;
        let name = before.first().expect("one");
        space
            .patch::<k8s_openapi::api::core::v1::Pod>(
                name,
                json!({"metadata": {"annotations": {"k8e.test/complete": "failed"}}}),
            )
            .await;
        space
            .eventually("another came", async || {
                let now = members(&space).await;
                now.len() == 1 && now != before
            })
            .await;
        space.pool_has("pool", 1).await;
    });
}

#[test]
fn a_changed_template_replaces_sandboxes_only_with_recreate() {
    test(async |space| {
        space.ready_pool("pool", 2).await;
        let before = members(&space).await;
        space.patch::<SandboxTemplate>("t", image("newer")).await;
        // A claim is bound to an old sandbox; its replacement is new.
        space.claim("mine", "pool", json!({})).await;
        let claim = space.claim_ready("mine").await;
        assert!(before.contains(claim.bound_name().expect("a sandbox")));
        space.pool_has("pool", 2).await;
        let images: BTreeSet<_> = space
            .list::<Sandbox>()
            .await
            .iter()
            .filter(|s| s.labels().contains_key(WARM_POOL))
            .filter_map(|s| s.spec.pod_template.spec.containers[0].image.clone())
            .collect();
        assert_eq!(images, ["newer".to_owned(), "none".to_owned()].into());

        space
            .patch::<SandboxWarmPool>(
                "pool",
                json!({"spec": {"updateStrategy": {"type": "Recreate"}}}),
            )
            .await;
        space
            .eventually("all are new", async || {
                let all = space.list::<Sandbox>().await;
                let mut waiting = all.iter().filter(|s| s.labels().contains_key(WARM_POOL));
                waiting.all(|s| {
                    s.spec.pod_template.spec.containers[0].image.as_deref() == Some("newer")
                })
            })
            .await;
        space.pool_has("pool", 2).await;
    });
}

#[test]
fn labels_alone_do_not_make_a_sandbox_stale() {
    test(async |space| {
        space.template("t", json!({})).await;
        space
            .pool(
                "pool",
                "t",
                2,
                json!({"updateStrategy": {"type": "Recreate"}}),
            )
            .await;
        space.pool_has("pool", 2).await;
        let before = members(&space).await;
        space
            .patch::<SandboxTemplate>(
                "t",
                json!({"spec": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}}),
            )
            .await;
        space
            .patch::<SandboxWarmPool>("pool", json!({"spec": {"replicas": 3}}))
            .await;
        space.pool_has("pool", 3).await;
        assert!(before.is_subset(&members(&space).await));
    });
}

#[test]
fn another_template_makes_pooled_sandboxes_stale() {
    test(async |space| {
        space.template("t", json!({})).await;
        space.template("u", json!({})).await;
        space
            .pool(
                "pool",
                "t",
                2,
                json!({"updateStrategy": {"type": "Recreate"}}),
            )
            .await;
        space
            .pool(
                "other",
                "t",
                1,
                json!({"updateStrategy": {"type": "Recreate"}}),
            )
            .await;
        space.pool_has("pool", 2).await;
        space.pool_has("other", 1).await;
        let before = members(&space).await;
        let kept: BTreeSet<_> = before
            .iter()
            .filter(|n| n.starts_with("other-"))
            .cloned()
            .collect();
        space
            .patch::<SandboxWarmPool>(
                "pool",
                json!({"spec": {"sandboxTemplateRef": {"name": "u"}}}),
            )
            .await;
        space
            .eventually("the others came", async || {
                let now = members(&space).await;
                now.len() == 3
                    && now.intersection(&before).cloned().collect::<BTreeSet<_>>() == kept
            })
            .await;
        space.pool_has("pool", 2).await;
    });
}

#[test]
fn a_sandbox_without_an_owner_is_adopted() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        let mut orphan = space.list::<Sandbox>().await.remove(0);
        let spec = serde_json::to_value(&orphan.spec).expect("a spec");
        orphan.metadata.name = None;
        let _: Sandbox = space
            .create(json!({
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
                "metadata": {"name": "orphan", "labels": orphan.metadata.labels},
                "spec": spec,
            }))
            .await;
        // One of the two is surplus and deleted; what matters is that the pool adopted both.
        space
            .eventually("one is left, and owned", async || {
                let all = space.list::<Sandbox>().await;
                all.len() == 1 && all[0].owner_references().len() == 1
            })
            .await;
    });
}

#[test]
fn an_unschedulable_pool_keeps_its_sandboxes() {
    test(async |space| {
        space
            .template(
                "t",
                json!({"podTemplate": {"spec": {"nodeSelector": {"no": "where"}}}}),
            )
            .await;
        space.pool("pool", "t", 2, json!({})).await;
        space
            .until::<SandboxWarmPool>("pool", |p| {
                let status = p.status.clone().unwrap_or_default();
                status.replicas == Some(2) && status.ready_replicas == Some(0)
            })
            .await;
        // An unschedulable sandbox is not bound: the claim starts cold, and reports the reason.
        space.claim("mine", "pool", json!({})).await;
        let claim = space.claim_says("mine", "DependenciesNotReady").await;
        assert!(claim.bound_name().is_some());
    });
}
