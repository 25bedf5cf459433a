//! Shutdown and crash of the server during foreground runs.

use super::*;

async fn start(server: &Server, target: RunTarget, script: &str) -> Run {
    let command = sh(script);
    let request = RunRequest { target, command };
    server.sessions.run(&me(), request).await.unwrap()
}

fn fresh() -> RunTarget {
    RunTarget::Fresh(SessionSpec::default())
}

/// The details of a session's ends of runs.
async fn ends(server: &Server, id: &SessionId) -> Vec<serde_json::Value> {
    let page = server.sessions.events(&me(), id, 0, 1000).await.unwrap();
    let ends = page.events.iter().filter(|event| event.kind == "run_ended");
    ends.map(|event| serde_json::from_str(&event.detail).unwrap())
        .collect()
}

#[tokio::test]
async fn shutdown_ends_runs_and_the_sessions_created_for_them() {
    let server = Server::start().await;
    server.create("a").await;
    let in_a = || RunTarget::Existing(sid("a"));
    let mut read = start(&server, in_a(), "sleep 600").await;
    // The output of these is not read.
    let unread = start(&server, in_a(), "yes").await;
    let alone = start(&server, fresh(), "yes").await;
    let (alone_id, kept) = (alone.session_id.clone(), sid("a"));
    assert_eq!(read.next().await.unwrap().unwrap(), {
        let page = server.sessions.events(&me(), &kept, 0, 0).await.unwrap();
        let detail: serde_json::Value = serde_json::from_str(&page.events[1].detail).unwrap();
        let pid = i32::try_from(detail["pid"].as_i64().unwrap()).unwrap();
        RunEvent::Started { pid }
    });
    server.sessions.shutdown().await;
    // Its caller gets the error.
    let told = tokio::time::timeout(PATIENCE, read.next()).await.unwrap();
    refused(told.unwrap(), Code::Unavailable, "stopping");
    // All ends are in the store before any run is dropped.
    let record = server.store.session(&alone_id).await.unwrap().unwrap();
    assert_eq!(record.phase, Phase::Ended);
    assert_eq!(server.driver.sandboxes().len(), 1);
    drop((read, unread, alone));
    let server = server.start_again().await;
    for (id, runs) in [(&kept, 2), (&alone_id, 1)] {
        let ends = ends(&server, id).await;
        assert_eq!(ends.len(), runs, "{ends:?}");
        assert!(ends.iter().all(|end| end["status"] == "cancelled"));
    }
    server.run("a", "true").await.unwrap();
}

#[tokio::test]
async fn no_run_starts_during_shutdown() {
    let server = Server::start().await;
    server.create("a").await;
    server.sessions.shutdown().await;
    let run = server.run("a", "true").await;
    refused(run, Code::Unavailable, "stopping");
    let server = server.start_again().await;
    assert_eq!(ends(&server, &sid("a")).await, [] as [serde_json::Value; 0]);
}

#[tokio::test]
async fn the_end_of_a_run_is_recorded_after_a_crash() {
    let server = Server::start().await;
    server.create("a").await;
    let done = server.run("a", "true").await.unwrap();
    assert_eq!(done.1.exit_code, 0);
    let in_a = start(&server, RunTarget::Existing(sid("a")), "sleep 600").await;
    let alone = start(&server, fresh(), "sleep 600").await;
    let alone_id = alone.session_id.clone();
    // Stored, and then nothing more is: as when the server is killed.
    server.kinds("a").await;
    std::mem::forget((in_a, alone));
    let server = server.start_again().await;
    let of_a = ends(&server, &sid("a")).await;
    let status: Vec<_> = of_a.iter().map(|end| &end["status"]).collect();
    assert_eq!(status, ["completed", "lost"]);
    assert_eq!(ends(&server, &alone_id).await.len(), 1);
    // The session created for a run ended with it.
    assert_eq!(
        server.ended(alone_id.as_str()).await,
        "the server stopped during the run that it was made for"
    );
    let server = server.restart().await;
    assert_eq!(ends(&server, &sid("a")).await.len(), 2);
}

#[tokio::test]
async fn a_disconnect_ends_a_run_and_the_session_created_for_it() {
    let server = Server::start().await;
    let run = start(&server, fresh(), "sleep 600").await;
    let id = run.session_id.clone();
    drop(run);
    server.ended(id.as_str()).await;
    let ends = ends(&server, &id).await;
    assert_eq!((ends.len(), &ends[0]["status"]), (1, &"cancelled".into()));
}
