//! Egress of a session over gRPC: allowed hosts and attempts.

use crate::server::{SOON, TestServer};
use k8e_api::client::Client;
use k8e_api::v1;
use std::time::{Duration, Instant};
use tonic::Code;

async fn create(client: &mut Client, id: &str, hosts: &[&str]) -> v1::Session {
    let request = v1::CreateSessionRequest {
        session_id: id.to_owned(),
        allowed_hosts: strings(hosts),
        ..Default::default()
    };
    client.create_session(request).await.unwrap().into_inner()
}

fn update(id: &str, hosts: &[&str]) -> v1::UpdateAllowedHostsRequest {
    v1::UpdateAllowedHostsRequest {
        session_id: id.to_owned(),
        hosts: strings(hosts),
    }
}

fn watch(id: &str, follow: bool) -> v1::WatchEgressRequest {
    v1::WatchEgressRequest {
        session_id: id.to_owned(),
        follow,
        denied_only: false,
    }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_are_asked_for_shown_and_replaced() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let asked = create(&mut client, "s", &["Example.COM", "*.example.org:8443"]).await;
    assert_eq!(asked.allowed_hosts, ["example.com", "*.example.org:8443"]);
    assert!(asked.network.contains("example.com"), "{}", asked.network);
    let silent = create(&mut client, "silent", &[]).await;
    assert_eq!(silent.allowed_hosts, ["none"]);

    for (hosts, want) in [
        (&["10.0.0.0/8:5432"][..], &["10.0.0.0/8:5432"][..]),
        (&[], &["none"]),
        (&["all"], &["all"]),
    ] {
        let now = client.update_allowed_hosts(update("s", hosts)).await;
        assert_eq!(now.unwrap().into_inner().hosts, want);
        let request = v1::GetSessionRequest {
            session_id: "s".to_owned(),
        };
        let shown = client.get_session(request).await.unwrap().into_inner();
        assert_eq!(shown.allowed_hosts, want);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_and_other_peoples_sessions_are_refused() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    create(&mut client, "s", &["example.com"]).await;
    let many: Vec<String> = (0..300).map(|n| format!("h{n}.example")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    for hosts in [
        &["https://example.com"][..],
        &["none", "example.com"],
        &["@nobody"],
        &[""],
        &many,
    ] {
        let refused = client.update_allowed_hosts(update("s", hosts)).await;
        assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    }
    let request = v1::CreateSessionRequest {
        allowed_hosts: strings(&["bücher.example"]),
        ..Default::default()
    };
    let refused = client.create_session(request).await.unwrap_err();
    assert!(refused.message().contains("xn--"), "{}", refused.message());

    let mut admin = server.remote(Some(&server.admin_dir())).await.unwrap();
    let refused = admin.update_allowed_hosts(update("s", &["all"])).await;
    assert_eq!(refused.unwrap_err().code(), Code::NotFound);
    let refused = admin.watch_egress(watch("s", true)).await;
    assert_eq!(refused.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watching_client_sees_the_end_of_the_session() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    create(&mut client, "s", &[]).await;
    let mut past = client.watch_egress(watch("s", false)).await.unwrap();
    assert!(past.get_mut().message().await.unwrap().is_none());
    let mut flows = client.watch_egress(watch("s", true)).await.unwrap();
    let destroy = v1::DestroySessionRequest {
        session_id: "s".to_owned(),
    };
    client.destroy_session(destroy).await.unwrap();
    let end = tokio::time::timeout(SOON, flows.get_mut().message()).await;
    assert!(end.unwrap().unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watching_client_does_not_delay_a_stop() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    create(&mut client, "s", &[]).await;
    let mut flows = client.watch_egress(watch("s", true)).await.unwrap();
    let begun = Instant::now();
    server.stop().await.unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "it was waited for"
    );
    let end = tokio::time::timeout(SOON, flows.get_mut().message()).await;
    assert_eq!(end.unwrap().unwrap_err().code(), Code::Unavailable);
}
