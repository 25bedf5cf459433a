//! Background runs: commands that outlive the call that started them.

use super::*;
use k8e_engine::{RunWatch, RunWatchEvent};
use k8e_model::{BackgroundRun, BackgroundStatus, RunId, TimeLimit};
use k8e_testkit::{Script, Step};
use k8e_wire::proto::{self, Exited, reply, request};

impl Server {
    async fn start_background(&self, id: &str, command: Command) -> Result<BackgroundRun, Error> {
        let request = RunRequest {
            target: RunTarget::Existing(sid(id)),
            command,
        };
        let started = self.sessions.start_background(&me(), request).await?;
        assert_eq!(started.run.status, BackgroundStatus::Running);
        Ok(started.run)
    }

    async fn background(&self, id: &str, script: &str) -> RunId {
        let command = Command {
            timeout: TimeLimit::Never,
            ..sh(script)
        };
        self.start_background(id, command).await.unwrap().id
    }

    async fn poll(&self, id: &RunId) -> BackgroundRun {
        self.sessions.poll_run(&me(), id).await.unwrap()
    }

    /// Waits for a run to end.
    async fn over(&self, id: &RunId) -> BackgroundRun {
        let over = async {
            loop {
                let run = self.poll(id).await;
                if run.status != BackgroundStatus::Running {
                    return run;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, over)
            .await
            .expect("the run ends")
    }

    /// Waits until a run wrote something.
    async fn said(&self, id: &RunId, text: &str) {
        let said = async {
            while self.poll(id).await.stdout != text.as_bytes() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, said)
            .await
            .expect("the run says it");
    }
}

async fn watched(mut watch: RunWatch) -> (Vec<u8>, Vec<u8>, BackgroundRun) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let all = async {
        loop {
            match watch.next().await.unwrap().unwrap() {
                RunWatchEvent::Stdout(data) => stdout.extend_from_slice(&data),
                RunWatchEvent::Stderr(data) => stderr.extend_from_slice(&data),
                RunWatchEvent::Ended(run) => return *run,
            }
        }
    };
    let run = tokio::time::timeout(PATIENCE, all).await.expect("an end");
    assert!(watch.next().await.is_none());
    (stdout, stderr, run)
}

#[tokio::test]
async fn a_background_run_goes_on_and_its_output_is_complete() {
    let server = Server::start().await;
    server.create("a").await;
    let id = server
        .background("a", r"printf 'a\377\000'; sleep 0.4; echo err >&2; exit 3")
        .await;
    let watch = server.sessions.watch_run(&me(), &id).await.unwrap();
    let view = server.sessions.get(&me(), &sid("a")).await.unwrap();
    assert_eq!(view.background_runs, 1);
    let (stdout, stderr, ended) = watched(watch).await;
    let run = server.over(&id).await;
    assert_eq!((&*stdout, &*stderr), (&b"a\xff\0"[..], &b"err\n"[..]));
    assert_eq!(
        (&*run.stdout, &*run.stderr),
        (&b"a\xff\0"[..], &b"err\n"[..])
    );
    assert_eq!(run.status, BackgroundStatus::Completed);
    assert_eq!((run.exit_code, run.signal, &*run.program), (3, 0, "sh"));
    assert!(run.duration > Duration::from_millis(300) && run.ended_at >= Some(run.started_at));
    assert_eq!(ended, run.without_output());
    // The same from the store, and for a late watcher.
    let late = server.sessions.watch_run(&me(), &id).await.unwrap();
    assert_eq!(watched(late).await, (stdout, stderr, ended));
    let listed = server.sessions.list_runs(&me(), &sid("a")).await.unwrap();
    assert_eq!(listed, [run.without_output()]);
    let kinds = server.kinds("a").await;
    assert!(kinds.contains(&"run_started".to_owned()) && kinds.contains(&"run_ended".to_owned()));
    let log = server
        .sessions
        .transcript(&me(), &sid("a"), 0, 1000)
        .await
        .unwrap();
    assert_eq!(log.output, b"a\xff\0err\n");
}

#[tokio::test]
async fn only_running_ones_count_against_the_limit() {
    let server = Server::start().await;
    server.create("a").await;
    for _ in 0..5 {
        let id = server.background("a", "true").await;
        assert_eq!(server.over(&id).await.status, BackgroundStatus::Completed);
    }
    let mut running = Vec::new();
    for _ in 0..5 {
        running.push(server.background("a", "sleep 60").await);
    }
    let sixth = server.start_background("a", sh("true")).await;
    refused(sixth, Code::Exhausted, "5 background runs");
    // Foreground runs are not limited by it, and an end frees a slot.
    assert_eq!(server.run("a", "exit 4").await.unwrap().1.exit_code, 4);
    let cancelled = server.sessions.cancel_run(&me(), &running[0]).await;
    assert_eq!(cancelled.unwrap().status, BackgroundStatus::Cancelled);
    let id = server.background("a", "echo room").await;
    assert_eq!(server.over(&id).await.stdout, b"room\n");
    let listed = server.sessions.list_runs(&me(), &sid("a")).await.unwrap();
    assert_eq!(listed.len(), 11);
}

#[tokio::test]
async fn cancel_kills_all_processes_of_a_run_and_is_idempotent() {
    let server = Server::start().await;
    server.create("a").await;
    let dir = tempfile::tempdir().unwrap();
    let beat = dir.path().join("beat");
    let script = format!(
        "(while :; do date +%N > {0}; sleep 0.02; done) & echo up; wait",
        beat.display()
    );
    let id = server.background("a", &script).await;
    server.said(&id, "up\n").await;
    let run = server.sessions.cancel_run(&me(), &id).await.unwrap();
    assert_eq!(run.status, BackgroundStatus::Cancelled);
    assert_eq!(
        (run.exit_code, run.signal, &*run.stdout),
        (137, 9, &b"up\n"[..])
    );
    let before = std::fs::read(&beat).unwrap_or_default();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(std::fs::read(&beat).unwrap_or_default(), before);
    assert_eq!(
        server.sessions.cancel_run(&me(), &id).await.unwrap(),
        run,
        "again"
    );
    let done = server.background("a", "exit 2").await;
    let done = server.over(&done).await;
    let again = server.sessions.cancel_run(&me(), &done.id).await.unwrap();
    assert_eq!(again, done, "what is over stays as it ended");
}

#[tokio::test]
async fn timeout_and_output_limit_hold() {
    let server = Server::start().await;
    server.create("a").await;
    let command = Command {
        // On a busy machine all of it is written long before.
        timeout: TimeLimit::After(Duration::from_secs(3)),
        ..sh("head -c 3000000 /dev/zero; echo x >&2; sleep 60")
    };
    let id = server.start_background("a", command).await.unwrap().id;
    let run = server.over(&id).await;
    assert_eq!(run.status, BackgroundStatus::TimedOut);
    assert_eq!((run.exit_code, run.stdout.len()), (137, 1 << 20));
    assert!(run.stdout_truncated && !run.stderr_truncated);
}

#[tokio::test]
async fn runs_of_other_owners_are_not_found() {
    let server = Server::start().await;
    server.create("a").await;
    let running = server.background("a", "sleep 60").await;
    let done = server.background("a", "true").await;
    server.over(&done).await;
    for id in [&running, &done, &RunId::random()] {
        let sessions = &server.sessions;
        refused(
            sessions.poll_run(&other(), id).await,
            Code::NotFound,
            "not found",
        );
        refused(
            sessions.cancel_run(&other(), id).await,
            Code::NotFound,
            "not found",
        );
        refused(
            sessions.watch_run(&other(), id).await.map(drop),
            Code::NotFound,
            "not found",
        );
    }
    let listed = server.sessions.list_runs(&other(), &sid("a")).await;
    refused(listed, Code::NotFound, "not found");
    assert_eq!(
        server.poll(&running).await.status,
        BackgroundStatus::Running
    );
}

#[tokio::test]
async fn the_end_of_a_session_ends_its_runs() {
    let server = Server::start().await;
    server.create("a").await;
    let id = server.background("a", "echo x; sleep 60").await;
    server.said(&id, "x\n").await;
    let watch = server.sessions.watch_run(&me(), &id).await.unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let run = server.over(&id).await;
    assert_eq!(run.status, BackgroundStatus::Cancelled);
    assert!(run.reason.contains("destroyed"), "{}", run.reason);
    assert_eq!(watched(watch).await.2.status, BackgroundStatus::Cancelled);
}

#[tokio::test]
async fn runs_survive_a_restart() {
    let server = Server::start().await;
    server.create("a").await;
    let done = server.background("a", "echo done; exit 5").await;
    let done = server.over(&done).await;
    // Ends while there is no server: the end is recorded after the restart.
    let dir = tempfile::tempdir().unwrap();
    let (go, gone) = (dir.path().join("go"), dir.path().join("gone"));
    let script = format!(
        "until [ -e {} ]; do sleep 0.01; done; echo late; touch {}; exit 6",
        go.display(),
        gone.display()
    );
    let over_meanwhile = server.background("a", &script).await;
    let running = server.background("a", "echo up; sleep 60").await;
    server.said(&running, "up\n").await;
    let server = {
        let server = server;
        server.sessions.shutdown().await;
        std::fs::write(&go, "").unwrap();
        while !gone.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        server.start_again().await
    };
    assert_eq!(server.poll(&done.id).await, done);
    let late = server.over(&over_meanwhile).await;
    assert_eq!((&*late.stdout, late.exit_code), (&b"late\n"[..], 6));
    assert_eq!(late.status, BackgroundStatus::Completed);
    server.said(&running, "up\n").await;
    let view = server.sessions.get(&me(), &sid("a")).await.unwrap();
    assert_eq!(view.background_runs, 1);
    let run = server.sessions.cancel_run(&me(), &running).await.unwrap();
    assert_eq!(run.status, BackgroundStatus::Cancelled);
}

#[tokio::test]
async fn a_run_unknown_to_its_guest_is_lost() {
    let server = Server::start().await;
    let view = server.create("a").await;
    server.create("b").await;
    let (gone, forgotten) = (
        server.background("a", "sleep 60").await,
        BackgroundRun::new(sid("b"), "x".to_owned(), None, 1),
    );
    server.store.insert_run(&forgotten).await.unwrap();
    server.sessions.shutdown().await;
    server.driver.kill(&view.session.sandbox);
    let server = server.start_again().await;
    for id in [&gone, &forgotten.id] {
        let run = server.over(id).await;
        assert_eq!(run.status, BackgroundStatus::Lost, "{run:?}");
        assert!(!run.reason.is_empty());
    }
}

#[tokio::test]
async fn invalid_requests_are_refused() {
    let server = Server::start().await;
    server.create("a").await;
    let stdin = Command {
        stdin: true,
        ..sh("cat")
    };
    refused(
        server.start_background("a", stdin).await,
        Code::Invalid,
        "standard input",
    );
    let missing = server
        .start_background("a", argv(&["no-such-program"]))
        .await;
    refused(missing, Code::Invalid, "no-such-program");
    let fresh = RunRequest {
        target: RunTarget::Fresh(SessionSpec::default()),
        command: sh("true"),
    };
    let fresh = server.sessions.start_background(&me(), fresh).await;
    refused(fresh, Code::Invalid, "fresh");
    let listed = server.sessions.list_runs(&me(), &sid("a")).await.unwrap();
    assert_eq!(listed, []);
    // With a session created for it.
    let tenant = RunRequest {
        target: RunTarget::Tenant(SessionSpec::default()),
        command: sh("true"),
    };
    let started = server.sessions.start_background(&me(), tenant).await;
    let started = started.unwrap();
    server.over(&started.run.id).await;
}

/// A server with a guest that answers `AttachRun` with these steps.
async fn hostile(attach: Vec<Step>) -> (Server, RunId) {
    let started = || Step::Reply(reply::Reply::Started(proto::Started { pid: 7 }));
    let script: Script = Arc::new(move |call: &request::Call| {
        let mut steps = vec![started()];
        match call {
            request::Call::StartRun(_) | request::Call::AttachRun(_) => {
                steps.extend(attach.clone());
                Some(steps)
            }
            request::Call::Hello(_) => None,
            _ => Some(vec![Step::Stall]),
        }
    });
    let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
    server.create("a").await;
    let id = server.background("a", "true").await;
    (server, id)
}

#[tokio::test]
async fn a_hostile_guest_fails_only_its_own_run() {
    let much = Step::Flood(reply::Reply::Stdout(vec![b'x'; 100_000].into()));
    let impossible = Step::Reply(reply::Reply::Exited(Exited {
        exit_code: 4711,
        ..Exited::default()
    }));
    let other = Step::Reply(reply::Reply::Done(proto::Done::default()));
    for steps in [vec![much], vec![impossible], vec![other], vec![]] {
        let (server, id) = hostile(steps).await;
        let who = me();
        let run = server.sessions.poll_run(&who, &id);
        // Any error, but before the timeout.
        let _ = tokio::time::timeout(PATIENCE, run)
            .await
            .expect("an answer");
        let over = async {
            while server.sessions.list_runs(&me(), &sid("a")).await.unwrap()[0].status
                == BackgroundStatus::Running
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, over).await.expect("an end");
        let run = server.sessions.list_runs(&me(), &sid("a")).await.unwrap();
        assert_eq!(run[0].status, BackgroundStatus::Failed, "{run:?}");
    }
}
