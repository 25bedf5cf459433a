//! Tenants: authorization, quotas, and runs that name a tenant instead of a session.

use super::expiry::{MINUTE, pass};
use super::*;
use k8e_driver::Probe;
use k8e_engine::{Certificate, ListFilter, NewKey, TerminalRequest};
use k8e_model::{KeyId, Lifetime, RuntimeKind, SecretName, SecretRef, SubAgentSpec, Tenants};

fn tenant(name: &str) -> SessionSpec {
    SessionSpec {
        tenant: name.parse().ok(),
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
async fn a_tenants_session_is_created_once_and_reused() {
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
async fn fifty_concurrent_runs_share_one_session() {
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
    // The death is not reported yet: the run itself detects it.
    server.driver.kill_guest(&sandbox);
    let who = me();
    let again = || server.sessions.run(&who, request(tenant("t"), "echo new"));
    let second = match again().await {
        // It accepted the request before it died: that call fails, and the next one detects it.
        Err(error) if error.code() == Code::Unavailable => again().await.unwrap(),
        second => second.unwrap(),
    };
    assert!(second.session_created);
    assert_ne!(second.session_id, id);
    assert_eq!(finish(second).await.unwrap().0, b"new\n");
    assert_eq!(
        server.ended(id.as_str()).await,
        "the sandbox's agent is gone"
    );
}

#[tokio::test]
async fn a_request_for_a_runtime_does_not_reuse_another() {
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
async fn a_fresh_session_ends_with_its_run() {
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
    // A command that does not start: the session ends too.
    let nothing = RunRequest {
        target: RunTarget::Fresh(tenant("t")),
        command: argv(&["no-such-program"]),
    };
    refused(
        server.sessions.run(&me(), nothing).await,
        Code::Invalid,
        "\"no-such-program\" not found",
    );
    server.no_sandbox().await;
}

/// The holder of a new API key with these tenants, and the key's id.
async fn holder(server: &Server, name: &str, tenants: &[&str]) -> (Principal, KeyId) {
    let tenants: Vec<_> = tenants.iter().map(|&tenant| tenant.to_owned()).collect();
    let new = NewKey {
        name: name.parse().unwrap(),
        principal: Some("ann".parse().unwrap()),
        tenants: Tenants::parse(&tenants).unwrap(),
        expires_in: None,
    };
    let (_, key) = server
        .sessions
        .create_key(&Principal::local(), new)
        .await
        .unwrap();
    server.sessions.verify_key(&key).unwrap()
}

fn terminal(spec: SessionSpec) -> TerminalRequest {
    TerminalRequest {
        target: RunTarget::Tenant(spec),
        command: sh("true"),
        rows: 0,
        cols: 0,
    }
}

fn of_tenant(name: &str) -> ListFilter {
    ListFilter {
        phase: None,
        tenant: name.parse().ok(),
    }
}

#[tokio::test]
async fn a_tenant_that_a_key_does_not_name_is_refused_by_every_call() {
    let server = Server::start().await;
    let sessions = &server.sessions;
    let (ann, key) = holder(&server, "ann", &["a", "b"]).await;
    let certificate = Certificate {
        serial: "1".to_owned(),
        common_name: "ann".to_owned(),
        ends_at: i64::MAX,
        key: Some(key),
    };
    let by_certificate = sessions.verify_certificate(&certificate).unwrap();
    let fresh = || RunRequest {
        target: RunTarget::Fresh(tenant("c")),
        command: sh("true"),
    };
    for who in [&ann, &by_certificate] {
        let denied = "may not use tenant c, only a, b";
        let made = sessions.create(who, tenant("c")).await;
        refused(made, Code::Denied, denied);
        let run = sessions.run(who, request(tenant("c"), "true")).await;
        refused(run, Code::Denied, denied);
        refused(sessions.run(who, fresh()).await, Code::Denied, denied);
        let run = sessions
            .start_background(who, request(tenant("c"), "true"))
            .await;
        refused(run, Code::Denied, denied);
        let made = sessions.create_terminal(who, terminal(tenant("c"))).await;
        refused(made, Code::Denied, denied);
        let listed = sessions.list(who, of_tenant("c")).await;
        refused(listed, Code::Denied, denied);
    }
    assert_eq!(server.driver.launched(), 0);
    // The default is the first; the others have to be named.
    let made = sessions.create(&ann, SessionSpec::default()).await.unwrap();
    assert_eq!(made.session.tenant.as_str(), "a");
    let made = sessions.create(&by_certificate, tenant("b")).await.unwrap();
    assert_eq!(made.session.tenant.as_str(), "b");
    assert_eq!(sessions.list(&ann, of_tenant("b")).await.unwrap().len(), 1);
}

#[tokio::test]
async fn keys_that_name_no_tenant_do_not_share_one() {
    let server = Server::start().await;
    let (laptop, _) = holder(&server, "laptop", &[]).await;
    let (desktop, id) = holder(&server, "Desktop@home", &[]).await;
    let run = |who| {
        let run = server
            .sessions
            .run(who, request(SessionSpec::default(), "true"));
        async move { run.await.unwrap().session_id.clone() }
    };
    let (first, second) = (run(&laptop).await, run(&desktop).await);
    assert_ne!(first, second);
    assert_eq!(run(&laptop).await, first);
    let get = async |id| server.sessions.get(&laptop, id).await.unwrap();
    assert_eq!(get(&first).await.session.tenant.as_str(), "laptop");
    assert_eq!(get(&second).await.session.tenant.as_str(), id.as_str());
}

#[tokio::test]
async fn the_operator_may_use_any_tenant() {
    let server = Server::start().await;
    for who in [Principal::local(), Principal::loopback(), me()] {
        for (spec, got) in [(tenant("x"), "x"), (SessionSpec::default(), "default")] {
            let made = server.sessions.create(&who, spec).await.unwrap();
            assert_eq!(made.session.tenant.as_str(), got);
        }
        server.sessions.list(&who, of_tenant("y")).await.unwrap();
    }
    let (any, _) = holder(&server, "any", &["*"]).await;
    let made = server.sessions.create(&any, tenant("y")).await.unwrap();
    assert_eq!(made.session.tenant.as_str(), "y");
}

#[tokio::test]
async fn a_session_keeps_its_owner_whatever_its_tenant() {
    let server = Server::start().await;
    let sessions = &server.sessions;
    let (before, _) = holder(&server, "before", &["old"]).await;
    let (ann, _) = holder(&server, "ann", &["new"]).await;
    let made = sessions.create(&before, tenant("old")).await.unwrap();
    let id = made.session.id;
    let run = RunRequest {
        target: RunTarget::Existing(id.clone()),
        command: sh("echo here"),
    };
    let run = sessions.run(&ann, run).await.unwrap();
    assert_eq!(finish(run).await.unwrap().0, b"here\n");
    let all = sessions.list(&ann, ListFilter::default()).await.unwrap();
    assert_eq!(all.len(), 1);
    // But nothing is created for that tenant, nor sub-agents.
    let spec = SubAgentSpec::new("", "").unwrap();
    let sub = sessions.create_sub_agent(&ann, &id, spec.clone()).await;
    refused(sub, Code::Denied, "may not use tenant old, only new");
    sessions.create_sub_agent(&before, &id, spec).await.unwrap();
    sessions.destroy(&ann, &id).await.unwrap();
}

#[tokio::test]
async fn sessions_per_tenant_are_limited() {
    let config = Config {
        sessions_per_tenant_max: 2,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    let sessions = &server.sessions;
    // All owners together, sub-agents included.
    let first = sessions.create(&me(), tenant("t")).await.unwrap();
    sessions.create(&other(), tenant("t")).await.unwrap();
    let full = "tenant t has 2 sessions alive";
    let third = sessions.create(&me(), tenant("t")).await;
    refused(third, Code::Exhausted, full);
    let spec = SubAgentSpec::new("", "").unwrap();
    let id = first.session.id;
    let sub = sessions.create_sub_agent(&me(), &id, spec).await;
    refused(sub, Code::Exhausted, full);
    sessions.create(&me(), tenant("u")).await.unwrap();
    sessions.destroy(&me(), &id).await.unwrap();
    sessions.create(&me(), tenant("t")).await.unwrap();
}

#[tokio::test]
async fn an_ended_session_is_replaced_without_its_files() {
    let server = Server::start().await;
    let short = SessionSpec {
        lifetime: Lifetime {
            ttl: None,
            idle: Some(MINUTE),
        }
        .into(),
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

    // One in use by other calls stays.
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
