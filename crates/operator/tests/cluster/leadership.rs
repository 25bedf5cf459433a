//! Of several operators one works, and another takes over.

use crate::kinds::options;
use crate::rig::test;
use k8s_openapi::api::coordination::v1::Lease;
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
