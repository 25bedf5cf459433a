//! Crash recovery and restart.

use super::*;
use k8e_model::{Lifetime, Limits, RuntimeKind, SandboxId, Session, SessionOrigin};
use k8e_testkit::{Script, Step};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

fn record(id: &str, phase: Phase) -> Session {
    let spec = spec(id);
    Session {
        id: sid(id),
        owner: me().name().to_owned(),
        tenant: spec.tenant.unwrap_or_default(),
        origin: SessionOrigin::Create,
        client: spec.client,
        phase,
        reason: String::new(),
        runtime: RuntimeKind::Native,
        sandbox: SandboxId::random(),
        template: spec.template,
        env: spec.env,
        labels: spec.labels,
        limits: Limits::default(),
        lifetime: Lifetime::default(),
        secrets: spec.secrets,
        egress: k8e_model::EgressPolicy::None,
        created_at: 0,
        last_used: 0,
        sub_agent: None,
        image: None,
    }
}

#[tokio::test]
async fn live_sandboxes_are_adopted_and_dead_ones_recorded() {
    let server = Server::start().await;
    let lives = server.create("lives").await;
    let dies = server.create("dies").await;
    let mute = server.create("mute").await;
    server.sessions.shutdown().await;
    server.driver.kill(&dies.session.sandbox);
    server.driver.kill_guest(&mute.session.sandbox);
    let server = server.start_again().await;

    assert_eq!(
        server.run("lives", "echo again").await.unwrap().0,
        b"again\n"
    );
    assert_eq!(
        server.ended("dies").await,
        "the sandbox was gone when the server came back"
    );
    assert_eq!(
        server.ended("mute").await,
        "its agent did not answer when the server came back"
    );
    assert_eq!(server.driver.sandboxes(), [lives.session.sandbox]);
    assert_eq!(
        server.kinds("lives").await,
        ["created", "recovered", "run_started", "run_ended"]
    );
    assert_eq!(server.kinds("dies").await, ["created", "ended"]);
    server.sessions.destroy(&me(), &sid("lives")).await.unwrap();
    server.no_sandbox().await;
}

#[tokio::test]
async fn half_created_and_half_removed_sessions_are_ended() {
    let server = Server::start().await;
    server
        .store
        .insert_session(&record("making", Phase::Creating))
        .await
        .unwrap();
    server
        .store
        .insert_session(&record("removing", Phase::Terminating))
        .await
        .unwrap();
    server
        .store
        .insert_session(&Session {
            runtime: RuntimeKind::Kata,
            ..record("foreign", Phase::Active)
        })
        .await
        .unwrap();
    let server = server.restart().await;
    assert_eq!(
        server.ended("making").await,
        "the server stopped while it was being made"
    );
    assert_eq!(
        server.ended("removing").await,
        "the server stopped while it was being removed"
    );
    assert_eq!(
        server.ended("foreign").await,
        "the server came back without its runtime kata"
    );
}

/// As after kill -9: the first engine never shuts down, its sandboxes are made but not recorded as active.
#[tokio::test]
async fn a_crash_in_the_middle_of_creations_leaves_nothing() {
    let server = Server::start().await;
    server.create("before").await;
    server.driver.set_launch_delay(Duration::from_millis(30));
    {
        // A runtime of its own, dropped with everything in it, is as near to kill -9 as one process gets.
        let (driver, config, dir) = (
            server.driver.clone(),
            server.config.clone(),
            server.dir.path().to_owned(),
        );
        let crashed = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let store = Store::open(&dir).await.unwrap();
                let sessions = Sessions::start(config, store, drivers(&driver))
                    .await
                    .unwrap();
                let who = me();
                let creations = (0..50).map(|_| sessions.create(&who, SessionSpec::default()));
                let creations = futures::future::join_all(creations);
                tokio::time::timeout(Duration::from_millis(60), creations)
                    .await
                    .ok();
            });
        });
        tokio::task::spawn_blocking(|| crashed.join().unwrap())
            .await
            .unwrap();
    }
    let server = server.start_again().await;
    let active = k8e_store::SessionQuery {
        phase: Some(Phase::Active),
        ..Default::default()
    };
    let active = server.store.sessions(&active).await.unwrap();
    let mut recorded: Vec<_> = active.into_iter().map(|session| session.sandbox).collect();
    let mut there = server.driver.sandboxes();
    recorded.sort();
    there.sort();
    assert_eq!(recorded, there, "what is recorded is what is there");
    assert_eq!(server.sessions.status().active, there.len());
    assert_eq!(server.run("before", "echo ok").await.unwrap().0, b"ok\n");
}

