//! Sandbox: children, conditions, owner references.

use crate::rig::{condition, test};
use k8e_operator::crd::Sandbox;
use k8e_operator::crd::names::{self, NAME_HASH, PROPAGATED_ANNOTATIONS, PROPAGATED_LABELS};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, ResourceQuota, Service};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

#[test]
fn a_sandbox_gets_a_pod_and_becomes_ready() {
    test(async |space| {
        space.sandbox("box", json!({})).await;
        let sandbox = space.sandbox_ready("box").await;
        let status = sandbox.status.clone().expect("a status");
        let conditions = status.conditions.expect("conditions");
        let mut kinds: Vec<_> = conditions.iter().map(|c| c.type_.as_str()).collect();
        kinds.sort_unstable();
        assert_eq!(
            kinds,
            ["PodScheduled", "Ready", "Suspended"],
            "exactly these"
        );
        assert!(
            conditions
                .iter()
                .all(|c| c.observed_generation == sandbox.metadata.generation)
        );
        assert_eq!(
            condition(sandbox.condition("Ready")),
            ("True", "DependenciesReady", "Pod is Ready")
        );
        assert_eq!(
            condition(sandbox.condition("Suspended")),
            ("False", "NotSuspended", "Sandbox is not suspended")
        );
        assert_eq!(
            condition(sandbox.condition("PodScheduled")).1,
            "PodScheduled"
        );
        assert_eq!(
            status.selector,
            Some(format!("{NAME_HASH}={}", names::hash("box")))
        );
        assert_eq!((status.service, status.service_fqdn), (None, None));
        assert!(status.node_name.is_some());

        let pod = space
            .get::<Pod>("box")
            .await
            .expect("a pod of the same name");
        assert_eq!(status.pod_ips.map(|ips| ips.len()), Some(1));
        assert_eq!(pod.labels().get(NAME_HASH), Some(&names::hash("box")));
        let owner = &pod.owner_references()[0];
        assert_eq!(
            (owner.api_version.as_str(), owner.kind.as_str()),
            ("agents.x-k8s.io/v1beta1", "Sandbox")
        );
        assert_eq!(
            (owner.controller, owner.block_owner_deletion),
            (Some(true), Some(true))
        );
        assert_eq!(Some(&owner.uid), sandbox.metadata.uid.as_ref());
        assert!(sandbox.finalizers().is_empty());
        assert!(space.get::<Service>("box").await.is_none());
        space
            .eventually("its events", async || {
                let events = space.events("box").await;
                events.iter().any(|(r, _)| r == "SandboxPodCreated")
                    && events.iter().any(|(r, _)| r == "SandboxReady")
            })
            .await;
        space.delete::<Sandbox>("box").await;
        space.gone::<Pod>("box").await;
    });
}

#[test]
fn the_ready_condition_has_the_reason() {
    test(async |space| {
        let held = json!({"podTemplate": {"metadata": {"annotations": {"k8e.test/hold": "true"}}}});
        space.sandbox("held", held).await;
        let slow = json!({"podTemplate": {"metadata": {"annotations": {"k8e.test/ready": "false"}}}, "service": true});
        space.sandbox("slow", slow).await;
        let pending = (
            "False",
            "DependenciesNotReady",
            "Pod exists with phase: Pending",
        );
        space.sandbox_says("held", "Ready", pending).await;
        let running = (
            "False",
            "DependenciesNotReady",
            "Pod is Running but not Ready; Service Exists",
        );
        space.sandbox_says("slow", "Ready", running).await;
    });
}

#[test]
fn a_ready_pod_without_an_address_is_not_ready() {
    test(async |space| {
        let held = json!({"podTemplate": {"metadata": {"annotations": {"k8e.test/hold": "true"}}}});
        space.sandbox("box", held).await;
        space.until::<Pod>("box", |_| true).await;
        let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        let pods = space.api::<Pod>();
        let status = Patch::Merge(status);
        let patched = pods
            .patch_status("box", &PatchParams::default(), &status)
            .await;
        patched.expect("it is taken");
        let waiting = (
            "False",
            "DependenciesNotReady",
            "Pod is Ready but has no podIPs yet",
        );
        space.sandbox_says("box", "Ready", waiting).await;
    });
}

#[test]
fn an_unschedulable_pod_is_reported() {
    test(async |space| {
        let nowhere = json!({"podTemplate": {"spec": {"nodeSelector": {"no": "where"}}}});
        space.sandbox("box", nowhere).await;
        let sandbox = space
            .until::<Sandbox>("box", |s| {
                condition(s.condition("PodScheduled")).0 == "False"
            })
            .await;
        assert_eq!(
            condition(sandbox.condition("PodScheduled")).1,
            "Unschedulable"
        );
        assert_eq!(
            condition(sandbox.condition("Ready")).2,
            "Pod exists with phase: Pending"
        );
    });
}

