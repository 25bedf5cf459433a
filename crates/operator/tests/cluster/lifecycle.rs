//! Expiry and deletion of sandboxes and claims.

use crate::rig::{condition, rig, test};
use k8e_operator::crd::{Sandbox, SandboxClaim};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

fn soon() -> String {
    let at = Timestamp::now() + SignedDuration::from_secs(3);
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

const PAST: &str = "2020-01-01T00:00:00Z";

#[test]
fn an_expired_sandbox_is_retained() {
    test(async |space| {
        let volume = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
        space
            .sandbox(
                "box",
                json!({"service": true, "volumeClaimTemplates": [volume]}),
            )
            .await;
        space.sandbox_ready("box").await;
        space
            .patch::<Sandbox>("box", json!({"spec": {"shutdownTime": soon()}}))
            .await;
        let sandbox = space
            .sandbox_says(
                "box",
                "Ready",
                ("False", "SandboxExpired", "Sandbox has expired"),
            )
            .await;
        space.gone::<Pod>("box").await;
        space.gone::<Service>("box").await;
        assert!(
            space
                .get::<PersistentVolumeClaim>("data-box")
                .await
                .is_some()
        );
        let status = sandbox.status.expect("a status");
        assert_eq!(
            (
                status.pod_ips,
                status.selector,
                status.service,
                status.node_name
            ),
            (None, None, None, None)
        );
        let mut kinds: Vec<_> = status
            .conditions
            .iter()
            .flatten()
            .map(|c| c.type_.as_str())
            .collect();
        kinds.sort_unstable();
        assert_eq!(kinds, ["Ready", "Suspended"]);
        space
            .eventually("its event", async || {
                space
                    .events("box")
                    .await
                    .iter()
                    .any(|(r, _)| r == "SandboxExpired")
            })
            .await;
    });
}

#[test]
fn an_expired_sandbox_is_deleted_with_policy_delete() {
    test(async |space| {
        space
            .sandbox(
                "box",
                json!({"shutdownTime": soon(), "shutdownPolicy": "Delete"}),
            )
            .await;
        space.gone::<Sandbox>("box").await;
        space.gone::<Pod>("box").await;
    });
}

#[test]
fn the_finished_condition_survives_expiry() {
    test(async |space| {
        let finished = json!({"metadata": {"annotations": {"k8e.test/complete": "succeeded"}}});
        space.sandbox("box", json!({"podTemplate": finished})).await;
        let done = ("True", "PodSucceeded", "Pod completed successfully");
        space.sandbox_says("box", "Finished", done).await;
        space
            .patch::<Sandbox>("box", json!({"spec": {"shutdownTime": PAST}}))
            .await;
        space.gone::<Pod>("box").await;
        let sandbox = space
            .sandbox_says(
                "box",
                "Ready",
                ("False", "SandboxExpired", "Sandbox has expired"),
            )
            .await;
        assert_eq!(condition(sandbox.condition("Finished")), done);
    });
}

async fn finished_claim(space: &crate::rig::Space, lifecycle: Value) {
    let done =
        json!({"podTemplate": {"metadata": {"annotations": {"k8e.test/complete": "succeeded"}}}});
    space.template("t", done).await;
    space.pool("pool", "t", 0, json!({})).await;
    space
        .claim("mine", "pool", json!({"lifecycle": lifecycle}))
        .await;
}

#[test]
fn an_expired_claim_is_deleted_with_its_children() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        space
            .claim(
                "mine",
                "pool",
                json!({"lifecycle": {"shutdownTime": soon(), "shutdownPolicy": "Delete"}}),
            )
            .await;
        let name = space
            .claim_ready("mine")
            .await
            .bound_name()
            .expect("a sandbox")
            .to_owned();
        space.gone::<SandboxClaim>("mine").await;
        space.gone::<Sandbox>(&name).await;
        space.gone::<Pod>(&name).await;
        space
            .eventually("its event", async || {
                space
                    .events("mine")
                    .await
                    .iter()
                    .any(|(r, _)| r == "ClaimExpired")
            })
            .await;
    });
}

