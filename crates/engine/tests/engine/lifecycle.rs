//! Creation, status and destruction of sessions; authorization; limits.

use super::*;
use k8e_driver::Probe;
use k8e_engine::ListFilter;
use k8e_model::{Limits, PoolSize, RuntimeKind};

#[tokio::test]
async fn a_session_is_created_used_and_destroyed() {
    let server = Server::start().await;
    let view = server.create("a").await;
    assert_eq!(
        (view.session.phase, view.session.owner.as_str()),
        (Phase::Active, "cert:me")
    );
    assert!(view.expires_at.is_some());
    assert_eq!(
        server
            .sessions
            .get(&me(), &sid("a"))
            .await
            .unwrap()
            .session
            .phase,
        Phase::Active
    );
    assert_eq!(server.sessions.status().active, 1);

    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let ended = server.sessions.get(&me(), &sid("a")).await.unwrap().session;
    assert_eq!(
        (ended.phase, ended.reason.as_str()),
        (Phase::Ended, "its owner destroyed it")
    );
    assert!(server.driver.sandboxes().is_empty());
    assert_eq!(server.sessions.status().active, 0);
    refused(
        server.sessions.destroy(&me(), &sid("a")).await,
        Code::NotFound,
        "session a not found",
    );
    refused(
        server.run("a", "true").await,
        Code::NotFound,
        "it ended (its owner destroyed it)",
    );
    assert_eq!(server.kinds("a").await, ["created", "destroyed"]);
}

#[tokio::test]
async fn sessions_of_other_owners_are_not_found() {
    let server = Server::start().await;
    server.create("mine").await;
    for id in ["mine", "none"] {
        let expected = format!("session {id} not found");
        let (who, id) = (&other(), &sid(id));
        let sessions = &server.sessions;
        let path = k8e_model::GuestPath::parse(b"x").unwrap();
        let run = RunRequest {
            target: RunTarget::Existing(id.clone()),
            command: sh("true"),
        };
        for error in [
            sessions.get(who, id).await.unwrap_err(),
            sessions.destroy(who, id).await.unwrap_err(),
            sessions.run(who, run).await.err().unwrap(),
            sessions.stat(who, id, &path).await.unwrap_err(),
            sessions.processes(who, id).await.unwrap_err(),
            sessions.transcript(who, id, 0, 0).await.unwrap_err(),
            sessions.events(who, id, 0, 0).await.unwrap_err(),
        ] {
            assert_eq!(
                (error.code(), error.to_string()),
                (Code::NotFound, expected.clone())
            );
        }
    }
    assert!(
        server
            .sessions
            .list(&other(), ListFilter::default())
            .await
            .unwrap()
            .is_empty()
    );
    // The operator of the machine sees everything.
    assert!(
        server
            .sessions
            .get(&Principal::local(), &sid("mine"))
            .await
            .is_ok()
    );
    server.sessions.destroy(&me(), &sid("mine")).await.unwrap();
    refused(
        server.sessions.get(&other(), &sid("mine")).await,
        Code::NotFound,
        "session mine not found",
    );
    assert!(
        server
            .sessions
            .list(&other(), ListFilter::default())
            .await
            .unwrap()
            .is_empty()
    );
}

#[tokio::test]
async fn sessions_are_listed_by_phase_and_tenant() {
    let server = Server::start().await;
    server.create("a").await;
    server.create("b").await;
    let tenant = SessionSpec {
        tenant: "t".parse().ok(),
        ..spec("c")
    };
    server.sessions.create(&me(), tenant).await.unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let ids = async |filter: ListFilter| {
        let views = server.sessions.list(&me(), filter).await.unwrap();
        let mut ids: Vec<_> = views
            .into_iter()
            .map(|view| view.session.id.to_string())
            .collect();
        ids.sort();
        ids
    };
    assert_eq!(ids(ListFilter::default()).await, ["a", "b", "c"]);
    assert_eq!(
        ids(ListFilter {
            phase: Some(Phase::Active),
            tenant: None
        })
        .await,
        ["b", "c"]
    );
    assert_eq!(
        ids(ListFilter {
            phase: Some(Phase::Ended),
            tenant: None
        })
        .await,
        ["a"]
    );
    assert_eq!(
        ids(ListFilter {
            phase: None,
            tenant: Some("t".parse().unwrap())
        })
        .await,
        ["c"]
    );
}

