//! SandboxClaim: warm and cold starts, and validation.

use crate::rig::{Space, condition, rig, test};
use k8e_operator::crd::names::{
    self, ASSIGNED, CLAIM_UID, LAUNCH_TYPE, OBSERVED_AT, POD_NAME, READY_AT, SAFE_TO_EVICT,
    TEMPLATE_HASH, TEMPLATE_REF_HASH, WARM_POOL,
};
use k8e_operator::crd::{Sandbox, SandboxClaim};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn bound(claim: &SandboxClaim) -> String {
    claim.bound_name().expect("a sandbox").to_owned()
}

async fn sandbox_of(space: &Space, claim: &SandboxClaim) -> Sandbox {
    space
        .get(&bound(claim))
        .await
        .expect("the sandbox of the claim")
}

#[test]
fn a_claim_is_bound_to_a_warm_sandbox() {
    test(async |space| {
        space.ready_pool("pool", 2).await;
        let waiting: Vec<_> = space
            .list::<Sandbox>()
            .await
            .iter()
            .map(ResourceExt::name_any)
            .collect();
        let pod = space.get::<Pod>(&waiting[0]).await.expect("a pod");
        assert_eq!(pod.labels().get(WARM_POOL), Some(&names::hash("pool")));
        assert_eq!(
            pod.annotations().get(SAFE_TO_EVICT).map(String::as_str),
            Some("true")
        );

        space.claim("mine", "pool", json!({})).await;
        let claim = space.claim_ready("mine").await;
        let name = bound(&claim);
        assert!(waiting.contains(&name), "one of those that waited");
        assert_eq!(
            condition(claim.condition("Ready")),
            ("True", "DependenciesReady", "Pod is Ready")
        );
        assert_eq!(
            claim.condition("Ready").and_then(|c| c.observed_generation),
            claim.metadata.generation
        );
        let addresses = claim
            .status
            .as_ref()
            .and_then(|s| s.sandbox.as_ref())
            .and_then(|s| s.pod_ips.clone());
        assert_eq!(
            addresses.map(|ips| ips.len()),
            Some(1),
            "name, addresses and Ready come in one write"
        );

        let sandbox = sandbox_of(&space, &claim).await;
        let owner = &sandbox.owner_references()[0];
        assert_eq!(
            (owner.kind.as_str(), Some(owner.uid.clone())),
            ("SandboxClaim", claim.uid())
        );
        assert_eq!(
            (owner.controller, owner.block_owner_deletion),
            (Some(true), Some(true))
        );
        let labels = sandbox.labels();
        assert_eq!(labels.get(CLAIM_UID), claim.uid().as_ref());
        assert_eq!(labels.get(LAUNCH_TYPE).map(String::as_str), Some("warm"));
        assert_eq!(labels.get(TEMPLATE_REF_HASH), Some(&names::hash("t")));
        assert!(!labels.contains_key(WARM_POOL) && !labels.contains_key(TEMPLATE_HASH));
        assert_eq!(sandbox.annotations().get(POD_NAME), Some(&name));
        assert_eq!(
            sandbox.metadata.generation,
            Some(1),
            "its spec is not touched"
        );

        let marked = |pod: &Pod| pod.labels().get(CLAIM_UID) == claim.uid().as_ref();
        let pod = space.until::<Pod>(&name, marked).await;
        assert!(
            !pod.labels().contains_key(WARM_POOL),
            "or the router would not route to it"
        );
        assert!(!pod.annotations().contains_key(SAFE_TO_EVICT));

        let noted = |c: &SandboxClaim| c.annotations().contains_key(READY_AT);
        let claim = space.until::<SandboxClaim>("mine", noted).await;
        for key in [OBSERVED_AT, READY_AT] {
            let time: Result<Timestamp, _> = claim.annotations()[key].parse();
            assert!(time.is_ok(), "{key}");
        }
        assert_eq!(claim.annotations().get(ASSIGNED), Some(&name));
        let adopted = format!("Adopted warm pool Sandbox \"{name}\"");
        space
            .eventually("its event", async || {
                space
                    .events("mine")
                    .await
                    .contains(&("SandboxAdopted".to_owned(), adopted.clone()))
            })
            .await;
        space.pool_has("pool", 2).await;
        assert_eq!(space.list::<Sandbox>().await.len(), 3);

        space.delete::<SandboxClaim>("mine").await;
        space.gone::<Sandbox>(&name).await;
        space.gone::<Pod>(&name).await;
    });
}