#[test]
fn a_finished_pod_is_not_recreated() {
    test(async |space| {
        for (name, how, reason, message) in [
            (
                "good",
                "succeeded",
                "PodSucceeded",
                "Pod completed successfully",
            ),
            ("bad", "failed", "PodFailed", "Pod failed"),
        ] {
            let annotations = json!({"k8e.test/complete": how});
            space
                .sandbox(
                    name,
                    json!({"podTemplate": {"metadata": {"annotations": annotations}}}),
                )
                .await;
            let sandbox = space
                .sandbox_says(name, "Finished", ("True", reason, message))
                .await;
            assert_eq!(
                condition(sandbox.condition("Ready")),
                ("False", reason, message)
            );
            space
                .eventually("its event", async || {
                    space.events(name).await.iter().any(|(r, _)| r == reason)
                })
                .await;
        }
        let before = space.get::<Pod>("good").await.expect("the pod stays").uid();
        space
            .patch::<Sandbox>("good", json!({"metadata": {"labels": {"look": "again"}}}))
            .await;
        space
            .sandbox_says(
                "good",
                "Finished",
                ("True", "PodSucceeded", "Pod completed successfully"),
            )
            .await;
        assert_eq!(
            space.get::<Pod>("good").await.expect("the pod stays").uid(),
            before
        );
    });
}

#[test]
fn a_deleted_pod_is_recreated_and_suspended_stays_false() {
    test(async |space| {
        space.sandbox("box", json!({})).await;
        space.sandbox_ready("box").await;
        let before = space.get::<Pod>("box").await.expect("a pod").uid();
        space.delete::<Pod>("box").await;
        space.until::<Pod>("box", |pod| pod.uid() != before).await;
        let sandbox = space.sandbox_ready("box").await;
        assert_eq!(condition(sandbox.condition("Suspended")).1, "NotSuspended");
    });
}

#[test]
fn the_service_follows_true_false_and_unset() {
    test(async |space| {
        let ports = json!([{"containerPort": 80}, {"containerPort": 81, "name": "http"}, {"containerPort": 53, "protocol": "UDP"}]);
        let containers = json!([{"name": "main", "image": "none", "ports": ports}, {"name": "two", "image": "none", "ports": [{"containerPort": 80}, {"containerPort": 82, "name": "http"}]}]);
        space
            .sandbox(
                "box",
                json!({"service": true, "podTemplate": {"spec": {"containers": containers}}}),
            )
            .await;
        let sandbox = space.sandbox_ready("box").await;
        assert_eq!(
            condition(sandbox.condition("Ready")).2,
            "Pod is Ready; Service Exists"
        );
        let status = sandbox.status.expect("a status");
        assert_eq!(status.service.as_deref(), Some("box"));
        assert_eq!(
            status.service_fqdn,
            Some(format!("box.{}.svc.cluster.local", space.name))
        );
        let service = space.get::<Service>("box").await.expect("a service");
        let spec = service.spec.expect("a spec");
        assert_eq!(spec.cluster_ip.as_deref(), Some("None"));
        assert_eq!(
            spec.selector,
            Some([(NAME_HASH.to_owned(), names::hash("box"))].into())
        );
        let ports: Vec<_> = spec
            .ports
            .iter()
            .flatten()
            .map(|p| (p.name.clone().unwrap_or_default(), p.port))
            .collect();
        let ports: Vec<_> = ports.iter().map(|(n, p)| (n.as_str(), *p)).collect();
        assert_eq!(
            ports,
            [
                ("p-80-tcp", 80),
                ("http", 81),
                ("p-53-udp", 53),
                ("p-82-tcp", 82)
            ]
        );

        space
            .patch::<Sandbox>("box", json!({"spec": {"service": null}}))
            .await;
        let unset = |s: &Sandbox| {
            s.metadata.generation == s.condition("Ready").and_then(|c| c.observed_generation)
        };
        let sandbox = space.until::<Sandbox>("box", unset).await;
        assert_eq!(
            condition(sandbox.condition("Ready")).2,
            "Pod is Ready; Service Exists",
            "unset keeps it, and needs it"
        );
        space
            .patch::<Sandbox>("box", json!({"spec": {"service": false}}))
            .await;
        space.gone::<Service>("box").await;
        let sandbox = space
            .sandbox_says(
                "box",
                "Ready",
                ("True", "DependenciesReady", "Pod is Ready"),
            )
            .await;
        assert_eq!(sandbox.status.expect("a status").service, None);
    });
}

