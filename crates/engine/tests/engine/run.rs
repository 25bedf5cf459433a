//! Foreground runs: input, output, outcome.

use super::*;
use bytes::Bytes;
use k8e_model::{Language, LimitEvents, LimitKind, RunStatus, TimeLimit};
use k8e_testkit::{Script, Step};
use k8e_wire::proto::{Exited, Started, reply, request};

async fn start(server: &Server, command: Command) -> Result<Run, Error> {
    server
        .sessions
        .run(
            &me(),
            RunRequest {
                target: RunTarget::Existing(sid("a")),
                command,
            },
        )
        .await
}

/// Exec is answered with these; hello as it should be.
pub(crate) fn exec_script(steps: Vec<Step>) -> Script {
    Arc::new(move |call: &request::Call| match call {
        request::Call::Hello(_) => None,
        _ => Some(steps.clone()),
    })
}

pub(crate) fn started() -> Step {
    Step::Reply(reply::Reply::Started(Started { pid: 2 }))
}

#[tokio::test]
async fn exit_codes_and_signals_are_exact() {
    let server = Server::start().await;
    server.create("a").await;
    for (script, exit_code, signal) in [
        ("exit 0", 0, 0),
        ("exit 3", 3, 0),
        ("kill -9 $$", 137, 9),
        ("kill -15 $$", 143, 15),
    ] {
        let (_, outcome) = server.run("a", script).await.unwrap();
        assert_eq!(
            (outcome.exit_code, outcome.signal, outcome.status),
            (exit_code, signal, RunStatus::Completed),
            "{script}"
        );
    }
}

#[tokio::test]
async fn streams_are_separate_and_counted() {
    let server = Server::start().await;
    server.create("a").await;
    let mut run = start(&server, sh("printf out; printf error >&2"))
        .await
        .unwrap();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    while let Some(event) = run.next().await {
        match event.unwrap() {
            RunEvent::Started { .. } => {}
            RunEvent::Stdout(data) => out.extend_from_slice(&data),
            RunEvent::Stderr(data) => err.extend_from_slice(&data),
            RunEvent::Exited(outcome) => {
                assert_eq!((outcome.stdout_bytes, outcome.stderr_bytes), (3, 5))
            }
        }
    }
    assert_eq!(
        (out.as_slice(), err.as_slice()),
        (&b"out"[..], &b"error"[..])
    );
}

#[tokio::test]
async fn input_environment_and_signals_arrive() {
    let server = Server::start().await;
    let env = |pairs: &[(&str, &str)]| {
        let map: std::collections::BTreeMap<_, _> = pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        k8e_model::Env::try_from(map).unwrap()
    };
    let with_env = SessionSpec {
        env: env(&[("A", "session"), ("B", "session")]),
        ..spec("a")
    };
    server.sessions.create(&me(), with_env).await.unwrap();

    let mut command = sh("echo $A $B; cat");
    command.env = env(&[("B", "command")]);
    command.stdin = true;
    let mut run = start(&server, command).await.unwrap();
    let mut input = run.take_input().unwrap();
    assert!(run.take_input().is_none());
    input.data(Bytes::from(vec![b'x'; 300_000])).await.unwrap();
    input.end().await;
    let (output, _) = finish(run).await.unwrap();
    assert_eq!(&output[..16], b"session command\n");
    assert_eq!(output.len(), 300_016);

    let mut run = start(&server, sh("sleep 600")).await.unwrap();
    let mut input = run.take_input().unwrap();
    refused(
        input.data(Bytes::from_static(b"x")).await,
        Code::Precondition,
        "started without",
    );
    refused(input.signal(99).await, Code::Invalid, "signal 99");
    input.signal(15).await.unwrap();
    assert_eq!(finish(run).await.unwrap().1.signal, 15);
    input.signal(15).await.unwrap();
}

#[tokio::test]
async fn dropping_the_input_closes_stdin() {
    let server = Server::start().await;
    server.create("a").await;
    let mut command = sh("cat; echo done");
    command.stdin = true;
    let mut run = start(&server, command).await.unwrap();
    drop(run.take_input());
    assert_eq!(finish(run).await.unwrap().0, b"done\n");
}

#[tokio::test]
async fn a_timeout_is_reported() {
    let server = Server::start().await;
    server.create("a").await;
    let mut command = sh("sleep 600 & sleep 600");
    command.timeout = TimeLimit::After(Duration::from_millis(200));
    let (_, outcome) = finish(start(&server, command).await.unwrap())
        .await
        .unwrap();
    assert_eq!(outcome.status, RunStatus::TimedOut);
    assert!(outcome.duration < Duration::from_secs(5));
}

#[tokio::test]
async fn output_is_truncated_at_its_limit() {
    let server = Server::start().await;
    server.create("a").await;
    let mut command = sh("head -c 100000 /dev/zero");
    command.output_bytes_max = Some(1000);
    let (output, outcome) = finish(start(&server, command).await.unwrap())
        .await
        .unwrap();
    assert_eq!(
        (output.len(), outcome.stdout_bytes, outcome.stdout_truncated),
        (1000, 100_000, true)
    );
}