#[test]
fn a_claim_on_an_empty_pool_starts_cold() {
    test(async |space| {
        space.template("t", json!({})).await;
        space.pool("pool", "t", 0, json!({})).await;
        space.claim("mine", "pool", json!({})).await;
        let claim = space.claim_ready("mine").await;
        assert_eq!(bound(&claim), "mine");
        let sandbox = sandbox_of(&space, &claim).await;
        assert_eq!(
            sandbox.labels().get(LAUNCH_TYPE).map(String::as_str),
            Some("cold")
        );
        let pod = sandbox.spec.pod_template.spec;
        assert_eq!(pod.automount_service_account_token, Some(false));
        assert_eq!(pod.dns_policy.as_deref(), Some("None"));
        let pod = space.get::<Pod>("mine").await.expect("a pod");
        assert_eq!(pod.labels().get(CLAIM_UID), claim.uid().as_ref());
        assert!(
            !sandbox
                .metadata
                .annotations
                .unwrap_or_default()
                .contains_key(POD_NAME)
        );
        space
            .eventually("its event", async || {
                let made = (
                    "SandboxProvisioned".to_owned(),
                    "Created Sandbox \"mine\"".to_owned(),
                );
                space.events("mine").await.contains(&made)
            })
            .await;
    });
}

#[test]
fn a_missing_pool_or_template_is_named_and_used_once_created() {
    test(async |space| {
        space.claim("mine", "pool", json!({})).await;
        let claim = space.claim_says("mine", "WarmPoolNotFound").await;
        assert_eq!(
            condition(claim.condition("Ready")).2,
            "SandboxWarmPool \"pool\" not found"
        );
        assert_eq!(
            claim
                .status
                .expect("a status")
                .conditions
                .expect("conditions")
                .len(),
            1
        );
        space.pool("pool", "t", 0, json!({})).await;
        space.claim_says("mine", "TemplateNotFound").await;
        space
            .eventually("the pool's event", async || {
                space
                    .events("pool")
                    .await
                    .iter()
                    .any(|(r, _)| r == "TemplateNotFound")
            })
            .await;
        space.template("t", json!({})).await;
        space.claim_ready("mine").await;
    });
}

#[test]
fn concurrent_claims_get_a_sandbox_each() {
    test(async |space| {
        space.ready_pool("pool", 4).await;
        let names: Vec<String> = (0..10).map(|n| format!("c{n}")).collect();
        futures::future::join_all(
            names
                .iter()
                .map(|name| space.claim(name, "pool", json!({}))),
        )
        .await;
        let mut sandboxes = BTreeSet::new();
        for name in &names {
            sandboxes.insert(bound(&space.claim_ready(name).await));
        }
        assert_eq!(sandboxes.len(), 10, "none twice");
        space.pool_has("pool", 4).await;
        assert_eq!(space.list::<Sandbox>().await.len(), 14);
    });
}

#[test]
fn labels_of_a_claim_reach_a_warm_pod() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        let metadata =
            json!({"labels": {"sandbox.users.io/team": "a"}, "annotations": {"note": "x"}});
        space
            .claim("mine", "pool", json!({"additionalPodMetadata": metadata}))
            .await;
        let claim = space.claim_ready("mine").await;
        let marked = |p: &Pod| {
            p.labels().contains_key("sandbox.users.io/team") && p.annotations().contains_key("note")
        };
        space.until::<Pod>(&bound(&claim), marked).await;
        space.patch::<SandboxClaim>("mine", json!({"spec": {"additionalPodMetadata": {"labels": {"sandbox.users.io/team": "b"}, "annotations": null}}})).await;
        let changed = |p: &Pod| {
            p.labels().get("sandbox.users.io/team").map(String::as_str) == Some("b")
                && !p.annotations().contains_key("note")
        };
        space.until::<Pod>(&bound(&claim), changed).await;
        let current = |c: &SandboxClaim| {
            c.condition("Ready").and_then(|c| c.observed_generation) == c.metadata.generation
        };
        space.until::<SandboxClaim>("mine", current).await;
    });
}

