//! sandboxd's gRPC process API (port 9090).

use crate::support::{Runtime, TIMEOUTS, WITHIN, eventually, is_alive};
use proto::process_service_client::ProcessServiceClient;
use proto::start_response::Event;
use proto::write_stdin_request::Payload;
use proto::{
    ExecuteRequest, ExecuteResponse, ProcessConfig, Pty, ResizeTtyRequest, SendSignalRequest,
    Signal, StartRequest, StartResponse, WriteStdinRequest,
};
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

#[expect(unreachable_pub, reason = "generated")]
#[allow(
    dead_code,
    missing_docs,
    reason = "generated; the servers are not used here"
)]
mod proto {
    include!("../../src/gen/process.v1.rs");
}

pub(crate) struct Client(ProcessServiceClient<Channel>);

pub(crate) struct Started {
    pub(crate) id: i32,
    events: Streaming<StartResponse>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// Runs a test with an async runtime of its own and a timeout.
pub(crate) fn test(flags: &[&str], env: &[(&str, &str)], body: impl AsyncFnOnce(&Runtime, Client)) {
    let runtime = Runtime::with(flags, env);
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio.block_on(async {
        let client = Client::connect(&runtime).await;
        tokio::time::timeout(2 * WITHIN, body(&runtime, client))
            .await
            .expect("in time");
    });
}

pub(crate) fn config(command: &[&str]) -> ProcessConfig {
    ProcessConfig {
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        ..ProcessConfig::default()
    }
}

pub(crate) fn sh(script: &str) -> ProcessConfig {
    config(&["/bin/sh", "-c", script])
}

impl Client {
    pub(crate) async fn connect(runtime: &Runtime) -> Self {
        let channel = Channel::from_shared(format!("http://{}", runtime.grpc)).unwrap();
        Self(ProcessServiceClient::new(channel.connect().await.unwrap()))
    }

    pub(crate) async fn execute(
        &mut self,
        config: ProcessConfig,
    ) -> Result<ExecuteResponse, Status> {
        let request = ExecuteRequest {
            config: Some(config),
        };
        self.0
            .execute(request)
            .await
            .map(tonic::Response::into_inner)
    }

    pub(crate) async fn start(
        &mut self,
        config: ProcessConfig,
        pty: Option<Pty>,
    ) -> Result<Started, Status> {
        let request = StartRequest {
            config: Some(config),
            pty,
        };
        let mut events = self.0.start(request).await?.into_inner();
        let first = events.message().await?.unwrap().event.unwrap();
        let Event::Init(init) = first else {
            panic!("{first:?}")
        };
        let (stdout, stderr) = (Vec::new(), Vec::new());
        Ok(Started {
            id: init.process_id,
            events,
            stdout,
            stderr,
        })
    }

    async fn write(&mut self, process_id: i32, payload: Payload) -> Result<(), Status> {
        let payload = Some(payload);
        self.0
            .write_stdin(WriteStdinRequest {
                process_id,
                payload,
            })
            .await
            .map(drop)
    }

    pub(crate) async fn signal(&mut self, process_id: i32, signal: Signal) -> Result<(), Status> {
        let signal = signal.into();
        self.0
            .send_signal(SendSignalRequest { process_id, signal })
            .await
            .map(drop)
    }

    async fn resize(&mut self, process_id: i32, cols: u32, rows: u32) -> Result<(), Status> {
        self.0
            .resize_tty(ResizeTtyRequest {
                process_id,
                cols,
                rows,
            })
            .await
            .map(drop)
    }
}

impl Started {
    /// Receives and stores the next event; returns the exit code if it is the last.
    async fn next(&mut self) -> Option<i32> {
        match self.events.message().await.unwrap().unwrap().event.unwrap() {
            Event::Stdout(data) => self.stdout.extend_from_slice(&data),
            Event::Stderr(data) => self.stderr.extend_from_slice(&data),
            Event::Exit(exit) => return Some(exit.exit_code),
            Event::Init(init) => panic!("{init:?}"),
        }
        None
    }

    /// Reads until stdout contains this.
    pub(crate) async fn says(&mut self, text: &str) {
        while !self.text().contains(text) {
            assert_eq!(self.next().await, None, "ended: {}", self.text());
        }
    }