#[test]
fn foreground_deletion_keeps_the_claim_until_its_children_are_gone() {
    test(async |space| {
        space.ready_pool("pool", 1).await;
        space.claim("mine", "pool", json!({})).await;
        let name = space
            .claim_ready("mine")
            .await
            .bound_name()
            .expect("a sandbox")
            .to_owned();
        space
            .patch::<Pod>(
                &name,
                json!({"metadata": {"finalizers": ["test.k8e.dev/hold"]}}),
            )
            .await;
        let lifecycle = json!({"shutdownTime": PAST, "shutdownPolicy": "DeleteForeground"});
        space
            .patch::<SandboxClaim>("mine", json!({"spec": {"lifecycle": lifecycle}}))
            .await;
        space
            .until::<Pod>(&name, |pod| pod.metadata.deletion_timestamp.is_some())
            .await;
        let claim = space
            .get::<SandboxClaim>("mine")
            .await
            .expect("it waits for its pod");
        assert_eq!(
            condition(claim.condition("Ready")),
            (
                "False",
                "ClaimExpired",
                "Claim expired. Sandbox cleanup initiated."
            )
        );
        assert!(space.get::<Sandbox>(&name).await.is_some());
        space
            .patch::<Pod>(&name, json!({"metadata": {"finalizers": null}}))
            .await;
        space.gone::<SandboxClaim>("mine").await;
    });
}

#[test]
fn a_retained_expired_claim_keeps_its_status() {
    test(async |space| {
        finished_claim(&space, json!({"ttlSecondsAfterFinished": 0})).await;
        let claim = space.claim_says("mine", "ClaimExpired").await;
        space.gone::<Sandbox>("mine").await;
        let finished = ("True", "PodSucceeded", "Pod completed successfully");
        assert_eq!(condition(claim.condition("Finished")), finished);
        let claim = space.get::<SandboxClaim>("mine").await.expect("it stays");
        assert_eq!(condition(claim.condition("Finished")), finished);
        assert_eq!(condition(claim.condition("Ready")).1, "ClaimExpired");
    });
}

#[test]
fn a_finished_claim_without_a_ttl_is_kept() {
    test(async |space| {
        finished_claim(&space, json!({})).await;
        let claim = space.claim_says("mine", "PodSucceeded").await;
        assert_eq!(condition(claim.condition("Finished")).1, "PodSucceeded");
        assert!(space.get::<Sandbox>("mine").await.is_some());
    });
}

#[test]
fn the_earlier_of_two_expiry_times_applies() {
    test(async |space| {
        let far = "2099-01-01T00:00:00Z";
        finished_claim(
            &space,
            json!({"shutdownTime": far, "ttlSecondsAfterFinished": 1, "shutdownPolicy": "Delete"}),
        )
        .await;
        space.gone::<SandboxClaim>("mine").await;
        space.claim("other", "pool", json!({"lifecycle": {"shutdownTime": soon(), "ttlSecondsAfterFinished": 100_000, "shutdownPolicy": "Delete"}})).await;
        space.gone::<SandboxClaim>("other").await;
    });
}

#[test]
fn a_namespace_can_be_deleted_with_all_objects() {
    test(async |space| {
        space.ready_pool("pool", 2).await;
        space.claim("mine", "pool", json!({})).await;
        space.claim_ready("mine").await;
        space.sandbox("box", json!({"service": true})).await;
        space.sandbox_ready("box").await;
        assert!(
            space
                .list::<Sandbox>()
                .await
                .iter()
                .all(|s| s.finalizers().is_empty())
        );
        let namespaces: Api<Namespace> = Api::all(rig().client.clone());
        namespaces
            .delete(&space.name, &DeleteParams::background())
            .await
            .expect("deleted");
        space
            .eventually("the namespace is gone", async || {
                namespaces
                    .get_opt(&space.name)
                    .await
                    .expect("an answer")
                    .is_none()
            })
            .await;
    });
}

#[test]
fn a_sandbox_that_a_claim_does_not_control_is_not_deleted() {
    test(async |space| {
        space.sandbox("theirs", json!({})).await;
        space.sandbox_ready("theirs").await;
        space
            .claim("mine", "none", json!({"lifecycle": {"shutdownTime": PAST}}))
            .await;
        space.claim_says("mine", "ClaimExpired").await;
        let claims = space.api::<SandboxClaim>();
        let status = Patch::Merge(json!({"status": {"sandbox": {"name": "theirs"}}}));
        let patched = claims
            .patch_status("mine", &PatchParams::default(), &status)
            .await;
        patched.expect("it is taken");
        let skipped = |c: &SandboxClaim| {
            let words = condition(c.condition("Ready")).2;
            words.starts_with("Claim expired. ") && words.ends_with("; deletion skipped.")
        };
        space.until::<SandboxClaim>("mine", skipped).await;
        assert!(space.get::<Sandbox>("theirs").await.is_some());
    });
}