#[test]
fn labels_that_a_claim_may_not_set_are_refused() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        for (name, metadata) in [
            ("a", json!({"labels": {"team": "a"}})),
            ("b", json!({"labels": {"app": "sandbox-router"}})),
            ("c", json!({"annotations": {"x.kubernetes.io/y": "z"}})),
        ] {
            space
                .claim(name, "pool", json!({"additionalPodMetadata": metadata}))
                .await;
            let claim = space.claim_says(name, "InvalidMetadata").await;
            assert_eq!(claim.bound_name(), None);
        }
        space.pool_has("pool", 1).await;
    });
}

#[test]
fn a_bound_claim_that_becomes_invalid_keeps_its_sandbox() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        space.claim("mine", "pool", json!({})).await;
        let name = bound(&space.claim_ready("mine").await);
        let wrong = json!({"spec": {"additionalPodMetadata": {"labels": {"team": "a"}}}});
        space.patch::<SandboxClaim>("mine", wrong).await;
        let claim = space.claim_says("mine", "InvalidMetadata").await;
        assert_eq!(bound(&claim), name);
        let right = json!({"spec": {"additionalPodMetadata": null}});
        space.patch::<SandboxClaim>("mine", right).await;
        assert_eq!(bound(&space.claim_ready("mine").await), name);
    });
}

async fn with_policies(space: &Space, policy: &str, container: Value) {
    let spec = json!({
        "envVarsInjectionPolicy": policy, "volumeClaimTemplatesPolicy": policy,
        "volumeClaimTemplates": [volume("base", "1Gi")],
        "podTemplate": {"spec": {"containers": [container]}},
    });
    space.template("t", spec).await;
    space.pool("pool", "t", 0, json!({})).await;
}

fn volume(name: &str, size: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}})
}

fn container() -> Value {
    json!({"name": "main", "image": "none", "env": [{"name": "OLD", "value": "1"}]})
}

async fn env_of(space: &Space, name: &str) -> Vec<(String, String)> {
    let claim = space.claim_ready(name).await;
    let sandbox = sandbox_of(space, &claim).await;
    let env = sandbox.spec.pod_template.spec.containers[0]
        .env
        .clone()
        .unwrap_or_default();
    env.into_iter()
        .map(|v| (v.name, v.value.unwrap_or_default()))
        .collect()
}

#[test]
fn injection_policy_disallowed_refuses_additions() {
    test(async |space| {
        with_policies(&space, "Disallowed", container()).await;
        space
            .claim(
                "env",
                "pool",
                json!({"env": [{"name": "NEW", "value": "2"}]}),
            )
            .await;
        space
            .claim(
                "volume",
                "pool",
                json!({"volumeClaimTemplates": [volume("more", "1Gi")]}),
            )
            .await;
        space.claim_says("env", "EnvVarsInjectionRejected").await;
        space
            .claim_says("volume", "VolumeClaimTemplatesError")
            .await;
        assert!(space.list::<Sandbox>().await.is_empty());
    });
}