#[tokio::test]
async fn a_dropped_run_kills_its_command() {
    let server = Server::start().await;
    server.create("a").await;
    let mut run = start(&server, sh("echo $$; exec sleep 1000"))
        .await
        .unwrap();
    let input = run.take_input();
    let pid = loop {
        if let RunEvent::Stdout(bytes) = run.next().await.expect("it runs").unwrap() {
            break String::from_utf8(bytes.to_vec()).unwrap();
        }
    };
    let process = std::path::Path::new("/proc").join(pid.trim());
    assert!(process.exists(), "it runs until it is dropped");
    drop(run);
    let gone = async {
        while process.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let gone = tokio::time::timeout(Duration::from_secs(60), gone).await;
    gone.expect("the command ends with its run");
    drop(input);
    assert_eq!(
        server.kinds("a").await,
        ["created", "run_started", "run_ended"]
    );
    assert_eq!(server.run("a", "echo fine").await.unwrap().0, b"fine\n");
}

#[tokio::test]
async fn missing_programs_are_named() {
    let server = Server::start().await;
    server.create("a").await;
    refused(
        start(&server, argv(&["no-such-program"])).await,
        Code::Invalid,
        "program \"no-such-program\" not found in the sandbox: check its name and the PATH inside",
    );
    refused(
        start(&server, argv(&["ls -la"])).await,
        Code::Invalid,
        "program \"ls -la\" not found in the sandbox: it is one argument with spaces in it; give the program and \
         each argument as a word of its own (`k8e sandbox exec SESSION -- ls -la`), or a shell command line to \
         `k8e sandbox run`",
    );

    let missing = k8e_wire::proto::Error {
        code: k8e_wire::proto::ErrorCode::NoProgram.into(),
        message: "x".to_owned(),
    };
    server
        .driver
        .set_script(Some(exec_script(vec![Step::Reply(reply::Reply::Error(
            missing,
        ))])));
    server.create("b").await;
    let code = Command::new(Program::Code {
        language: Language::Python,
        code: "1".into(),
    })
    .unwrap();
    let request = RunRequest {
        target: RunTarget::Existing(sid("b")),
        command: code,
    };
    refused(
        server.sessions.run(&me(), request).await,
        Code::Unsupported,
        "python3 is not in the sandbox's template: install python3",
    );
}

#[tokio::test]
async fn hit_limits_are_reported() {
    let killed = Exited {
        exit_code: 137,
        signal: 9,
        ..Exited::default()
    };
    let exited = Exited {
        exit_code: 1,
        ..Exited::default()
    };
    for (exited, events, status, limits) in [
        (
            killed,
            LimitEvents {
                oom_kills: 1,
                pids_refused: 0,
            },
            RunStatus::OomKilled,
            vec![LimitKind::Memory],
        ),
        (
            exited,
            LimitEvents {
                oom_kills: 0,
                pids_refused: 3,
            },
            RunStatus::Completed,
            vec![LimitKind::Pids],
        ),
        // A limit that the sandbox's own kernel enforces, which only the guest can report.
        (
            Exited {
                pids_limit_reached: true,
                ..exited
            },
            LimitEvents::default(),
            RunStatus::Completed,
            vec![LimitKind::Pids],
        ),
    ] {
        let script: Script = Arc::new(move |call: &request::Call| match call {
            request::Call::Exec(_) => Some(vec![
                started(),
                Step::Reply(reply::Reply::Stdout(Bytes::from_static(b"x"))),
                Step::Pause(Duration::from_millis(100)),
                Step::Reply(reply::Reply::Exited(exited)),
            ]),
            _ => None,
        });
        let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
        let view = server.create("a").await;
        let run = start(&server, sh("true")).await.unwrap();
        server
            .driver
            .set_limit_events(&view.session.sandbox, events);
        let (_, outcome) = finish(run).await.unwrap();
        assert_eq!((outcome.status, outcome.limits_hit), (status, limits));
        assert_eq!(
            server
                .sessions
                .get(&me(), &sid("a"))
                .await
                .unwrap()
                .limit_events,
            events
        );
    }
}

#[tokio::test]
async fn too_many_runs_in_one_session_are_refused() {
    let config = Config {
        runs_per_session_max: 2,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server.create("a").await;
    let first = start(&server, sh("sleep 600")).await.unwrap();
    let _second = start(&server, sh("sleep 600")).await.unwrap();
    refused(
        start(&server, sh("true")).await,
        Code::Exhausted,
        "2 commands under way",
    );
    drop(first);
    finish(start(&server, sh("true")).await.unwrap())
        .await
        .unwrap();
}

#[tokio::test]
async fn destroying_a_session_ends_its_runs() {
    let server = Server::start().await;
    server.create("a").await;
    let run = start(&server, sh("sleep 600")).await.unwrap();
    let (who, id) = (me(), sid("a"));
    let (ended, destroyed) = tokio::join!(finish(run), server.sessions.destroy(&who, &id));
    destroyed.unwrap();
    refused(
        ended,
        Code::Unavailable,
        "session a not found: it ended meanwhile (",
    );
}

#[tokio::test]
async fn a_sandbox_that_dies_ends_its_runs_with_the_reason() {
    let server = Server::start().await;
    let view = server.create("a").await;
    let run = start(&server, sh("sleep 600")).await.unwrap();
    server.driver.kill(&view.session.sandbox);
    refused(finish(run).await, Code::Unavailable, "the sandbox died");
}

#[tokio::test]
async fn a_next_that_is_dropped_loses_nothing() {
    let server = Server::start().await;
    server.create("a").await;
    let mut run = start(
        &server,
        sh("for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.01; done"),
    )
    .await
    .unwrap();
    let mut output = Vec::new();
    loop {
        let Ok(event) = tokio::time::timeout(Duration::from_millis(1), run.next()).await else {
            continue;
        };
        match event.unwrap().unwrap() {
            RunEvent::Stdout(data) => output.extend_from_slice(&data),
            RunEvent::Exited(_) => break,
            RunEvent::Started { .. } | RunEvent::Stderr(_) => {}
        }
    }
    assert_eq!(output, b"1\n2\n3\n4\n5\n6\n7\n8\n9\n");
    assert_eq!(
        server
            .sessions
            .transcript(&me(), &sid("a"), 0, 0)
            .await
            .unwrap()
            .output,
        output
    );
}
