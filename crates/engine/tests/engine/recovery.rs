//! The server goes and comes back.

use super::*;
use k8e_model::{RuntimeKind, SandboxId, Session};

fn record(id: &str, phase: Phase) -> Session {
    let spec = spec(id);
    Session {
        id: sid(id),
        owner: me().name().to_owned(),
        tenant: spec.tenant,
        phase,
        reason: String::new(),
        runtime: RuntimeKind::Native,
        sandbox: SandboxId::random(),
        template: spec.template,
        env: spec.env,
        labels: spec.labels,
        limits: spec.limits,
        lifetime: spec.lifetime,
        created_at: 0,
        last_used: 0,
    }
}

#[tokio::test]
async fn what_lives_goes_on_and_what_died_is_told() {
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
async fn what_was_half_made_or_half_removed_is_over() {
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
                lifetime,
                ..spec("a")
            },
        )
        .await
        .unwrap();
    let server = server.restart().await;
    assert!(server.ended("a").await.contains("was over"));
    server.no_sandbox().await;
}
