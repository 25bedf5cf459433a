//! TTL and idle expiry, and retention. The clock is paused and advanced by the tests.

use super::*;
use k8e_model::{Lifetime, TimeLimit};

pub(super) const MINUTE: Duration = Duration::from_secs(60);

pub(super) async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
    // Let the expiry task see it.
    tokio::time::sleep(Duration::from_millis(20)).await;
}

async fn with(server: &Server, id: &str, ttl: Option<Duration>, idle: Option<Duration>) {
    let spec = SessionSpec {
        lifetime: Lifetime { ttl, idle }.into(),
        ..spec(id)
    };
    server.sessions.create(&me(), spec).await.unwrap();
}

async fn phase(server: &Server, id: &str) -> Phase {
    server
        .sessions
        .get(&me(), &sid(id))
        .await
        .unwrap()
        .session
        .phase
}

#[tokio::test]
async fn a_session_ends_at_its_ttl() {
    let server = Server::start().await;
    with(&server, "a", Some(MINUTE), None).await;
    with(&server, "b", None, None).await;
    pass(Duration::from_secs(50)).await;
    assert_eq!(phase(&server, "a").await, Phase::Active);
    pass(Duration::from_secs(11)).await;
    assert_eq!(server.ended("a").await, "its TTL of 60s expired");
    assert_eq!(server.kinds("a").await, ["created", "expired"]);
    pass(1000 * MINUTE).await;
    assert_eq!(phase(&server, "b").await, Phase::Active);
}

#[tokio::test]
async fn a_use_restarts_the_idle_timeout() {
    let server = Server::start().await;
    with(&server, "a", None, Some(MINUTE)).await;
    for _ in 0..3 {
        pass(Duration::from_secs(40)).await;
        server.run("a", "true").await.unwrap();
    }
    pass(Duration::from_secs(61)).await;
    assert_eq!(server.ended("a").await, "it was idle for 60s");
    server.no_sandbox().await;
}

#[tokio::test]
async fn a_run_in_progress_holds_off_idle_expiry() {
    let server = Server::start().await;
    with(&server, "a", None, Some(MINUTE)).await;
    let mut command = sh("sleep 600");
    command.timeout = TimeLimit::Never;
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command,
    };
    let run = server.sessions.run(&me(), request).await.unwrap();
    pass(10 * MINUTE).await;
    assert_eq!(phase(&server, "a").await, Phase::Active);
    drop(run);
    pass(Duration::from_secs(50)).await;
    assert_eq!(phase(&server, "a").await, Phase::Active);
    pass(MINUTE * 2).await;
    assert_eq!(server.ended("a").await, "it was idle for 60s");
}

#[tokio::test]
async fn the_earliest_deadline_expires_first() {
    let server = Server::start().await;
    with(&server, "late", Some(100 * MINUTE), None).await;
    with(&server, "early", Some(MINUTE), None).await;
    pass(2 * MINUTE).await;
    server.ended("early").await;
    assert_eq!(phase(&server, "late").await, Phase::Active);
}

#[tokio::test]
async fn retention_removes_old_records() {
    let config = Config {
        ended_kept: Duration::ZERO,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    let made = server.create("a").await;
    server.run("a", "echo hi").await.unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let page = server
        .sessions
        .transcript(&me(), &sid("a"), 0, 0)
        .await
        .unwrap();
    assert_eq!(page.output, b"hi\n");
    pass(Duration::from_secs(2)).await;
    let gone = async {
        loop {
            match server.sessions.get(&me(), &sid("a")).await {
                Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                gone => return gone,
            }
        }
    };
    let gone = tokio::time::timeout(PATIENCE, gone).await;
    refused(
        gone.expect("the record goes"),
        Code::NotFound,
        "session a not found",
    );
    let left = async {
        while server.transcript_dir(&made).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, left)
        .await
        .expect("the transcript goes");
}