#[test]
fn injection_policy_allowed_accepts_new_names() {
    test(async |space| {
        with_policies(&space, "Allowed", container()).await;
        space
            .claim(
                "new",
                "pool",
                json!({"env": [{"name": "NEW", "value": "2"}]}),
            )
            .await;
        let env = env_of(&space, "new").await;
        assert_eq!(
            env,
            [
                ("OLD".to_owned(), "1".to_owned()),
                ("NEW".to_owned(), "2".to_owned())
            ]
        );
        for (name, spec, reason) in [
            (
                "override",
                json!({"env": [{"name": "OLD", "value": "2"}]}),
                "EnvVarsInjectionRejected",
            ),
            (
                "nowhere",
                json!({"env": [{"name": "A", "value": "2", "containerName": "no"}]}),
                "EnvVarsInjectionRejected",
            ),
            (
                "replace",
                json!({"volumeClaimTemplates": [volume("base", "2Gi")]}),
                "VolumeClaimTemplatesError",
            ),
            (
                "twice",
                json!({"volumeClaimTemplates": [volume("a", "1Gi"), volume("a", "1Gi")]}),
                "VolumeClaimTemplatesError",
            ),
            (
                "nameless",
                json!({"volumeClaimTemplates": [volume("", "1Gi")]}),
                "VolumeClaimTemplatesError",
            ),
        ] {
            space.claim(name, "pool", spec).await;
            space.claim_says(name, reason).await;
        }
        space
            .claim(
                "volume",
                "pool",
                json!({"volumeClaimTemplates": [volume("more", "1Gi")]}),
            )
            .await;
        let claim = space.claim_ready("volume").await;
        let sandbox = sandbox_of(&space, &claim).await;
        let names: Vec<_> = sandbox
            .spec
            .volume_claim_templates
            .iter()
            .flatten()
            .map(|v| v.name().to_owned())
            .collect();
        assert_eq!(names, ["base", "more"]);
    });
}

#[test]
fn injection_is_refused_for_containers_with_env_from() {
    test(async |space| {
        let mut container = container();
        container["envFrom"] = json!([{"configMapRef": {"name": "x", "optional": true}}]);
        with_policies(&space, "Allowed", container).await;
        space
            .claim(
                "mine",
                "pool",
                json!({"env": [{"name": "NEW", "value": "2"}]}),
            )
            .await;
        space.claim_says("mine", "EnvVarsInjectionRejected").await;
    });
}

#[test]
fn injection_policy_overrides_replaces_names() {
    test(async |space| {
        with_policies(&space, "Overrides", container()).await;
        let spec = json!({"env": [{"name": "OLD", "value": "2", "containerName": "main"}], "volumeClaimTemplates": [volume("base", "2Gi")]});
        space.claim("mine", "pool", spec).await;
        assert_eq!(
            env_of(&space, "mine").await,
            [("OLD".to_owned(), "2".to_owned())]
        );
        let sandbox = space.get::<Sandbox>("mine").await.expect("a sandbox");
        assert_eq!(
            sandbox.spec.volume_claim_templates.map(|v| v.len()),
            Some(1)
        );
    });
}

#[test]
fn a_taken_sandbox_name_is_reported() {
    test(async |space| {
        space.template("t", json!({})).await;
        space.pool("pool", "t", 0, json!({})).await;
        space.sandbox("mine", json!({})).await;
        space.sandbox_ready("mine").await;
        space.claim("mine", "pool", json!({})).await;
        let claim = space.claim_says("mine", "ReconcilerError").await;
        assert!(
            condition(claim.condition("Ready"))
                .2
                .starts_with("Error seen: sandbox \"mine\" exists")
        );
        space.delete::<Sandbox>("mine").await;
        space.claim_ready("mine").await;
    });
}

#[test]
fn a_claim_whose_sandbox_was_deleted_gets_another() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        space.claim("mine", "pool", json!({})).await;
        let first = bound(&space.claim_ready("mine").await);
        space.pool_has("pool", 1).await;
        // A finalizer keeps the sandbox terminating, so that the status of the claim meanwhile can be checked.
        space
            .patch::<Sandbox>(
                &first,
                json!({"metadata": {"finalizers": ["test.k8e.dev/hold"]}}),
            )
            .await;
        space.delete::<Sandbox>(&first).await;
        let claim = space.claim_says("mine", "SandboxMissing").await;
        assert_eq!(
            condition(claim.condition("Ready")).2,
            "Sandbox does not exist"
        );
        space
            .patch::<Sandbox>(&first, json!({"metadata": {"finalizers": null}}))
            .await;
        let claim = space.claim_ready("mine").await;
        assert_ne!(bound(&claim), first);
    });
}