#[tokio::test]
async fn an_id_is_taken_until_its_session_has_ended() {
    let server = Server::start().await;
    server.create("a").await;
    server.run("a", "echo first").await.unwrap();
    refused(
        server.sessions.create(&me(), spec("a")).await,
        Code::Exists,
        "session a exists already",
    );
    refused(
        server.sessions.create(&other(), spec("a")).await,
        Code::Exists,
        "session a exists already",
    );
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    server.create("a").await;
    assert_eq!(
        server.kinds("a").await,
        ["created"],
        "the history of the first is not the second's"
    );
    assert!(
        server
            .sessions
            .transcript(&me(), &sid("a"), 0, 0)
            .await
            .unwrap()
            .output
            .is_empty()
    );
}

#[tokio::test]
async fn a_full_server_refuses_with_the_limit() {
    let server = Server::with(
        Config {
            sessions_max: 2,
            ..Config::default()
        },
        FakeDriver::new(),
    )
    .await;
    server.create("a").await;
    server.create("b").await;
    refused(
        server.sessions.create(&me(), spec("c")).await,
        Code::Exhausted,
        "raise --max-sessions",
    );
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    server.create("c").await;
}

#[tokio::test]
async fn concurrent_creations_stay_within_the_limit() {
    let server = Server::with(
        Config {
            sessions_max: 5,
            ..Config::default()
        },
        FakeDriver::new(),
    )
    .await;
    let spec = SessionSpec::default;
    let attempts = (0..20).map(|_| async { server.sessions.create(&me(), spec()).await });
    let made = futures::future::join_all(attempts)
        .await
        .into_iter()
        .filter(Result::is_ok)
        .count();
    assert_eq!((made, server.driver.sandboxes().len()), (5, 5));
}

#[tokio::test]
async fn a_requested_runtime_must_be_usable() {
    let server = Server::start().await;
    let with = |runtime| SessionSpec {
        runtime: Some(runtime),
        ..SessionSpec::default()
    };
    refused(
        server
            .sessions
            .create(&me(), with(RuntimeKind::Gvisor))
            .await,
        Code::Unsupported,
        "choose one of: native",
    );
    server.driver.set_probe(Probe::Unusable {
        reason: "no cgroups: mount them".to_owned(),
    });
    let status = server.sessions.status();
    assert_eq!(
        (status.runtimes[0].usable, status.default_runtime),
        (false, None)
    );
    refused(
        server
            .sessions
            .create(&me(), with(RuntimeKind::Native))
            .await,
        Code::Unsupported,
        "mount them",
    );
    refused(
        server.sessions.create(&me(), SessionSpec::default()).await,
        Code::Unsupported,
        "check-config",
    );
    server.driver.set_probe(Probe::Usable {
        weaker: vec!["weak".to_owned()],
    });
    assert_eq!(server.sessions.status().runtimes[0].reason, "weak");
    server.create("a").await;
}

#[tokio::test]
async fn the_first_runtime_that_is_installed_is_the_default() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let (first, second) = (FakeDriver::of_kind(RuntimeKind::Gvisor), FakeDriver::new());
    first.set_probe(Probe::Unusable {
        reason: "no runsc".to_owned(),
    });
    let drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(first.clone()), Arc::new(second)];
    let sessions = Sessions::start(Config::default(), store, drivers)
        .await
        .unwrap();
    assert_eq!(sessions.status().default_runtime, Some(RuntimeKind::Native));
    let view = sessions
        .create(&me(), SessionSpec::default())
        .await
        .unwrap();
    assert_eq!(view.session.runtime, RuntimeKind::Native);
}