#[tokio::test]
async fn lifetimes_go_on_across_a_restart() {
    let server = Server::start().await;
    let lifetime = k8e_model::Lifetime {
        ttl: Some(Duration::from_millis(300)),
        idle: None,
    };
    server
        .sessions
        .create(
            &me(),
            SessionSpec {
                lifetime: lifetime.into(),
                ..spec("a")
            },
        )
        .await
        .unwrap();
    let server = server.restart().await;
    assert!(server.ended("a").await.contains("TTL"));
    server.no_sandbox().await;
}

/// Guests that accept a call and never answer, more of them than concurrent handshakes.
#[tokio::test]
async fn unresponsive_guests_do_not_delay_a_restart() {
    let deaf = Arc::new(AtomicBool::new(false));
    let turned_deaf = Arc::clone(&deaf);
    let script: Script = Arc::new(move |_| {
        let steps = vec![Step::Stall];
        turned_deaf.load(Ordering::Relaxed).then_some(steps)
    });
    let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
    for n in 0..20 {
        server.create(&format!("deaf-{n}")).await;
    }
    server.driver.set_script(None);
    let lives = server.create("lives").await;
    server.sessions.shutdown().await;
    deaf.store(true, Ordering::Relaxed);
    let start = Instant::now();
    let server = server.start_again().await;
    assert_eq!(server.run("lives", "echo on").await.unwrap().0, b"on\n");
    assert!(start.elapsed() < Duration::from_secs(5), "{start:?}");
    // Two rounds of handshakes time out.
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(11)).await;
        tokio::time::resume();
    }
    for n in 0..20 {
        assert_eq!(
            server.ended(&format!("deaf-{n}")).await,
            "its agent did not answer when the server came back"
        );
    }
    assert_eq!(server.driver.sandboxes(), [lives.session.sandbox]);
}

#[tokio::test]
async fn a_damaged_record_costs_its_session_only() {
    let server = Server::start().await;
    let lives = server.create("lives").await;
    let env = std::collections::BTreeMap::from([("DAMAGE".to_owned(), "here".to_owned())]);
    let spec = SessionSpec {
        env: env.try_into().unwrap(),
        ..spec("damaged")
    };
    server.sessions.create(&me(), spec).await.unwrap();
    server.sessions.shutdown().await;
    // Closed, everything is in one file.
    server.store.close().await;
    let database = server.dir.path().join("k8e.db");
    let mut bytes = std::fs::read(&database).unwrap();
    let good = br#""DAMAGE":"here""#;
    let places = bytes.windows(good.len()).enumerate();
    let places = places
        .filter(|(_, window)| window == good)
        .map(|(at, _)| at);
    for at in places.collect::<Vec<_>>() {
        bytes[at..at + good.len()].copy_from_slice(br#""DAMAGE":!here!"#);
    }
    std::fs::write(&database, bytes).unwrap();

    let Server {
        dir,
        driver,
        sessions,
        config,
        ..
    } = server;
    drop(sessions);
    let store = Store::open(dir.path()).await.unwrap();
    let sessions = Sessions::start(config, store, drivers(&driver)).await;
    let list = sessions.unwrap().list(&me(), Default::default()).await;
    let ids: Vec<_> = list.unwrap().into_iter().map(|v| v.session.id).collect();
    assert_eq!(ids, [sid("lives")]);
    assert_eq!(driver.sandboxes(), [lives.session.sandbox]);
}
