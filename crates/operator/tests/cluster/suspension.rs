//! Suspend and resume.

use crate::rig::{condition, test};
use k8e_operator::crd::Sandbox;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;

const SUSPENDED: (&str, &str, &str) = (
    "True",
    "PodTerminated",
    "Pod has been terminated. Sandbox is suspended",
);

#[test]
fn suspend_deletes_the_pod_and_resume_creates_another() {
    test(async |space| {
        space.sandbox("box", json!({})).await;
        space.sandbox_ready("box").await;
        let before = space.get::<Pod>("box").await.expect("a pod").uid();
        space
            .patch::<Sandbox>("box", json!({"spec": {"operatingMode": "Suspended"}}))
            .await;
        let sandbox = space.sandbox_says("box", "Suspended", SUSPENDED).await;
        assert_eq!(
            condition(sandbox.condition("Ready")),
            ("False", "SandboxSuspended", "Sandbox is suspended")
        );
        assert!(sandbox.condition("PodScheduled").is_none());
        let status = sandbox.status.expect("a status");
        assert!(status.selector.is_some(), "it stays once a pod was seen");
        assert_eq!(status.pod_ips, None);
        assert!(space.get::<Pod>("box").await.is_none());
        space
            .eventually("its event", async || {
                space
                    .events("box")
                    .await
                    .iter()
                    .any(|(r, _)| r == "SandboxSuspended")
            })
            .await;
        space
            .patch::<Sandbox>("box", json!({"spec": {"operatingMode": "Running"}}))
            .await;
        let sandbox = space.sandbox_ready("box").await;
        assert_eq!(condition(sandbox.condition("Suspended")).1, "NotSuspended");
        assert_ne!(space.get::<Pod>("box").await.expect("a pod").uid(), before);
    });
}

#[test]
fn a_slow_pod_is_reported_as_terminating() {
    test(async |space| {
        space.sandbox("box", json!({})).await;
        space.sandbox_ready("box").await;
        space
            .patch::<Pod>(
                "box",
                json!({"metadata": {"finalizers": ["test.k8e.dev/hold"]}}),
            )
            .await;
        space
            .patch::<Sandbox>("box", json!({"spec": {"operatingMode": "Suspended"}}))
            .await;
        let terminating = (
            "False",
            "PodTerminating",
            "Pod is terminating. Sandbox is suspending",
        );
        let sandbox = space.sandbox_says("box", "Suspended", terminating).await;
        assert_eq!(
            condition(sandbox.condition("Ready")),
            ("False", "SandboxSuspended", "Sandbox is suspending")
        );
        space
            .until::<Pod>("box", |pod| pod.metadata.deletion_timestamp.is_some())
            .await;
        space
            .patch::<Pod>("box", json!({"metadata": {"finalizers": null}}))
            .await;
        space.sandbox_says("box", "Suspended", SUSPENDED).await;
    });
}

#[test]
fn a_pod_with_another_owner_is_not_deleted() {
    test(async |space| {
        let _: Pod = space
            .create(json!({"metadata": {"name": "box"}, "spec": crate::rig::pod_spec()}))
            .await;
        space
            .sandbox("box", json!({"operatingMode": "Suspended"}))
            .await;
        let foreign = (
            "False",
            "PodNotOwned",
            "Refused to delete pod because it is not owned by this sandbox",
        );
        space.sandbox_says("box", "Suspended", foreign).await;
        let theirs = space.get::<Pod>("box").await.expect("still there");
        assert!(theirs.metadata.deletion_timestamp.is_none());
        // It has no label, so it is not watched; its deletion is found by polling.
        space.delete::<Pod>("box").await;
        space.sandbox_says("box", "Suspended", SUSPENDED).await;
    });
}