#[tokio::test]
async fn a_broken_default_runtime_is_not_replaced_by_a_weaker_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let strong = FakeDriver::of_kind(RuntimeKind::Gvisor);
    let broken = || Probe::Broken {
        reason: "no space left on device: free some".to_owned(),
    };
    strong.set_probe(broken());
    let drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(strong.clone()), Arc::new(FakeDriver::new())];
    let sessions = Sessions::start(Config::default(), store, drivers);
    let sessions = sessions.await.unwrap();
    let create = async |runtime| {
        let spec = SessionSpec {
            runtime,
            ..SessionSpec::default()
        };
        let made = sessions.create(&me(), spec).await;
        made.map(|view| view.session.runtime)
    };
    for asked in [None, Some(RuntimeKind::Gvisor)] {
        refused(create(asked).await, Code::Unavailable, "free some");
        refused(create(asked).await, Code::Unavailable, "--runtime: native");
    }
    let status = sessions.status();
    assert_eq!(status.default_runtime, Some(RuntimeKind::Gvisor));
    let shown = &status.runtimes[0];
    assert!(
        !shown.usable && shown.reason.contains("does not work now"),
        "{shown:?}"
    );
    refused(sessions.ready().await, Code::Unavailable, "free some");
    // It was asked for explicitly.
    let native = create(Some(RuntimeKind::Native)).await;
    assert_eq!(native.unwrap(), RuntimeKind::Native);

    // It is probed again, but not by every request.
    strong.set_probe(Probe::Usable { weaker: Vec::new() });
    refused(create(None).await, Code::Unavailable, "free some");
    super::expiry::pass(Duration::from_secs(31)).await;
    let works = async {
        while create(None).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let works = tokio::time::timeout(PATIENCE, works).await;
    works.expect("it is tried again");
    assert_eq!(create(None).await.unwrap(), RuntimeKind::Gvisor);
    sessions.ready().await.unwrap();
}

#[tokio::test]
async fn a_failed_launch_leaves_nothing_but_its_reason() {
    let server = Server::start().await;
    server
        .driver
        .fail_next_launch("no user namespaces: enable them");
    let failed = server.sessions.create(&me(), spec("a")).await;
    refused(
        failed,
        Code::Unsupported,
        "the sandbox could not be made: no user namespaces: enable them",
    );
    assert!(server.driver.sandboxes().is_empty());
    assert_eq!(server.sessions.status().active, 0);
    let ended = server.sessions.get(&me(), &sid("a")).await.unwrap().session;
    assert_eq!(ended.phase, Phase::Ended);
    assert!(ended.reason.contains("enable them"), "{}", ended.reason);
    assert_eq!(server.kinds("a").await, ["create_failed"]);
    server.create("a").await;
}

#[tokio::test]
async fn a_dropped_creation_leaves_nothing() {
    let server = Server::start().await;
    server.driver.set_launch_delay(Duration::from_millis(50));
    for wait_ms in [0, 10, 45, 50, 55, 60] {
        let who = me();
        let create = server.sessions.create(&who, SessionSpec::default());
        tokio::time::timeout(Duration::from_millis(wait_ms), create)
            .await
            .ok();
        tokio::time::sleep(Duration::from_millis(100)).await;
        for view in server
            .sessions
            .list(
                &me(),
                ListFilter {
                    phase: Some(Phase::Active),
                    tenant: None,
                },
            )
            .await
            .unwrap()
        {
            // It was done before the timeout: then the caller owns it.
            server
                .sessions
                .destroy(&me(), &view.session.id)
                .await
                .unwrap();
        }
        server.no_sandbox().await;
    }
    assert!(server.driver.launched() >= 5);
}

#[tokio::test]
async fn concurrent_destroys_destroy_once() {
    let server = Server::start().await;
    server.create("a").await;
    let id = sid("a");
    let attempts = (0..10).map(|_| async { server.sessions.destroy(&me(), &id).await });
    for result in futures::future::join_all(attempts).await {
        if let Err(error) = result {
            assert_eq!(error.code(), Code::NotFound, "{error}");
        }
    }
    assert!(server.driver.sandboxes().is_empty());
    assert_eq!(server.kinds("a").await, ["created", "destroyed"]);
}