    pub(crate) async fn exit(&mut self) -> i32 {
        loop {
            if let Some(code) = self.next().await {
                assert!(self.events.message().await.unwrap().is_none());
                return code;
            }
        }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

#[track_caller]
fn code<T>(result: Result<T, Status>) -> Code {
    match result {
        Ok(_) => Code::Ok,
        Err(status) => {
            assert!(!status.message().is_empty());
            status.code()
        }
    }
}

#[test]
fn execute_returns_output_and_exit_code() {
    test(
        &[],
        &[("SANDBOX_COLOUR", "blue")],
        async |runtime, mut client| {
            let mut wanted = sh("pwd; echo $SANDBOX_COLOUR $MORE; cat; echo oops >&2; exit 3");
            wanted
                .env_vars
                .insert("MORE".to_owned(), "than that".to_owned());
            let said = client.execute(wanted.clone()).await.unwrap();
            let root = runtime.root().canonicalize().unwrap();
            let stdout = format!("{}\nblue than that\n", root.display());
            assert_eq!(String::from_utf8_lossy(&said.stdout), stdout);
            assert_eq!((&said.stderr[..], said.exit_code), (&b"oops\n"[..], 3));

            std::fs::create_dir_all(root.join("a/b")).unwrap();
            std::os::unix::fs::symlink("a/b", root.join("link")).unwrap();
            for (cwd, pwd) in [("a", "a"), ("/a/b/..", "a"), ("link", "a/b"), ("", "")] {
                wanted.cwd = Some(cwd.to_owned());
                let said = client.execute(wanted.clone()).await.unwrap();
                let first = String::from_utf8_lossy(&said.stdout)
                    .lines()
                    .next()
                    .unwrap()
                    .to_owned();
                assert_eq!(
                    first,
                    root.join(pwd).display().to_string().trim_end_matches('/'),
                    "{cwd}"
                );
            }
            let said = client.execute(sh("kill -TERM $$")).await.unwrap();
            assert_eq!(said.exit_code, 143);
        },
    );
}

#[test]
fn commands_that_cannot_start_have_a_status_code() {
    test(&[], &[], async |runtime, mut client| {
        std::fs::write(runtime.root().join("file"), "").unwrap();
        std::os::unix::fs::symlink("/etc", runtime.root().join("out")).unwrap();
        let mut in_dir = async |cwd: &str| {
            let cwd = Some(cwd.to_owned());
            code(client.execute(ProcessConfig { cwd, ..sh("true") }).await)
        };
        assert_eq!(in_dir("..").await, Code::PermissionDenied);
        assert_eq!(in_dir("out").await, Code::PermissionDenied);
        assert_eq!(in_dir("none").await, Code::NotFound);
        assert_eq!(in_dir("file").await, Code::InvalidArgument);
        assert_eq!(
            code(client.execute(config(&[])).await),
            Code::InvalidArgument
        );
        assert_eq!(
            code(client.execute(config(&["no-such-program"])).await),
            Code::NotFound
        );
        assert_eq!(
            code(client.execute(config(&["/etc/passwd"])).await),
            Code::PermissionDenied
        );
        let mut odd = sh("true");
        odd.env_vars.insert("A=B".to_owned(), String::new());
        assert_eq!(code(client.execute(odd).await), Code::InvalidArgument);
        assert_eq!(
            code(client.0.execute(ExecuteRequest::default()).await),
            Code::InvalidArgument
        );
        assert_eq!(
            code(client.start(config(&["no-such-program"]), None).await),
            Code::NotFound
        );
        let pty = Some(Pty::default());
        assert_eq!(
            code(client.start(config(&["no-such-program"]), pty).await),
            Code::NotFound
        );
        assert_eq!(
            code(client.signal(4711, Signal::Sigint).await),
            Code::NotFound
        );
        assert_eq!(
            code(client.write(4711, Payload::Eof(())).await),
            Code::NotFound
        );
        assert_eq!(code(client.resize(4711, 1, 1).await), Code::NotFound);
    });
}

#[test]
fn a_deadline_kills_the_command_with_all_descendants() {
    test(&[], &[], async |runtime, mut client| {
        let script = "setsid sleep 1000 & echo $! > pid.tmp; mv pid.tmp pid; sleep 1000";
        // On a busy machine the deadline may pass before the command has started.
        let mut pid = None;
        for timeout in TIMEOUTS {
            let config = Some(sh(script));
            let mut request = tonic::Request::new(ExecuteRequest { config });
            request.set_timeout(timeout);
            // The client may notice the deadline before the server.
            let ended = code(client.0.execute(request).await);
            assert!(
                [Code::DeadlineExceeded, Code::Cancelled].contains(&ended),
                "{ended:?}"
            );
            pid = std::fs::read_to_string(runtime.root().join("pid")).ok();
            if pid.is_some() {
                break;
            }
        }
        let pid = pid.expect("it begins in time");
        eventually("it ends", || !is_alive(&pid)).await;
    });
}

#[test]
fn output_is_streamed_in_small_events_and_stdin_written() {
    let flags = ["-stream-chunk-size=100"];
    test(&flags, &[], async |runtime, mut client| {
        // The command waits for a signal: until then there is a process whose stdin was closed.
        let script = "echo ready; cat; until test -e go; do sleep 0.05; done; echo bye >&2";
        let mut cat = client.start(sh(script), None).await.unwrap();
        cat.says("ready\n").await;
        let text = b"0123456789".repeat(1000);
        client
            .write(cat.id, Payload::Input(text.clone().into()))
            .await
            .unwrap();
        client
            .write(cat.id, Payload::Input(b"end\n".to_vec().into()))
            .await
            .unwrap();
        cat.says("end\n").await;
        assert!(cat.stdout == [b"ready\n", &text[..], b"end\n"].concat());
        assert_eq!(
            code(client.resize(cat.id, 80, 24).await),
            Code::FailedPrecondition
        );
        let unspecified = client.signal(cat.id, Signal::Unspecified).await;
        assert_eq!(code(unspecified), Code::InvalidArgument);
        client.write(cat.id, Payload::Eof(())).await.unwrap();
        client.write(cat.id, Payload::Eof(())).await.unwrap();
        let late = client
            .write(cat.id, Payload::Input(b"x".to_vec().into()))
            .await;
        assert_eq!(code(late), Code::FailedPrecondition);
        std::fs::write(runtime.root().join("go"), "").unwrap();
        assert_eq!(cat.exit().await, 0);
        assert_eq!(cat.stderr, b"bye\n");
        assert_eq!(
            code(client.write(cat.id, Payload::Eof(())).await),
            Code::NotFound
        );
        let events = client
            .start(sh("head -c 1000 /dev/zero"), None)
            .await
            .unwrap()
            .events;
        let sizes = sizes(events).await;
        assert!(
            sizes.len() >= 10 && sizes.iter().all(|size| *size <= 100),
            "{sizes:?}"
        );
    });
}

async fn sizes(mut events: Streaming<StartResponse>) -> Vec<usize> {
    let mut sizes = Vec::new();
    while let Some(StartResponse { event: Some(event) }) = events.message().await.unwrap() {
        if let Event::Stdout(data) = event {
            sizes.push(data.len());
        }
    }
    sizes
}

#[test]
fn backpressure_stops_the_command_and_not_the_runtime() {
    test(&[], &[], async |_, mut client| {
        let wanted = sh("head -c 30000000 /dev/zero; echo done >&2");
        let mut much = client.start(wanted, None).await.unwrap();
        for _ in 0..20 {
            assert_eq!(client.execute(sh("echo x")).await.unwrap().exit_code, 0);
        }
        // The command did not continue meanwhile, and no output is lost.
        assert_eq!(much.exit().await, 0);
        assert_eq!(much.stdout.len(), 30_000_000);
    });
}

#[test]
fn stdin_writes_wait_for_the_command_and_can_be_cancelled() {
    test(&[], &[], async |_, mut client| {
        let mut deaf = client
            .start(sh("echo $$; exec sleep 1000"), None)
            .await
            .unwrap();
        deaf.says("\n").await;
        let chunk = vec![b'x'; 1024 * 1024];
        let mut stuck = false;
        for _ in 0..10 {
            let write = client.write(deaf.id, Payload::Input(chunk.clone().into()));
            stuck |= tokio::time::timeout(Duration::from_secs(1), write)
                .await
                .is_err();
            if stuck {
                break;
            }
        }
        assert!(stuck);
        client.signal(deaf.id, Signal::Sigterm).await.unwrap();
        assert_eq!(deaf.exit().await, 143);
    });
}

#[test]
fn signals_reach_the_process_group() {
    test(&[], &[], async |_, mut client| {
        for (signal, exit_code) in [(Signal::Sigterm, 143), (Signal::Sigkill, 137)] {
            let mut group = client
                .start(sh("sleep 1000 & echo $!; wait"), None)
                .await
                .unwrap();
            group.says("\n").await;
            client.signal(group.id, signal).await.unwrap();
            assert_eq!(group.exit().await, exit_code, "{signal:?}");
            let child = group.text();
            eventually("the child ends", || !is_alive(&child)).await;
        }
        let trap = "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.05; done";
        let mut trap = client.start(sh(trap), None).await.unwrap();
        trap.says("ready").await;
        client.signal(trap.id, Signal::Sigint).await.unwrap();
        assert_eq!(trap.exit().await, 7);
        assert!(trap.text().contains("caught"));
    });
}

#[test]
fn the_end_of_a_stream_kills_all_descendants() {
    test(&[], &[], async |_, mut client| {
        for pty in [None, Some(Pty::default())] {
            let script = "setsid sleep 1000 & echo $!; echo $$; sleep 1000";
            let mut started = client.start(sh(script), pty).await.unwrap();
            while started.text().lines().count() < 2 || !started.text().ends_with('\n') {
                assert_eq!(started.next().await, None);
            }
            let (id, text) = (started.id, started.text());
            assert!(text.lines().all(is_alive), "{text}");
            drop(started);
            eventually("all of it ends", || !text.lines().any(is_alive)).await;
            let gone = client.signal(id, Signal::Sigint).await;
            assert_eq!(
                gone.as_ref().unwrap_err().code(),
                Code::NotFound,
                "{gone:?}"
            );
        }
    });
}

#[test]
fn a_pty_is_a_terminal_with_a_size() {
    test(&[], &[], async |_, mut client| {
        let pty = Some(Pty {
            cols: 101,
            rows: 33,
        });
        let script = "test -t 0 && test -t 2 && stty size; read line; echo got $line; stty size; cat; exit 5";
        let mut shell = client.start(sh(script), pty).await.unwrap();
        shell.says("33 101").await;
        client.resize(shell.id, 55, 22).await.unwrap();
        client
            .write(shell.id, Payload::Input(b"hello\n".to_vec().into()))
            .await
            .unwrap();
        shell.says("got hello").await;
        shell.says("22 55").await;
        client.write(shell.id, Payload::Eof(())).await.unwrap();
        assert_eq!(shell.exit().await, 5);
        assert!(shell.stderr.is_empty());

        // With a trap: a shell between two commands may ignore an interrupt.
        let script = "trap 'exit 6' INT; echo ready; while :; do sleep 0.05; done";
        let pty = Some(Pty::default());
        let mut interrupted = client.start(sh(script), pty).await.unwrap();
        interrupted.says("ready").await;
        let ctrl_c = Payload::Input(b"\x03".to_vec().into());
        client.write(interrupted.id, ctrl_c).await.unwrap();
        assert_eq!(interrupted.exit().await, 6);

        let mut killed = client
            .start(sh("echo ready; sleep 1000"), Some(Pty::default()))
            .await
            .unwrap();
        killed.says("ready").await;
        client.signal(killed.id, Signal::Sigkill).await.unwrap();
        assert_eq!(killed.exit().await, 137);
    });
}

#[test]
fn terminal_output_is_complete_with_backpressure() {
    test(&[], &[], async |_, mut client| {
        // Much more than the guest buffers of a terminal, most of it before it is read.
        let script = "stty raw; head -c 3000000 /dev/zero | tr '\\0' x; echo end";
        let mut much = client
            .start(sh(script), Some(Pty::default()))
            .await
            .unwrap();
        // Longer than the read timeout of other terminals; the command cannot have continued.
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert_eq!(much.exit().await, 0);
        let count = much.stdout.iter().filter(|byte| **byte == b'x').count();
        assert_eq!(count, 3_000_000);
        assert!(much.text().contains("end"));
    });
}

#[test]
fn an_execute_response_fits_the_default_message_limit() {
    test(&[], &[], async |_, mut client| {
        let said = client
            .execute(sh("head -c 3500000 /dev/zero"))
            .await
            .unwrap();
        assert_eq!((said.stdout.len(), said.stderr.len()), (3_500_000, 0));
        let both = "head -c 9000000 /dev/zero; head -c 9000000 /dev/zero >&2; exit 2";
        let said = client.execute(sh(both)).await.unwrap();
        assert_eq!(said.exit_code, 2);
        let told = String::from_utf8_lossy(&said.stderr);
        assert!(told.contains("stdout was cut") && told.contains("of 9000000 bytes"));
        assert!(said.stdout.len() > 3_000_000);
    });
}

#[test]
fn the_runtime_works_without_privileges() {
    let runtime = Runtime::as_nobody(&[]);
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio.block_on(async {
        let mut client = Client::connect(&runtime).await;
        let said = client
            .execute(sh("id -u; id -g; echo $USER"))
            .await
            .unwrap();
        assert_eq!(said.stdout, "65534\n65534\nnobody\n", "{said:?}");
        let pty = Some(Pty::default());
        let mut shell = client
            .start(sh("test -t 0 && echo fine"), pty)
            .await
            .unwrap();
        assert_eq!(shell.exit().await, 0);
        assert!(shell.text().contains("fine"));
    });
    assert_eq!(runtime.rest("PUT", "/v1/files/x", b"y").status, 204);
}