#[test]
fn a_pod_that_lost_its_label_gets_it_back() {
    test(async |space| {
        space.sandbox("box", json!({})).await;
        space.sandbox_ready("box").await;
        let before = space.get::<Pod>("box").await.expect("a pod").uid();
        let unlabelled = json!({"metadata": {"labels": {NAME_HASH: null}}});
        space.patch::<Pod>("box", unlabelled).await;
        let labelled = |pod: &Pod| pod.labels().contains_key(NAME_HASH);
        let pod = space.until::<Pod>("box", labelled).await;
        assert_eq!(pod.uid(), before);
        space.delete::<Pod>("box").await;
        space.until::<Pod>("box", |pod| pod.uid() != before).await;
        space.sandbox_ready("box").await;
    });
}

#[test]
fn a_pod_with_another_owner_is_not_changed() {
    test(async |space| {
        let foreign = json!({"metadata": {"name": "box"}, "spec": crate::rig::pod_spec()});
        let foreign: Pod = space.create(foreign).await;
        space.sandbox("box", json!({})).await;
        let sandbox = space
            .until::<Sandbox>("box", |s| {
                condition(s.condition("Ready")).1 == "ReconcilerError"
            })
            .await;
        let message = condition(sandbox.condition("Ready")).2;
        assert!(
            message.starts_with("Error seen: ") && message.contains("not owned"),
            "{message}"
        );
        assert_eq!(
            space.get::<Pod>("box").await.expect("still there").uid(),
            foreign.uid()
        );
        // With the label `adoptable` it is adopted.
        space
            .patch::<Pod>(
                "box",
                json!({"metadata": {"labels": {"agents.x-k8s.io/adoptable": "true"}}}),
            )
            .await;
        space.sandbox_ready("box").await;
        let pod = space.get::<Pod>("box").await.expect("still there");
        assert_eq!(
            (pod.uid(), pod.owner_references().len()),
            (foreign.uid(), 1)
        );
    });
}

#[test]
fn two_pods_of_one_sandbox_are_a_conflict() {
    test(async |space| {
        space.sandbox("box", json!({})).await;
        let sandbox = space.sandbox_ready("box").await;
        let owner = space
            .get::<Pod>("box")
            .await
            .expect("a pod")
            .owner_references()
            .to_vec();
        let second = json!({"metadata": {"name": "second", "labels": {NAME_HASH: names::hash("box")}, "ownerReferences": owner}, "spec": crate::rig::pod_spec()});
        let _: Pod = space.create(second).await;
        let sandbox = space
            .until::<Sandbox>("box", |s| {
                s.metadata.uid == sandbox.metadata.uid
                    && condition(s.condition("Ready")).1 == "MultiplePods"
            })
            .await;
        assert!(
            condition(sandbox.condition("Ready"))
                .2
                .contains("box, second")
        );
        space
            .eventually("a warning", async || {
                space
                    .events("box")
                    .await
                    .iter()
                    .any(|(r, _)| r == "MultiplePods")
            })
            .await;
        space.delete::<Pod>("second").await;
        space.sandbox_ready("box").await;
    });
}

#[test]
fn an_invalid_pod_is_reported_and_not_retried() {
    test(async |space| {
        let bad = json!({"podTemplate": {"spec": {"containers": [{"name": "Not A Name", "image": "none"}]}}});
        space.sandbox("box", bad).await;
        let sandbox = space
            .until::<Sandbox>("box", |s| {
                condition(s.condition("Ready")).1 == "InvalidConfiguration"
            })
            .await;
        assert!(
            condition(sandbox.condition("Ready"))
                .2
                .contains("Not A Name")
        );
        // There are no retries, but expiry still applies.
        let soon = Timestamp::now() + SignedDuration::from_secs(3);
        let end = json!({"shutdownTime": soon.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(), "shutdownPolicy": "Delete"});
        space.patch::<Sandbox>("box", json!({"spec": end})).await;
        space.gone::<Sandbox>("box").await;
    });
}

#[test]
fn a_quota_is_reported_once_and_retried() {
    test(async |space| {
        let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
        let _: ResourceQuota = space.create(quota).await;
        // The quota is enforced once its status is written.
        space
            .until::<ResourceQuota>("none", |q| {
                q.status.as_ref().is_some_and(|s| s.hard.is_some())
            })
            .await;
        space.sandbox("box", json!({})).await;
        let told = |s: &Sandbox| condition(s.condition("Ready")).1 == "ReconcilerError";
        let sandbox = space.until::<Sandbox>("box", told).await;
        assert!(
            condition(sandbox.condition("Ready"))
                .2
                .contains("exceeded quota")
        );
        let failures = async || {
            let events = space.events("box").await;
            events
                .iter()
                .filter(|(r, _)| r == "SandboxPodCreateFailed")
                .count()
        };
        space
            .eventually("an event", async || failures().await == 1)
            .await;
        space.delete::<ResourceQuota>("none").await;
        space.sandbox_ready("box").await;
        assert_eq!(failures().await, 1);
    });
}

