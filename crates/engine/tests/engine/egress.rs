//! Egress policy of sessions: default, change, persistence, authorization.

use super::*;
use k8e_model::EgressPolicy;

fn policy(entries: &[&str]) -> EgressPolicy {
    EgressPolicy::parse(entries).unwrap()
}

fn with_egress(id: &str, entries: &[&str]) -> SessionSpec {
    SessionSpec {
        egress: Some(policy(entries)),
        ..spec(id)
    }
}

impl Server {
    async fn egress(&self, id: &str) -> Vec<String> {
        let view = self.sessions.get(&me(), &sid(id)).await.unwrap();
        view.session.egress.entries()
    }

    async fn allow(&self, id: &str, entries: &[&str]) -> Result<EgressPolicy, Error> {
        let policy = policy(entries);
        self.sessions
            .set_allowed_hosts(&me(), &sid(id), policy)
            .await
    }
}

#[tokio::test]
async fn a_session_gets_its_policy_or_the_default() {
    let config = Config {
        egress_default: policy(&["default.example"]),
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    let default = server.create("default").await;
    assert_eq!(default.session.egress.entries(), ["default.example"]);
    assert!(default.network.contains("default.example"));
    assert!(server.sessions.status().network.contains("default.example"));
    let asked = with_egress("asked", &["none"]);
    let asked = server.sessions.create(&me(), asked).await.unwrap();
    assert_eq!(asked.session.egress, EgressPolicy::None);
    assert!(asked.network.contains("nothing"), "{}", asked.network);
}

#[tokio::test]
async fn a_change_is_seen_recorded_and_kept() {
    let server = Server::start().await;
    server.create("s").await;
    assert_eq!(server.egress("s").await, ["none"]);
    let now = server.allow("s", &["a.example", "*.b.example:8443"]).await;
    let want = ["a.example", "*.b.example:8443"];
    assert_eq!(now.unwrap().entries(), want);
    assert_eq!(server.egress("s").await, want);
    let listed = server.sessions.list(&me(), Default::default()).await;
    assert_eq!(listed.unwrap()[0].session.egress.entries(), want);
    assert_eq!(
        server.kinds("s").await,
        ["created", "allowed_hosts_changed"]
    );

    let server = server.restart().await;
    assert_eq!(server.egress("s").await, want);
    server.allow("s", &["none"]).await.unwrap();
    let server = server.restart().await;
    assert_eq!(server.egress("s").await, ["none"]);
}

#[tokio::test]
async fn sessions_of_other_owners_are_not_found() {
    let server = Server::start().await;
    server.create("s").await;
    let (stranger, root, id) = (other(), Principal::local(), sid("s"));
    let sessions = &server.sessions;
    let change = sessions.set_allowed_hosts(&stranger, &id, EgressPolicy::All);
    refused(change.await, Code::NotFound, "session s not found");
    let watch = sessions.watch_egress(&stranger, &id, true);
    refused(watch.await, Code::NotFound, "session s not found");
    refused(
        server.allow("nobody", &["all"]).await,
        Code::NotFound,
        "session nobody not found",
    );
    assert_eq!(server.egress("s").await, ["none"]);
    let change = sessions.set_allowed_hosts(&root, &id, EgressPolicy::All);
    assert_eq!(change.await.unwrap(), EgressPolicy::All);
}

#[tokio::test]
async fn an_ended_session_does_not_change() {
    let server = Server::start().await;
    server
        .sessions
        .create(&me(), with_egress("s", &["a.example"]))
        .await
        .unwrap();
    server.sessions.destroy(&me(), &sid("s")).await.unwrap();
    refused(server.allow("s", &["all"]).await, Code::NotFound, "ended");
    assert_eq!(server.egress("s").await, ["a.example"]);
    let mut flows = server
        .sessions
        .watch_egress(&me(), &sid("s"), true)
        .await
        .unwrap();
    assert_eq!(flows.next().await, None);
}

#[tokio::test]
async fn a_dropped_change_is_finished() {
    let server = Server::start().await;
    server.create("s").await;
    // Polled until it has begun, and then dropped.
    let begun = tokio::time::timeout(Duration::ZERO, server.allow("s", &["a.example"]));
    let _ = begun.await;
    let done = async {
        while server.kinds("s").await.len() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, done).await.unwrap();
    let kept = server.store.session(&sid("s")).await.unwrap().unwrap();
    assert_eq!(kept.egress.entries(), server.egress("s").await);
}

#[tokio::test]
async fn concurrent_changes_end_as_one_of_them() {
    let server = Server::start().await;
    server.create("s").await;
    let hosts: Vec<String> = (0..20).map(|n| format!("h{n}.example")).collect();
    let changes = hosts.iter().map(|host| {
        let policy = policy(&[host]);
        let server = &server;
        async move {
            let who = me();
            server
                .sessions
                .set_allowed_hosts(&who, &sid("s"), policy)
                .await
                .unwrap()
        }
    });
    futures::future::join_all(changes).await;
    let shown = server.egress("s").await;
    assert!(hosts.contains(&shown[0]), "{shown:?}");
    let kept = server.store.session(&sid("s")).await.unwrap().unwrap();
    assert_eq!(kept.egress.entries(), shown);
}

#[tokio::test]
async fn a_session_is_reused_only_with_the_same_policy() {
    let server = Server::start().await;
    let run = async |entries: Option<&[&str]>| {
        let spec = SessionSpec {
            egress: entries.map(policy),
            ..SessionSpec::default()
        };
        let request = RunRequest {
            target: RunTarget::Tenant(spec),
            command: sh("true"),
        };
        let run = server.sessions.run(&me(), request).await.unwrap();
        let id = run.session_id.clone();
        finish(run).await.unwrap();
        id
    };
    let first = run(Some(&["a.example", "b.example"])).await;
    let default = run(None).await;
    assert_ne!(default, first);
    assert_eq!(run(Some(&["none"])).await, default);
    assert_eq!(run(Some(&["b.example", "a.example"])).await, first);
    // The current policy counts, not that of its creation.
    let wider = policy(&["all"]);
    let who = me();
    let changed = server.sessions.set_allowed_hosts(&who, &default, wider);
    changed.await.unwrap();
    assert_ne!(run(None).await, default);
    assert_eq!(run(Some(&["all"])).await, default);
}

#[tokio::test]
async fn a_followed_flow_stream_ends_with_the_session() {
    let server = Server::start().await;
    server.create("s").await;
    let (who, id) = (me(), sid("s"));
    let mut past = server
        .sessions
        .watch_egress(&who, &id, false)
        .await
        .unwrap();
    assert_eq!(past.next().await, None);
    let mut flows = server.sessions.watch_egress(&who, &id, true).await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(20), flows.next()).await;
    assert!(early.is_err(), "nothing happened, and it is not over");
    server.sessions.destroy(&who, &id).await.unwrap();
    let end = tokio::time::timeout(PATIENCE, flows.next()).await;
    assert_eq!(end.unwrap(), None);
}
