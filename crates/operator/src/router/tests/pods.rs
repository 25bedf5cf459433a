//! The endpoint index: which pods are in it, and since when.

use super::*;
use crate::crd::names::WARM_POOL;
use crate::router::index::Missing;
use crate::router::target::Target;
use crate::router::watch;
use http_body_util::StreamBody;
use hyper::body::Frame;
use std::net::IpAddr;
use tokio::sync::mpsc;

fn target(name: &str) -> Target {
    Target {
        namespace: "team".to_owned(),
        name: name.to_owned(),
        port: 80,
        pod_ip: None,
        uid: None,
        timeout: None,
    }
}

fn index() -> Index {
    let index = Index::new(false);
    index.apply(Event::Init);
    index.apply(Event::InitDone);
    index
}

fn address(index: &Index, name: &str) -> Result<String, Missing> {
    index
        .find(&target(name))
        .map(|found| found.address.to_string())
}

#[test]
fn only_ready_pods_controlled_by_a_sandbox_are_indexed() {
    let index = index();
    let not_known = [
        json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}),
        json!({"status": {"conditions": null}}),
        json!({"status": {"podIP": null, "podIPs": null}}),
        json!({"status": {"podIP": "127.0.0.1", "podIPs": null}}),
        json!({"status": {"podIP": "169.254.1.1", "podIPs": []}}),
        json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
        json!({"metadata": {"ownerReferences": null}}),
        json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "Sandbox", "name": "sb", "uid": "u", "controller": true}]}}),
        json!({"metadata": {"ownerReferences": [{"apiVersion": "agents.x-k8s.io/v1", "kind": "Sandbox", "name": "sb", "uid": "u"}]}}),
        json!({"metadata": {"ownerReferences": [{"apiVersion": "agents.x-k8s.io/v1", "kind": "Other", "name": "sb", "uid": "u", "controller": true}]}}),
        json!({"spec": {"hostNetwork": true}}),
    ];
    for change in not_known {
        index.apply(Event::Apply(pod("sb", "10.0.0.1")));
        assert_eq!(address(&index, "sb"), Ok("10.0.0.1".to_owned()));
        index.apply(Event::Apply(pod_with("sb", "10.0.0.1", change.clone())));
        assert_eq!(address(&index, "sb"), Err(Missing::Pod), "{change}");
        assert!(!index.knows_namespace("team"));
    }
    index.apply(Event::Apply(pod("sb", "10.0.0.1")));
    assert!(index.knows_namespace("team"));
    index.apply(Event::Delete(pod("sb", "10.0.0.1")));
    assert_eq!(address(&index, "sb"), Err(Missing::Pod));
}