#[test]
fn a_second_sandbox_of_a_claim_is_deleted() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        space.claim("mine", "pool", json!({})).await;
        let claim = space.claim_ready("mine").await;
        let first = sandbox_of(&space, &claim).await;
        let second = json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "another", "ownerReferences": first.metadata.owner_references},
            "spec": {"podTemplate": {"spec": crate::rig::pod_spec()}},
        });
        let _: Sandbox = space.create(second).await;
        space.gone::<Sandbox>("another").await;
        assert_eq!(bound(&space.claim_ready("mine").await), first.name_any());
    });
}

#[test]
fn the_assignment_of_another_controller_is_used() {
    test(async |space| {
        space.ready_pool("pool", 3).await;
        let waiting = space.list::<Sandbox>().await;
        let chosen = waiting[1].name_any();
        let _: SandboxClaim = space
            .create(json!({
                "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
                "metadata": {"name": "mine", "annotations": {ASSIGNED: chosen}},
                "spec": {"warmPoolRef": {"name": "pool"}},
            }))
            .await;
        assert_eq!(bound(&space.claim_ready("mine").await), chosen);
    });
}

#[test]
fn a_claim_mirrors_the_status_of_its_sandbox() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        space.claim("mine", "pool", json!({})).await;
        let name = bound(&space.claim_ready("mine").await);
        space
            .patch::<Sandbox>(&name, json!({"spec": {"operatingMode": "Suspended"}}))
            .await;
        space.claim_says("mine", "SandboxSuspended").await;
        space
            .patch::<Sandbox>(&name, json!({"spec": {"operatingMode": "Running"}}))
            .await;
        space.claim_ready("mine").await;
        space
            .patch::<Sandbox>(
                &name,
                json!({"spec": {"shutdownTime": "2020-01-01T00:00:00Z"}}),
            )
            .await;
        let claim = space.claim_says("mine", "SandboxExpired").await;
        let words = "Underlying Sandbox resource has expired independently of the Claim.";
        assert_eq!(condition(claim.condition("Ready")).2, words);
    });
}

#[test]
fn an_invalid_spec_is_reported_on_the_claim() {
    test(async |space| {
        let bad = json!({"podTemplate": {"spec": {"containers": [{"name": "Not A Name", "image": "none"}]}}});
        space.template("t", bad).await;
        space.pool("pool", "t", 0, json!({})).await;
        space.claim("mine", "pool", json!({})).await;
        space.claim_says("mine", "InvalidConfiguration").await;
    });
}

#[test]
fn sandboxes_on_a_cordoned_node_are_not_bound() {
    test(async |space| {
        space.ready_pool("pool", 2).await;
        let node = space.list::<Sandbox>().await[0]
            .status
            .as_ref()
            .and_then(|s| s.node_name.clone())
            .expect("a node");
        let on_node: BTreeSet<_> = space
            .list::<Sandbox>()
            .await
            .iter()
            .filter(|s| s.status.as_ref().and_then(|s| s.node_name.as_ref()) == Some(&node))
            .map(ResourceExt::name_any)
            .collect();
        let nodes: Api<Node> = Api::all(rig().client.clone());
        let cordon = |on: bool| Patch::Merge(json!({"spec": {"unschedulable": on}}));
        nodes
            .patch(&node, &PatchParams::default(), &cordon(true))
            .await
            .expect("cordoned");
        // The operator's watch of nodes has its own delay; a claim shows when it has the change.
        let free_elsewhere = 2 - on_node.len();
        space.claim("mine", "pool", json!({})).await;
        let ready = std::panic::AssertUnwindSafe(space.claim_ready("mine"));
        let claim = futures::FutureExt::catch_unwind(ready).await;
        nodes
            .patch(&node, &PatchParams::default(), &cordon(false))
            .await
            .expect("uncordoned");
        let got = bound(&claim.expect("a claim that is ready"));
        assert!(
            !on_node.contains(&got),
            "{got} is on {node}; free elsewhere: {free_elsewhere}"
        );
    });
}
