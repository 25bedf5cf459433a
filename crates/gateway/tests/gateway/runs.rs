//! Calls through a door to a guest and back.

use crate::server::{SOON, TestServer};
use k8e_api::v1::{self, run_event::Event, run_request::Message, run_start::Program};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

fn bash(code: &str) -> v1::RunStart {
    let code = v1::Code {
        language: "bash".into(),
        code: code.to_owned().into(),
    };
    // Guests of tests run on this machine, where there is no workspace.
    v1::RunStart {
        program: Some(Program::Code(code)),
        cwd: "/".into(),
        ..Default::default()
    }
}

fn message(message: Message) -> v1::RunRequest {
    v1::RunRequest {
        message: Some(message),
    }
}

struct Ran {
    started: v1::RunStarted,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    exited: v1::RunExited,
}

async fn collect(mut events: tonic::Streaming<v1::RunEvent>) -> Result<Ran, tonic::Status> {
    let (mut started, mut stdout, mut stderr) = (None, Vec::new(), Vec::new());
    while let Some(event) = events.message().await? {
        match event.event.unwrap() {
            Event::Started(event) => started = Some(event),
            Event::Stdout(bytes) => stdout.extend_from_slice(&bytes),
            Event::Stderr(bytes) => stderr.extend_from_slice(&bytes),
            Event::Exited(exited) => {
                return Ok(Ran {
                    started: started.unwrap(),
                    stdout,
                    stderr,
                    exited,
                });
            }
        }
    }
    panic!("a run ended without saying how");
}

#[tokio::test(flavor = "multi_thread")]
async fn output_input_and_the_exit_code_come_through() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let start = v1::RunStart {
        stdin: true,
        ..bash("cat; echo err >&2; exit 3")
    };
    let (sender, receiver) = mpsc::channel(4);
    sender.send(message(Message::Start(start))).await.unwrap();
    sender
        .send(message(Message::Stdin(b"\xff\x00in"[..].into())))
        .await
        .unwrap();
    // The end of the stream is the end of input.
    drop(sender);
    let events = client
        .run(ReceiverStream::new(receiver))
        .await
        .unwrap()
        .into_inner();
    let ran = tokio::time::timeout(SOON, collect(events))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(ran.stdout, b"\xff\x00in");
    assert_eq!(ran.stderr, b"err\n");
    assert_eq!(ran.exited.exit_code, 3);
    assert!(ran.started.session_created);

    // The tenant's session is used again.
    let again = client
        .run(tokio_stream::once(message(Message::Start(bash("true")))))
        .await;
    let again = collect(again.unwrap().into_inner()).await.unwrap();
    assert_eq!(again.started.session_id, ran.started.session_id);
    assert!(!again.started.session_created);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_ends_its_command() {
    let server = TestServer::start().await;
    let dir = tempfile::tempdir().unwrap();
    let pid_file = dir.path().join("pid");
    // Written whole, and only then there.
    let code = format!(
        "echo $$ > {0}.new; mv {0}.new {0}; exec sleep 1000",
        pid_file.display()
    );
    let mut client = server.local().await;
    let start = message(Message::Start(bash(&code)));
    let events = client
        .run(tokio_stream::once(start))
        .await
        .unwrap()
        .into_inner();
    becomes("the command starts", || pid_file.exists()).await;
    let pid = std::fs::read_to_string(&pid_file).unwrap();
    let process = std::path::Path::new("/proc").join(pid.trim());
    assert!(process.exists(), "it runs until its client goes away");
    drop(events);
    drop(client);
    becomes("the command ends", || !process.exists()).await;
}

/// Waits for a condition.
async fn becomes(what: &str, condition: impl Fn() -> bool) {
    let waited = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, waited).await.expect(what);
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_requests_are_refused_in_words() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let session = v1::CreateSessionRequest::default();
    let session_id = client
        .create_session(session)
        .await
        .unwrap()
        .into_inner()
        .session_id;
    let fresh = v1::RunStart {
        fresh: true,
        session_id,
        ..bash("true")
    };
    let unannounced = [
        message(Message::Start(bash("sleep 5"))),
        message(Message::Stdin("x".into())),
    ];
    let twice = [
        message(Message::Start(bash("sleep 5"))),
        message(Message::Start(bash("true"))),
    ];
    let cases: [(Vec<v1::RunRequest>, &str); 6] = [
        (vec![], "first message"),
        (vec![message(Message::StdinEnd(true))], "first message"),
        (
            vec![message(Message::Start(v1::RunStart::default()))],
            "nothing to run",
        ),
        (vec![message(Message::Start(fresh))], "do not name one"),
        (unannounced.into(), "started without"),
        (twice.into(), "once"),
    ];
    for (messages, want) in cases {
        let status = match client.run(tokio_stream::iter(messages)).await {
            Ok(events) => collect(events.into_inner()).await.err().unwrap(),
            Err(status) => status,
        };
        assert_eq!(status.code(), Code::InvalidArgument, "{want}: {status}");
        assert!(status.message().contains(want), "{want}: {status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_too_large_is_refused_in_words() {
    let server = TestServer::start().await;
    let channel =
        tonic::transport::Endpoint::from_shared(format!("unix://{}", server.socket().display()));
    let channel = channel.unwrap().connect().await.unwrap();
    // Without the client's own limit.
    let mut client = v1::sandboxes_client::SandboxesClient::new(channel);
    let start = bash(&"x".repeat(21 * 1024 * 1024));
    let status = client
        .run(tokio_stream::once(message(Message::Start(start))))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("larger than"), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_told() {
    let server = TestServer::start().await;
    let channel =
        tonic::transport::Endpoint::from_shared(format!("unix://{}", server.socket().display()));
    let channel = channel.unwrap().connect().await.unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let service = "k8e.v1.Sandboxes".to_owned();
    let answer = health
        .check(tonic_health::pb::HealthCheckRequest { service })
        .await
        .unwrap();
    let serving = tonic_health::pb::health_check_response::ServingStatus::Serving;
    assert_eq!(answer.into_inner().status, i32::from(serving));
}
