//! Pause and resume. The fake driver only reports that it is frozen: its processes are the test's.

use super::run::{exec_script, started};
use super::*;
use k8e_engine::{FileRange, ListFilter};
use k8e_model::{BackgroundStatus, GuestPath, Lifetime, RunId, TimeLimit};
use k8e_testkit::Step;

impl Server {
    async fn pause(&self, id: &str) -> Result<SessionView, Error> {
        self.sessions.pause(&me(), &sid(id)).await
    }

    async fn resume(&self, id: &str) -> Result<SessionView, Error> {
        self.sessions.resume(&me(), &sid(id)).await
    }

    async fn phase(&self, id: &str) -> Phase {
        let view = self.sessions.get(&me(), &sid(id)).await.unwrap();
        view.session.phase
    }

    async fn in_background(&self, id: &str, script: &str) -> RunId {
        let request = RunRequest {
            target: RunTarget::Existing(sid(id)),
            command: Command {
                timeout: TimeLimit::Never,
                ..sh(script)
            },
        };
        let started = self.sessions.start_background(&me(), request).await;
        started.unwrap().run.id
    }

    async fn run_over(&self, id: &RunId) -> BackgroundStatus {
        let over = async {
            loop {
                let run = self.sessions.poll_run(&me(), id).await.unwrap();
                if run.status != BackgroundStatus::Running {
                    return run.status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, over)
            .await
            .expect("the run ends")
    }
}

#[tokio::test]
async fn a_paused_session_takes_no_calls() {
    let server = Server::start().await;
    let made = server.create("a").await;
    let view = server.pause("a").await.unwrap();
    assert_eq!(view.session.phase, Phase::Paused);
    assert!(server.driver.is_frozen(&made.session.sandbox));

    let paused = "session a is paused: resume it first";
    refused(server.run("a", "true").await, Code::Precondition, paused);
    let path = GuestPath::parse(b"f").unwrap();
    let range = FileRange::default();
    let read = server
        .sessions
        .read_file(&me(), &sid("a"), &path, range)
        .await;
    refused(read.map(|_| ()), Code::Precondition, paused);
    let listed = server.sessions.processes(&me(), &sid("a")).await;
    refused(listed, Code::Precondition, paused);
    let not_active = "session a is not active (phase=paused)";
    refused(server.pause("a").await, Code::Precondition, not_active);

    let list = async |phase| {
        let filter = ListFilter {
            phase: Some(phase),
            ..ListFilter::default()
        };
        server.sessions.list(&me(), filter).await.unwrap().len()
    };
    assert_eq!(
        (list(Phase::Paused).await, list(Phase::Active).await),
        (1, 0)
    );
    for who in [other()] {
        let pause = server.sessions.pause(&who, &sid("a")).await;
        refused(pause, Code::NotFound, "session a not found");
        let resume = server.sessions.resume(&who, &sid("a")).await;
        refused(resume, Code::NotFound, "session a not found");
    }

    let view = server.resume("a").await.unwrap();
    assert_eq!(view.session.phase, Phase::Active);
    assert!(!server.driver.is_frozen(&made.session.sandbox));
    assert_eq!(server.run("a", "echo on").await.unwrap().0, b"on\n");
    let not_paused = "session a is not paused (phase=active)";
    refused(server.resume("a").await, Code::Precondition, not_paused);
    assert_eq!(
        server.kinds("a").await[..3],
        ["created", "paused", "resumed"]
    );
    server.pause("a").await.unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    server.no_sandbox().await;
    refused(server.resume("a").await, Code::NotFound, "it ended");
}

#[tokio::test]
async fn a_session_that_cannot_be_frozen_stays_active() {
    let server = Server::start().await;
    let made = server.create("a").await;
    server.driver.fail_freeze(true);
    let failed = server.pause("a").await;
    assert!(
        failed
            .unwrap_err()
            .to_string()
            .contains("goes on: there is no freezer")
    );
    assert_eq!(server.phase("a").await, Phase::Active);
    server.run("a", "true").await.unwrap();
    // Also when freezing fails after a restart.
    server.driver.fail_freeze(false);
    server.pause("a").await.unwrap();
    server.driver.fail_freeze(true);
    let server = server.restart().await;
    assert_eq!(server.phase("a").await, Phase::Active);
    assert!(!server.driver.is_frozen(&made.session.sandbox));
    server.run("a", "true").await.unwrap();
}

#[tokio::test]
async fn a_paused_session_stays_paused_over_a_restart() {
    let server = Server::start().await;
    let made = server.create("a").await;
    let run = server.in_background("a", "sleep 600").await;
    server.pause("a").await.unwrap();
    let begun = std::time::Instant::now();
    let polled = server.sessions.poll_run(&me(), &run).await;
    refused(polled, Code::Precondition, "is paused");
    let cancelled = server.sessions.cancel_run(&me(), &run).await;
    refused(cancelled, Code::Precondition, "is paused");
    assert!(begun.elapsed() < Duration::from_secs(5), "they waited");

    let server = server.restart().await;
    assert_eq!(server.phase("a").await, Phase::Paused);
    assert!(server.driver.is_frozen(&made.session.sandbox));
    let view = server.sessions.get(&me(), &sid("a")).await.unwrap();
    assert_eq!(view.background_runs, 1);
    refused(
        server.run("a", "true").await,
        Code::Precondition,
        "is paused",
    );
    server.resume("a").await.unwrap();
    server.run("a", "true").await.unwrap();
    server.sessions.cancel_run(&me(), &run).await.unwrap();
    assert_eq!(server.run_over(&run).await, BackgroundStatus::Cancelled);
}

/// As after kill -9 between the record and the freeze.
#[tokio::test]
async fn recovery_reconciles_the_sandbox_with_its_record() {
    let server = Server::start().await;
    let (a, b) = (server.create("a").await, server.create("b").await);
    server.pause("b").await.unwrap();
    assert!(server.store.set_paused(&sid("a"), true).await.unwrap());
    assert!(server.store.set_paused(&sid("b"), false).await.unwrap());
    let server = server.restart().await;
    assert_eq!(server.phase("a").await, Phase::Paused);
    assert!(server.driver.is_frozen(&a.session.sandbox));
    assert_eq!(server.phase("b").await, Phase::Active);
    assert!(!server.driver.is_frozen(&b.session.sandbox));
}

#[tokio::test]
async fn the_idle_timeout_stops_while_paused_and_the_ttl_does_not() {
    const MINUTE: Duration = Duration::from_secs(60);
    let pass = async |time| {
        tokio::time::pause();
        tokio::time::advance(time).await;
        tokio::time::resume();
        // Let the expiry task see it.
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let server = Server::start().await;
    for (id, ttl, idle) in [
        ("idle", None, Some(MINUTE)),
        ("ttl", Some(10 * MINUTE), None),
    ] {
        let spec = SessionSpec {
            lifetime: Lifetime { ttl, idle }.into(),
            ..spec(id)
        };
        server.sessions.create(&me(), spec).await.unwrap();
        server.pause(id).await.unwrap();
    }
    let view = server.sessions.get(&me(), &sid("idle")).await.unwrap();
    assert_eq!(view.expires_at, None);
    pass(5 * MINUTE).await;
    pass(4 * MINUTE).await;
    assert_eq!(server.phase("idle").await, Phase::Paused);
    assert_eq!(server.phase("ttl").await, Phase::Paused);
    pass(2 * MINUTE).await;
    assert_eq!(server.ended("ttl").await, "its TTL of 600s expired");
    server.resume("idle").await.unwrap();
    pass(MINUTE / 2).await;
    assert_eq!(server.phase("idle").await, Phase::Active);
    pass(2 * MINUTE).await;
    assert_eq!(server.ended("idle").await, "it was idle for 60s");
}

/// A command's timeout may pass while its guest is frozen and cannot kill it.
#[tokio::test]
async fn a_paused_guest_is_not_unresponsive() {
    let script = exec_script(vec![started(), Step::Stall]);
    let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
    server.create("a").await;
    let mut command = sh("true");
    command.timeout = TimeLimit::After(Duration::from_secs(1));
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command,
    };
    let mut run = server.sessions.run(&me(), request).await.unwrap();
    run.next().await.unwrap().unwrap();
    server.pause("a").await.unwrap();
    tokio::time::pause();
    let patient = tokio::time::timeout(Duration::from_secs(3600), run.next()).await;
    assert!(patient.is_err(), "it was given up");
    tokio::time::resume();
    server.resume("a").await.unwrap();
    // Its grace period starts again, and then it is unresponsive.
    tokio::time::pause();
    let soon = tokio::time::timeout(Duration::from_secs(5), run.next()).await;
    assert!(soon.is_err(), "it got no grace");
    let error = run.next().await.unwrap().unwrap_err();
    tokio::time::resume();
    assert!(error.to_string().contains("after its timeout"), "{error}");
}