#[tokio::test]
async fn concurrent_launches_are_limited() {
    let config = Config {
        launches_max: 1,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server.driver.set_launch_delay(Duration::from_millis(40));
    let began = std::time::Instant::now();
    let all = ["a", "b", "c"].map(|id| server.create(id));
    futures::future::join_all(all).await;
    assert!(began.elapsed() >= Duration::from_millis(3 * 40));

    // A launch queue timeout is an error and leaves nothing.
    server.driver.set_launch_delay(Duration::from_secs(3600));
    let sessions = server.sessions.clone();
    let first = tokio::spawn(async move { sessions.create(&me(), spec("d")).await });
    while server.driver.launches_tried() < 4 {
        tokio::task::yield_now().await;
    }
    let who = me();
    let second = server.sessions.create(&who, spec("e"));
    let soon = tokio::time::sleep(Duration::from_millis(200));
    let second = tokio::select! {
        biased;
        _ = second => panic!("it waits for its turn"),
        () = soon => server.sessions.create(&who, spec("f")),
    };
    tokio::time::pause();
    let error = second.await.unwrap_err();
    assert_eq!(error.code(), Code::Exhausted, "{error}");
    assert!(error.to_string().contains("try again"), "{error}");
    first.abort();
}

#[tokio::test]
async fn destroy_waits_for_a_creation_in_progress() {
    const LAUNCH: Duration = Duration::from_secs(3600);
    let server = Server::start().await;
    server.driver.set_launch_delay(LAUNCH);
    let id = sid("a");
    let who = me();
    let create = server.sessions.create(&who, spec("a"));
    let destroy = async {
        while server.driver.launches_tried() == 0 {
            tokio::task::yield_now().await;
        }
        refused(
            server.run("a", "true").await,
            Code::Precondition,
            "still being made",
        );
        let owner = me();
        let mut destroy = std::pin::pin!(server.sessions.destroy(&owner, &id));
        assert!(futures::poll!(destroy.as_mut()).is_pending(), "it waits");
        tokio::time::pause();
        tokio::time::advance(LAUNCH).await;
        tokio::time::resume();
        destroy.await
    };
    let (_, destroyed) = tokio::join!(create, destroy);
    destroyed.unwrap();
    assert!(server.driver.sandboxes().is_empty());
}

#[tokio::test]
async fn removal_of_a_busy_sandbox_is_retried() {
    let server = Server::start().await;
    server.create("a").await;
    server.driver.fail_destroys(1);
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    assert!(server.driver.sandboxes().is_empty());
}

#[tokio::test]
async fn a_sandbox_that_cannot_be_removed_is_reported_and_swept_later() {
    let server = Server::start().await;
    server.create("a").await;
    server.driver.fail_destroys(3);
    refused(
        server.sessions.destroy(&me(), &sid("a")).await,
        Code::Internal,
        "the mount is busy",
    );
    assert!(
        server
            .ended("a")
            .await
            .contains("removing its sandbox failed")
    );
    let server = server.restart().await;
    assert!(server.driver.sandboxes().is_empty());
}

#[tokio::test]
async fn a_dead_sandbox_ends_its_session() {
    let server = Server::start().await;
    let view = server.create("a").await;
    server.driver.kill(&view.session.sandbox);
    assert_eq!(server.ended("a").await, "the sandbox died");
    server.no_sandbox().await;

    let view = server.create("b").await;
    server.driver.set_limit_events(
        &view.session.sandbox,
        k8e_model::LimitEvents {
            oom_kills: 2,
            pids_refused: 0,
        },
    );
    server.driver.kill(&view.session.sandbox);
    assert_eq!(
        server.ended("b").await,
        "the sandbox died after 2 of its processes were killed for memory: its limit was 512MiB, which a session \
         keeps; make a new one with more, as in `k8e sandbox create --memory 1GiB`"
    );
    assert_eq!(server.kinds("b").await, ["created", "died"]);
}

#[tokio::test]
async fn a_stopping_server_begins_nothing() {
    let server = Server::start().await;
    server.create("a").await;
    server.sessions.shutdown().await;
    refused(
        server.sessions.create(&me(), spec("b")).await,
        Code::Unavailable,
        "the server is stopping",
    );
    assert_eq!(server.driver.sandboxes().len(), 1, "live sandboxes stay");
}

/// The error about a taken id does not tell its owner.
#[tokio::test]
async fn the_id_of_another_owners_ended_session_is_taken() {
    let server = Server::start().await;
    server.create("a").await;
    let alive = server.sessions.create(&other(), spec("a")).await;
    server.run("a", "echo secret").await.unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let over = server.sessions.create(&other(), spec("a")).await;
    let over = over.unwrap_err();
    assert_eq!(over.code(), Code::Exists);
    assert_eq!(over.to_string(), alive.unwrap_err().to_string());
    refused(
        server.sessions.transcript(&other(), &sid("a"), 0, 0).await,
        Code::NotFound,
        "session a not found",
    );
    // The attempt left nothing in the other session's history, and no slot taken.
    assert_eq!(
        server.kinds("a").await,
        ["created", "run_started", "run_ended", "destroyed"]
    );
    let page = server.sessions.transcript(&me(), &sid("a"), 0, 0).await;
    assert_eq!(page.unwrap().output, b"secret\n");
    assert_eq!(server.sessions.status().active, 0);
    server.create("a").await;
}

#[tokio::test]
async fn sessions_per_owner_are_limited() {
    let config = Config {
        sessions_per_owner_max: 2,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server.create("a").await;
    server.create("b").await;
    refused(
        server.sessions.create(&me(), spec("c")).await,
        Code::Exhausted,
        "you have 2 sessions alive",
    );
    server.sessions.create(&other(), spec("d")).await.unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    server.create("c").await;
}

#[tokio::test]
async fn limits_have_a_maximum() {
    let max = Limits {
        memory_bytes: 1 << 30,
        cpu_millis: 2000,
        pids: 100,
        disk_bytes: 1 << 32,
    };
    let config = Config {
        limits_max: max,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    let create = async |limits: Limits| {
        let spec = SessionSpec {
            limits: limits.into(),
            ..SessionSpec::default()
        };
        server.sessions.create(&me(), spec).await
    };
    create(max).await.unwrap();
    for (limits, want) in [
        (
            Limits {
                memory_bytes: (1 << 30) + 1,
                ..max
            },
            "memory limit of 1073741825 bytes (about 1024MiB) is above this server's maximum of 1GiB",
        ),
        (
            Limits {
                cpu_millis: 2001,
                ..max
            },
            "cpu limit of 2.001 CPUs is above this server's maximum of 2 CPUs: ask for less, or restart the server \
             with a higher --max-cpus",
        ),
        (Limits { pids: 101, ..max }, "pids limit of 101"),
        (
            Limits {
                disk_bytes: 1 << 33,
                ..max
            },
            "disk limit of 8GiB",
        ),
    ] {
        refused(create(limits).await, Code::Invalid, want);
    }
}

#[tokio::test]
async fn a_server_without_the_host_template_makes_no_session_from_it() {
    let server = Server::start().await;
    server.create("before").await;
    let Server {
        dir,
        driver,
        store,
        sessions,
        config,
    } = server;
    drop(sessions);
    let config = Config {
        host_template: false,
        pool: PoolSize::new(1, 2).unwrap(),
        ..config
    };
    let drivers = drivers(&driver);
    let sessions = Sessions::start(config.clone(), store.clone(), drivers).await;
    let server = Server {
        dir,
        driver,
        store,
        sessions: sessions.unwrap(),
        config,
    };
    let said = "--allow-host-template";
    let made = server.sessions.create(&me(), spec("s")).await;
    refused(made, Code::Denied, said);
    for target in [RunTarget::Tenant(spec("s")), RunTarget::Fresh(spec("s"))] {
        let command = sh("true");
        let request = RunRequest { target, command };
        let run = server.sessions.run(&me(), request).await;
        refused(run, Code::Denied, said);
    }
    refused(server.sessions.ready().await, Code::Denied, said);
    assert!(server.sessions.pools().is_empty());
    // Existing sessions go on.
    server.run("before", "true").await.unwrap();
    assert_eq!(server.driver.launched(), 1);
}

#[tokio::test]
async fn another_runtime_than_gvisor_only_where_the_operator_allows_it() {
    for (gvisor_fallback, want) in [(false, Some(RuntimeKind::Gvisor)), (true, None)] {
        let config = Config {
            gvisor_fallback,
            ..Config::default()
        };
        // It has no gVisor.
        let server = Server::with(config, FakeDriver::new()).await;
        let given = |asked| server.sessions.runtime_or_fallback(asked);
        assert_eq!(given(Some(RuntimeKind::Gvisor)), want);
        assert_eq!(given(Some(RuntimeKind::Native)), Some(RuntimeKind::Native));
        assert_eq!(given(None), None);
    }
}