#[test]
fn a_pod_with_a_forged_owner_reference_comes_last() {
    let index = index();
    let owner = json!([{"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "sb", "uid": "uid-sb", "controller": true}]);
    let older = json!({"metadata": {"ownerReferences": owner, "creationTimestamp": "2020-01-01T00:00:00Z"}});
    index.apply(Event::Apply(pod_with("impostor", "10.6.6.6", older)));
    index.apply(Event::Apply(pod("sb", "10.0.0.1")));
    assert_eq!(address(&index, "sb"), Ok("10.0.0.1".to_owned()));
    index.apply(Event::Delete(pod("impostor", "10.6.6.6")));
    assert_eq!(address(&index, "sb"), Ok("10.0.0.1".to_owned()));
}

#[test]
fn a_new_list_replaces_the_old_one_atomically() {
    let index = Index::new(false);
    assert!(!index.is_ready());
    index.apply(Event::Init);
    index.apply(Event::InitApply(pod("a", "10.0.0.1")));
    assert_eq!(address(&index, "a"), Err(Missing::Pod));
    assert!(!index.is_ready());
    index.apply(Event::InitDone);
    assert!(index.is_ready() && address(&index, "a").is_ok());
    index.apply(Event::Init);
    index.apply(Event::InitApply(pod("b", "10.0.0.2")));
    assert!(
        address(&index, "a").is_ok(),
        "what was known stays while the list comes"
    );
    index.apply(Event::InitDone);
    assert_eq!(address(&index, "a"), Err(Missing::Pod));
    assert!(address(&index, "b").is_ok());
}

#[test]
fn ipv4_and_ipv6_addresses_are_indexed() {
    let index = index();
    let both = json!({"status": {"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]}});
    index.apply(Event::Apply(pod_with("sb", "10.0.0.1", both)));
    let ask = |ip: &str| {
        let pod_ip = Some(ip.parse::<IpAddr>().unwrap());
        let target = Target {
            pod_ip,
            ..target("sb")
        };
        index.find(&target).map(|found| found.address.to_string())
    };
    assert_eq!(ask("fd00::1"), Ok("fd00::1".to_owned()));
    assert_eq!(ask("10.0.0.1"), Ok("10.0.0.1".to_owned()));
    assert_eq!(
        ask("10.0.0.2"),
        Ok("10.0.0.1".to_owned()),
        "not the pod's: as if it had not been said"
    );
}

#[tokio::test]
async fn a_request_waits_for_its_endpoint() {
    let index = index();
    let pooled = json!({"metadata": {"labels": {WARM_POOL: "0a0a0a0a"}}});
    index.apply(Event::Apply(pod_with("sb", "10.0.0.1", pooled)));
    let wanted = target("sb");
    let waiting = index.wait(&wanted, STUCK_AFTER);
    let claimed = async {
        tokio::task::yield_now().await;
        index.apply(Event::Apply(pod("other", "10.0.0.2")));
        tokio::task::yield_now().await;
        index.apply(Event::Apply(pod("sb", "10.0.0.1")));
    };
    let (found, ()) = tokio::join!(waiting, claimed);
    assert_eq!(found.unwrap().address.to_string(), "10.0.0.1");
    let missing = index
        .wait(&target("never"), Duration::from_millis(20))
        .await;
    assert_eq!(missing.err(), Some(Missing::Pod));
}

#[tokio::test]
async fn the_watch_fills_the_index() {
    let (events, received) = mpsc::channel::<Value>(8);
    let received = Arc::new(std::sync::Mutex::new(Some(received)));
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let received = Arc::clone(&received);
        async move {
            let query = request.uri().query().unwrap_or_default().to_owned();
            assert_eq!(request.uri().path(), "/api/v1/pods");
            assert!(
                query.contains("labelSelector=agents.x-k8s.io%2Fsandbox-name-hash"),
                "{query}"
            );
            if !query.contains("watch=true") {
                let list = json!({
                    "apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"},
                    "items": [pod("listed", "10.0.0.1")],
                });
                return Ok::<_, BoxError>(Response::new(full(list.to_string())));
            }
            let Some(received) = received.lock().unwrap().take() else {
                std::future::pending::<()>().await;
                unreachable!();
            };
            let lines = futures::stream::unfold(received, |mut received| async move {
                let event = received.recv().await?;
                let line = Bytes::from(format!("{event}\n"));
                Some((Ok::<_, BoxError>(Frame::data(line)), received))
            });
            Ok(Response::new(AnyBody::new(StreamBody::new(lines))))
        }
    });
    let index = Arc::new(Index::new(false));
    let client = kube::Client::new(service, "default");
    let following = tokio::spawn(watch::follow(client, None, Arc::clone(&index)));
    let listed = index.wait(&target("listed"), STUCK_AFTER).await;
    assert_eq!(listed.unwrap().address.to_string(), "10.0.0.1");
    assert!(index.is_ready());
    let mut event = json!({"type": "ADDED", "object": pod("later", "10.0.0.2")});
    event["object"]["metadata"]["resourceVersion"] = json!("2");
    events.send(event.clone()).await.unwrap();
    assert!(index.wait(&target("later"), STUCK_AFTER).await.is_ok());
    event["type"] = json!("DELETED");
    events.send(event).await.unwrap();
    while address(&index, "later").is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(address(&index, "listed").is_ok());
    following.abort();
}
