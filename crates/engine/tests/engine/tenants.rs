//! Runs that name a tenant instead of a session.

use super::expiry::{MINUTE, pass};
use super::*;
use k8e_driver::Probe;
use k8e_engine::TerminalRequest;
use k8e_model::{Lifetime, RuntimeKind, SecretName, SecretRef};

fn tenant(name: &str) -> SessionSpec {
    SessionSpec {
        tenant: name.parse().unwrap(),
        ..SessionSpec::default()
    }
}

fn request(spec: SessionSpec, script: &str) -> RunRequest {
    RunRequest {
        target: RunTarget::Tenant(spec),
        command: sh(script),
    }
}

#[tokio::test]
async fn a_tenants_session_is_made_once_and_used_again() {
    let server = Server::start().await;
    let first = server
        .sessions
        .run(&me(), request(tenant("t"), "true"))
        .await
        .unwrap();
    let (id, created) = (first.session_id.clone(), first.session_created);
    assert!(created);
    finish(first).await.unwrap();
    let again = server
        .sessions
        .run(&me(), request(tenant("t"), "true"))
        .await
        .unwrap();
    assert_eq!(
        (again.session_id.clone(), again.session_created),
        (id.clone(), false)
    );
    finish(again).await.unwrap();
    for (who, name) in [(me(), "u"), (other(), "t")] {
        let elsewhere = server
            .sessions
            .run(&who, request(tenant(name), "true"))
            .await
            .unwrap();
        assert_ne!(elsewhere.session_id, id);
        finish(elsewhere).await.unwrap();
    }
}

#[tokio::test]
async fn fifty_runs_at_once_share_one_session() {
    let server = Server::start().await;
    server.driver.set_launch_delay(Duration::from_millis(50));
    let who = me();
    let runs = (0..50).map(|n| {
        let server = &server;
        let who = &who;
        async move {
            let run = server
                .sessions
                .run(who, request(tenant("t"), &format!("echo {n}")))
                .await
                .unwrap();
            let created = run.session_created;
            assert_eq!(finish(run).await.unwrap().0, format!("{n}\n").into_bytes());
            created
        }
    });
    let created = futures::future::join_all(runs)
        .await
        .into_iter()
        .filter(|created| *created)
        .count();
    assert_eq!((created, server.driver.launched()), (1, 1));
}

#[tokio::test]
async fn a_dead_session_is_replaced() {
    let server = Server::start().await;
    let first = server
        .sessions
        .run(&me(), request(tenant("t"), "true"))
        .await
        .unwrap();
    let id = first.session_id.clone();
    finish(first).await.unwrap();
    let sandbox = server
        .sessions
        .get(&me(), &id)
        .await
        .unwrap()
        .session
        .sandbox;
    // Nobody was told yet: the run itself finds out.
    server.driver.kill_guest(&sandbox);
    let second = server
        .sessions
        .run(&me(), request(tenant("t"), "echo new"))
        .await
        .unwrap();
    assert!(second.session_created);
    assert_ne!(second.session_id, id);
    assert_eq!(finish(second).await.unwrap().0, b"new\n");
    assert_eq!(
        server.ended(id.as_str()).await,
        "the sandbox's agent is gone"
    );
}

#[tokio::test]
async fn somebody_who_asks_for_an_isolation_does_not_get_another() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let strong = FakeDriver::of_kind(RuntimeKind::Gvisor);
    let drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(FakeDriver::new()), Arc::new(strong.clone())];
    let sessions = Sessions::start(Config::default(), store, drivers)
        .await
        .unwrap();
    let weak = sessions
        .run(&me(), request(tenant("t"), "true"))
        .await
        .unwrap();
    assert_eq!(weak.runtime, RuntimeKind::Native);
    let asked = SessionSpec {
        runtime: Some(RuntimeKind::Gvisor),
        ..tenant("t")
    };
    let run = sessions
        .run(&me(), request(asked.clone(), "true"))
        .await
        .unwrap();
    assert_eq!(
        (run.runtime, run.session_created),
        (RuntimeKind::Gvisor, true)
    );
    strong.set_probe(Probe::Unusable {
        reason: "gone".to_owned(),
    });
    assert_eq!(
        sessions
            .run(&me(), request(asked, "true"))
            .await
            .unwrap()
            .session_id,
        run.session_id
    );
}

