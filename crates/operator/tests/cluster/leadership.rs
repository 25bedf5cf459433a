//! Leader election: one of several operators reconciles, and a standby takes over.

use crate::kinds::options;
use crate::rig::test;
use k8e_operator::crd::Sandbox;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, PostParams};
use serde_json::json;
use tokio::sync::oneshot;

const LEASE: &str = "a3317529.agent-sandbox.x-k8s.io";

fn transitions(lease: &Lease) -> Option<i32> {
    lease.spec.as_ref().and_then(|spec| spec.lease_transitions)
}

fn is_held(lease: &Lease) -> bool {
    let holder = lease
        .spec
        .as_ref()
        .and_then(|spec| spec.holder_identity.as_deref());
    holder.is_some_and(|holder| !holder.is_empty())
}

#[test]
fn an_object_that_cannot_be_deserialized_does_not_block_others() {
    test(async |space| {
        // The CRD accepts any integer as a port; the Rust type does not.
        let port = json!({"httpGet": {"port": 99_999_999_999_i64}});
        let containers = json!([{"name": "main", "image": "none", "livenessProbe": port}]);
        let odd = json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "odd"},
            "spec": {"podTemplate": {"spec": {"containers": containers}}},
        });
        let kind = ApiResource::erase::<Sandbox>(&());
        let api: Api<DynamicObject> =
            Api::namespaced_with(space.client.clone(), &space.name, &kind);
        let odd: DynamicObject = serde_json::from_value(odd).expect("an object");
        api.create(&PostParams::default(), &odd)
            .await
            .expect("taken");
        space.sandbox("box", json!({})).await;
        space.sandbox_ready("box").await;
        // An operator that starts now lists it first; it becomes leader only after the initial cache sync.
        let namespace = format!("--leader-election-namespace={}", space.name);
        let (stop, stopped) = oneshot::channel::<()>();
        let run = k8e_operator::run_with(space.client.clone(), options(&[&namespace]), async {
            drop(stopped.await);
        });
        let run = tokio::spawn(run);
        space.until::<Lease>(LEASE, is_held).await;
        stop.send(()).expect("it runs");
        run.await
            .expect("no panic")
            .expect("it stops in good order");
        api.delete("odd", &DeleteParams::default())
            .await
            .expect("deleted");
    });
}

#[test]
fn a_standby_takes_over_when_the_leader_stops() {
    test(async |space| {
        let namespace = format!("--leader-election-namespace={}", space.name);
        let start = || {
            let (stop, stopped) = oneshot::channel::<()>();
            let client = space.client.clone();
            let run = k8e_operator::run_with(client, options(&[&namespace]), async {
                drop(stopped.await)
            });
            (stop, tokio::spawn(run))
        };
        let (stop_first, first) = start();
        let lease = space.until::<Lease>(LEASE, is_held).await;
        assert_eq!(transitions(&lease), Some(0));
        stop_first.send(()).expect("it runs");
        first
            .await
            .expect("no panic")
            .expect("it stops in good order");
        let given_up = space.until::<Lease>(LEASE, |lease| !is_held(lease)).await;
        assert_eq!(transitions(&given_up), Some(0));
        let (stop_second, second) = start();
        space
            .until::<Lease>(LEASE, |lease| {
                is_held(lease) && transitions(lease) == Some(1)
            })
            .await;
        stop_second.send(()).expect("it runs");
        second
            .await
            .expect("no panic")
            .expect("it stops in good order");
    });
}
