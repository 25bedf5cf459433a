//! Clients that go away in the middle, fifty at once.

use super::{Api, argv, eventually, processes};
use k8e_api::client::Client;
use k8e_api::v1;
use k8e_e2e::Server;
use rustix::process::Signal;
use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const CLIENTS: usize = 50;
const SETTLES_WITHIN: Duration = Duration::from_secs(15);

/// Has `work` done by fifty clients, each on a connection of its own. What it returns is kept until
/// all connections have broken.
fn fifty<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    server: &Server,
    work: impl Fn(usize, Client) -> F,
) {
    let api = Api::of(server);
    let kept = api.runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for i in 0..CLIENTS {
            let client = Client::connect(&api.endpoint).await.expect("a connection");
            tasks.spawn(work(i, client));
        }
        tasks.join_all().await
    });
    drop(api);
    drop(kept);
}

#[test]
fn during_the_output_of_a_run() {
    let server = Server::start();
    let session = server.session_with(&["--pids", "1000"]);
    fifty(&server, |_, mut client| {
        let request = tokio_stream::iter([argv(&session.id, &["yes"])]);
        async move {
            let mut events = client.run(request).await.expect("it runs").into_inner();
            for _ in 0..5 {
                events.message().await.expect("output");
            }
        }
    });
    nothing_runs(&server, &session.id);
}

#[test]
fn before_a_run_says_anything() {
    let server = Server::start();
    let session = server.session_with(&["--pids", "1000"]);
    fifty(&server, |i, mut client| {
        let script = "sleep 300 & setsid sleep 300 & sleep 300";
        let request = tokio_stream::iter([argv(&session.id, &["sh", "-c", script])]);
        async move {
            let run = client.run(request);
            let wait = Duration::from_millis(2 * i as u64);
            let _ = tokio::time::timeout(wait, run).await;
        }
    });
    nothing_runs(&server, &session.id);
}

#[test]
fn during_an_upload() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("echo old > file-0").code, 0);
    fifty(&server, |i, mut client| {
        let (sender, receiver) = mpsc::channel(4);
        let start = v1::WriteFileStart {
            session_id: session.id.clone(),
            path: format!("file-{i}").into(),
            ..Default::default()
        };
        async move {
            let call = client.write_file(ReceiverStream::new(receiver));
            let feed = async {
                let send = async |message| {
                    let message = Some(message);
                    sender
                        .send(v1::WriteFileRequest { message })
                        .await
                        .expect("the call goes on");
                };
                send(v1::write_file_request::Message::Start(start)).await;
                for _ in 0..20 {
                    send(v1::write_file_request::Message::Data(
                        vec![7; 64 << 10].into(),
                    ))
                    .await;
                }
            };
            tokio::select! {
                answer = call => panic!("it is not over: {answer:?}"),
                // The stream is still open: the call is dropped unfinished.
                () = feed => {}
            }
            // Dropped here it would end the stream in order, and so the file would be there.
            sender
        }
    });
    eventually("temporary files are gone", SETTLES_WITHIN, || {
        session.sh("ls -A").out() == "file-0\n"
    });
    assert_eq!(
        session.sh("cat file-0").out(),
        "old\n",
        "the old file stays"
    );
    nothing_runs(&server, &session.id);
}

#[test]
fn the_command_line_during_an_upload() {
    let server = Server::start();
    let session = server.session();
    for signal in [Signal::INT, Signal::KILL, Signal::TERM] {
        let mut client = server
            .command(&["sandbox", "write", &session.id, "file"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        // More than the pipe holds: some of it is on its way when this returns.
        let mut stdin = client.stdin.take().unwrap();
        stdin.write_all(&[7; 4 << 20]).unwrap();
        let pid = rustix::process::Pid::from_child(&client);
        rustix::process::kill_process(pid, signal).unwrap();
        assert!(!client.wait().unwrap().success());
    }
    eventually("temporary files are gone", SETTLES_WITHIN, || {
        session.sh("ls -A").out().is_empty()
    });
    nothing_runs(&server, &session.id);
}

#[test]
fn during_a_download() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("head -c 100000000 /dev/zero > big").code, 0);
    fifty(&server, |_, mut client| {
        let request = v1::ReadFileRequest {
            session_id: session.id.clone(),
            path: "big".into(),
            ..Default::default()
        };
        async move {
            let mut messages = client
                .read_file(request)
                .await
                .expect("it reads")
                .into_inner();
            for _ in 0..3 {
                messages.message().await.expect("data");
            }
        }
    });
    nothing_runs(&server, &session.id);
    let read = server.k8e(&["sandbox", "read", "--raw", &session.id, "big"]);
    assert_eq!(read.stdout.len(), 100_000_000, "{}", read.err());
}

#[test]
fn during_a_create() {
    let server = Server::start();
    fifty(&server, |i, mut client| async move {
        let create = client.create_session(v1::CreateSessionRequest::default());
        let wait = Duration::from_millis(4 * i as u64);
        let _ = tokio::time::timeout(wait, create).await;
    });
    // Those that were finished before their client left are listed; of the rest nothing is there.
    eventually("creates settle", SETTLES_WITHIN, || {
        let creating = server
            .k8e(&["sandbox", "sessions", "--phase", "creating"])
            .json();
        creating["sessions"].as_array().is_some_and(Vec::is_empty)
    });
    let directories = || {
        let traces = server.traces();
        traces
            .iter()
            .filter(|trace| trace.starts_with("directory"))
            .count()
    };
    eventually(
        "nothing but what is listed is there",
        SETTLES_WITHIN,
        || directories() == server.session_ids().len(),
    );
    server.assert_traces(server.session_ids().len());
    for id in server.session_ids() {
        assert_eq!(server.k8e(&["sandbox", "destroy", &id]).code, 0);
    }
    server.assert_traces(0);
    assert_eq!(server.session().sh("echo fine").out(), "fine\n");
}

/// Everything that was started has ended, and the session answers.
fn nothing_runs(server: &Server, id: &str) {
    eventually("no process is left", SETTLES_WITHIN, || {
        processes(server, id).is_empty()
    });
    let ran = server.k8e(&["sandbox", "run", "--raw", "--session-id", id, "echo fine"]);
    assert_eq!(ran.out(), "fine\n", "{}", ran.all());
    server.assert_traces(1);
}