#[tokio::test]
async fn a_fresh_session_goes_with_its_run() {
    let server = Server::start().await;
    let fresh = |script: &str| RunRequest {
        target: RunTarget::Fresh(tenant("t")),
        command: sh(script),
    };
    let run = server.sessions.run(&me(), fresh("echo hi")).await.unwrap();
    let id = run.session_id.clone();
    assert!(run.session_created);
    assert_eq!(finish(run).await.unwrap().0, b"hi\n");
    server.ended(id.as_str()).await;
    server.no_sandbox().await;

    let run = server
        .sessions
        .run(&me(), fresh("sleep 600"))
        .await
        .unwrap();
    drop(run);
    server.no_sandbox().await;
    // It does not start at all: gone too.
    let nothing = RunRequest {
        target: RunTarget::Fresh(tenant("t")),
        command: argv(&["no-such-program"]),
    };
    refused(
        server.sessions.run(&me(), nothing).await,
        Code::Invalid,
        "no-such-program not found",
    );
    server.no_sandbox().await;
}

#[tokio::test]
async fn a_session_that_is_over_is_replaced_and_its_files_are_not_promised() {
    let server = Server::start().await;
    let short = SessionSpec {
        lifetime: Lifetime {
            ttl: None,
            idle: Some(MINUTE),
        },
        ..tenant("t")
    };
    let run = async || {
        let request = request(short.clone(), "true");
        let run = server.sessions.run(&me(), request).await.unwrap();
        let seen = (run.session_id.clone(), run.session_created);
        finish(run).await.unwrap();
        seen
    };
    let first = run().await;
    assert_eq!(run().await, (first.0.clone(), false));
    pass(2 * MINUTE).await;
    server.ended(first.0.as_str()).await;
    let (id, created) = run().await;
    assert!(created && id != first.0);
}

#[tokio::test]
async fn a_session_whose_first_command_does_not_start_is_not_kept() {
    let server = Server::start().await;
    let missing = SecretRef {
        secret: SecretName::new("nobody-set-it", "").unwrap(),
        env_var: "A".to_owned(),
    };
    let spec = SessionSpec {
        secrets: vec![missing].try_into().unwrap(),
        ..tenant("t")
    };
    let (why, sessions, who) = ("nobody-set-it", &server.sessions, me());
    let run = sessions.run(&who, request(spec.clone(), "true")).await;
    refused(run, Code::Precondition, why);
    let background = sessions.start_background(&who, request(spec.clone(), "true"));
    refused(background.await, Code::Precondition, why);
    let terminal = TerminalRequest {
        target: RunTarget::Tenant(spec.clone()),
        command: sh("true"),
        rows: 0,
        cols: 0,
    };
    let terminal = sessions.create_terminal(&who, terminal).await;
    refused(terminal, Code::Precondition, why);
    assert_eq!(sessions.run_session(&who, &spec), None);
    server.no_sandbox().await;

    // One that others use stays.
    let run = sessions
        .run(&who, request(tenant("t"), "true"))
        .await
        .unwrap();
    let id = run.session_id.clone();
    finish(run).await.unwrap();
    let nothing = RunRequest {
        target: RunTarget::Tenant(tenant("t")),
        command: argv(&["no-such-program"]),
    };
    refused(
        sessions.run(&who, nothing).await,
        Code::Invalid,
        "not found",
    );
    assert_eq!(sessions.run_session(&who, &tenant("t")), Some(id));
}