#[test]
fn template_labels_are_synced_and_others_kept() {
    test(async |space| {
        let metadata = json!({"labels": {"a": "1", "b": "2", NAME_HASH: "forged"}, "annotations": {"note": "x"}});
        space
            .sandbox("box", json!({"podTemplate": {"metadata": metadata}}))
            .await;
        space.sandbox_ready("box").await;
        let pod = space.get::<Pod>("box").await.expect("a pod");
        assert_eq!(pod.labels().get(NAME_HASH), Some(&names::hash("box")));
        assert_eq!(
            pod.annotations().get(PROPAGATED_LABELS).map(String::as_str),
            Some("a,b")
        );
        assert_eq!(
            pod.annotations()
                .get(PROPAGATED_ANNOTATIONS)
                .map(String::as_str),
            Some("note")
        );
        space
            .patch::<Pod>("box", json!({"metadata": {"labels": {"theirs": "x"}}}))
            .await;
        let metadata = json!({"labels": {"a": null, "b": "3"}, "annotations": {"note": null}});
        space
            .patch::<Sandbox>(
                "box",
                json!({"spec": {"podTemplate": {"metadata": metadata}}}),
            )
            .await;
        let pod = space
            .until::<Pod>("box", |p| {
                p.labels().get("b").map(String::as_str) == Some("3")
            })
            .await;
        assert!(!pod.labels().contains_key("a") && pod.labels().contains_key("theirs"));
        assert!(!pod.annotations().contains_key("note"));
    });
}

#[test]
fn volumes_are_created_once_and_deleted_with_the_sandbox() {
    test(async |space| {
        let volume = json!({"metadata": {"name": "data", "labels": {"mine": "yes"}}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
        let inline = json!({"containers": [{"name": "main", "image": "none", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}], "volumes": [{"name": "data", "emptyDir": {}}]});
        space
            .sandbox(
                "box",
                json!({"volumeClaimTemplates": [volume], "podTemplate": {"spec": inline}}),
            )
            .await;
        space.sandbox_ready("box").await;
        let claim = space
            .get::<PersistentVolumeClaim>("data-box")
            .await
            .expect("a claim");
        assert_eq!(claim.labels().get(NAME_HASH), Some(&names::hash("box")));
        assert_eq!(claim.labels().get("mine").map(String::as_str), Some("yes"));
        assert_eq!(claim.owner_references()[0].kind, "Sandbox");
        let pod = space.get::<Pod>("box").await.expect("a pod");
        let volumes = pod.spec.expect("a spec").volumes.expect("volumes");
        let data: Vec<_> = volumes.iter().filter(|v| v.name == "data").collect();
        assert_eq!(data.len(), 1);
        assert_eq!(
            data[0]
                .persistent_volume_claim
                .as_ref()
                .map(|c| c.claim_name.as_str()),
            Some("data-box")
        );

        space
            .patch::<Sandbox>("box", json!({"spec": {"operatingMode": "Suspended"}}))
            .await;
        space.gone::<Pod>("box").await;
        assert!(
            space
                .get::<PersistentVolumeClaim>("data-box")
                .await
                .is_some()
        );

        let changed = json!({"spec": {"volumeClaimTemplates": null}});
        let refused = space
            .api::<Sandbox>()
            .patch("box", &PatchParams::default(), &Patch::Merge(changed))
            .await;
        assert!(
            refused
                .expect_err("refused")
                .to_string()
                .contains("volumeClaimTemplates is immutable")
        );
        space.delete::<Sandbox>("box").await;
        space.gone::<PersistentVolumeClaim>("data-box").await;
    });
}

#[test]
fn a_name_too_long_for_a_service_is_refused() {
    test(async |space| {
        let name = "x".repeat(64);
        let sandbox = |service: bool| -> Sandbox {
            serde_json::from_value(json!({
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": name},
                "spec": {"service": service, "podTemplate": {"spec": crate::rig::pod_spec()}},
            }))
            .expect("a sandbox")
        };
        let refused = space
            .api::<Sandbox>()
            .create(&PostParams::default(), &sandbox(true))
            .await;
        assert!(
            refused
                .expect_err("refused")
                .to_string()
                .contains("at most 63")
        );
        space
            .api::<Sandbox>()
            .create(&PostParams::default(), &sandbox(false))
            .await
            .expect("taken");
    });
}
