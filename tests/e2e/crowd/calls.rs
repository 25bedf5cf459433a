//! One client: a session of its own, and every call there is, in no order.

use super::Times;
use k8e_api::client::{Client, Endpoint};
use k8e_api::status::retry_after;
use k8e_api::v1;
use std::time::{Duration, Instant};
use tonic::{Code, Response, Status};

/// Nobody waits longer for anything, with two hundred others on two CPUs.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

pub(super) struct Caller {
    pub(super) client: Client,
    pub(super) session: String,
    dice: u64,
    times: Times,
}

type Answer<T> = Result<Response<T>, Status>;

impl Caller {
    pub(super) async fn connect(endpoint: &Endpoint, seed: u64, times: Times) -> Self {
        let client = Client::connect(endpoint).await.unwrap();
        let mut caller = Self {
            client,
            session: String::new(),
            dice: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15),
            times,
        };
        caller.renew().await;
        caller
    }

    /// One thing that somebody might do.
    pub(super) async fn call(&mut self) {
        match self.roll(19) {
            0..=2 => self.run().await,
            3 => self.python().await,
            4 => self.file().await,
            5 => self.directory().await,
            6 => self.look().await,
            7 => self.ask().await,
            8 => self.background().await,
            9 => self.cancel().await,
            10 | 11 => self.terminal().await,
            12 => self.hosts().await,
            13 => self.pausing().await,
            14 => self.sub_agent().await,
            15 => self.approval().await,
            16 => self.snapshot().await,
            17 => self.exposure().await,
            // Making one takes as long as hundreds of the others.
            _ if self.roll(10) > 0 => self.look().await,
            _ => {
                self.leave().await;
                self.renew().await;
            }
        }
    }

    pub(super) async fn leave(&mut self) {
        let session_id = std::mem::take(&mut self.session);
        let mut client = self.client.clone();
        let request = v1::DestroySessionRequest { session_id };
        self.time("DestroySession", client.destroy_session(request))
            .await;
    }

    async fn renew(&mut self) {
        let mut client = self.client.clone();
        loop {
            let request = v1::CreateSessionRequest::default();
            let made = self.try_time("CreateSession", client.create_session(request));
            if let Some(made) = made.await {
                self.session = made.session_id;
                return;
            }
        }
    }

    pub(super) async fn run(&mut self) {
        let n = self.roll(1000);
        let said = self.ran(v1::run_start::Program::Argv(v1::Argv {
            args: vec!["echo".into(), n.to_string().into()],
        }));
        assert_eq!(said.await, (format!("{n}\n").into_bytes(), 0));
    }

    async fn python(&mut self) {
        let said = self.ran(v1::run_start::Program::Code(v1::Code {
            language: "python".to_owned(),
            code: "import sys; print(6 * 7); sys.exit(3)".into(),
        }));
        assert_eq!(said.await, (b"42\n".to_vec(), 3));
    }

    async fn ran(&mut self, program: v1::run_start::Program) -> (Vec<u8>, i32) {
        use v1::run_event::Event;
        let start = v1::RunStart {
            session_id: self.session.clone(),
            program: Some(program),
            timeout_ms: 100_000,
            ..v1::RunStart::default()
        };
        let mut client = self.client.clone();
        self.time("Run", async {
            let start = v1::run_request::Message::Start(start);
            let request = v1::RunRequest {
                message: Some(start),
            };
            let events = client.run(tokio_stream::once(request)).await?;
            let (mut events, mut said) = (events.into_inner(), Vec::new());
            while let Some(event) = events.message().await? {
                match event.event.unwrap() {
                    Event::Stdout(bytes) => said.extend(bytes),
                    Event::Exited(exited) => return Ok(Response::new((said, exited.exit_code))),
                    Event::Started(_) | Event::Stderr(_) => {}
                }
            }
            Err(Status::internal("a run without an end"))
        })
        .await
    }

    async fn file(&mut self) {
        use v1::write_file_request::Message;
        let bytes: Vec<u8> = vec![b'x'; usize::try_from(self.roll(100_000)).unwrap()];
        let path: bytes::Bytes = format!("file-{}", self.roll(5)).into();
        let start = Message::Start(v1::WriteFileStart {
            session_id: self.session.clone(),
            path: path.clone(),
            ..v1::WriteFileStart::default()
        });
        let data = Message::Data(bytes.clone().into());
        let messages = [start, data].map(|message| v1::WriteFileRequest {
            message: Some(message),
        });
        let mut client = self.client.clone();
        let wrote = client.write_file(tokio_stream::iter(messages));
        let wrote = self.time("WriteFile", wrote).await;
        assert_eq!(wrote.bytes, bytes.len() as u64);
        let request = v1::ReadFileRequest {
            session_id: self.session.clone(),
            path,
            ..v1::ReadFileRequest::default()
        };
        let mut client = self.client.clone();
        let read = self.time("ReadFile", async {
            let mut pieces = client.read_file(request).await?.into_inner();
            let mut read = Vec::new();
            while let Some(piece) = pieces.message().await? {
                if let Some(v1::read_file_response::Message::Data(data)) = piece.message {
                    read.extend(data);
                }
            }
            Ok(Response::new(read))
        });
        assert_eq!(read.await, bytes);
    }

    async fn directory(&mut self) {
        let session_id = || self.session.clone();
        let mut client = self.client.clone();
        let n = self.dice;
        let (from, to): (bytes::Bytes, bytes::Bytes) =
            (format!("a{n}/b").into(), format!("c{n}").into());
        let make = v1::MakeDirRequest {
            session_id: session_id(),
            path: from.clone(),
            parents: true,
            ..v1::MakeDirRequest::default()
        };
        self.time("MakeDir", client.make_dir(make)).await;
        let mv = v1::MoveFileRequest {
            session_id: session_id(),
            from,
            to: to.clone(),
        };
        self.time("MoveFile", client.move_file(mv)).await;
        let stat = v1::StatFileRequest {
            session_id: session_id(),
            path: to.clone(),
        };
        let info = self.time("StatFile", client.stat_file(stat)).await;
        assert_eq!(info.r#type, "directory");
        let remove = v1::RemoveFileRequest {
            session_id: session_id(),
            path: to,
            recursive: true,
        };
        self.time("RemoveFile", client.remove_file(remove)).await;
        let list = v1::ListFilesRequest {
            session_id: session_id(),
            path: ".".into(),
            recursive: true,
            ..v1::ListFilesRequest::default()
        };
        self.time("ListFiles", async {
            let mut pages = client.list_files(list).await?.into_inner();
            while pages.message().await?.is_some() {}
            Ok(Response::new(()))
        })
        .await;
    }

    async fn look(&mut self) {
        let session_id = || self.session.clone();
        let mut client = self.client.clone();
        let get = v1::GetSessionRequest {
            session_id: session_id(),
        };
        let session = self.time("GetSession", client.get_session(get)).await;
        assert_eq!(session.phase, "active");
        let processes = v1::ListProcessesRequest {
            session_id: session_id(),
        };
        self.time("ListProcesses", client.list_processes(processes))
            .await;
        let transcript = v1::GetTranscriptRequest {
            session_id: session_id(),
            ..v1::GetTranscriptRequest::default()
        };
        self.time("GetTranscript", client.get_transcript(transcript))
            .await;
        let events = v1::GetEventsRequest {
            session_id: session_id(),
            ..v1::GetEventsRequest::default()
        };
        self.time("GetEvents", client.get_events(events)).await;
        let runs = v1::ListRunsRequest {
            session_id: session_id(),
        };
        self.time("ListRuns", client.list_runs(runs)).await;
        let terminals = v1::ListTerminalsRequest {
            session_id: session_id(),
        };
        self.time("ListTerminals", client.list_terminals(terminals))
            .await;
    }

    async fn ask(&mut self) {
        let mut client = self.client.clone();
        let status = client.get_status(v1::GetStatusRequest {});
        self.time("GetStatus", status).await;
        let mut client = self.client.clone();
        let sessions = client.list_sessions(v1::ListSessionsRequest::default());
        self.time("ListSessions", sessions).await;
        let mut client = self.client.clone();
        self.time("GetPools", client.get_pools(v1::GetPoolsRequest {}))
            .await;
    }

    async fn background(&mut self) {
        let Some(started) = self.start("echo done; exit 5").await else {
            return;
        };
        let mut client = self.client.clone();
        let watch = v1::WatchRunRequest {
            run_id: started.run_id.clone(),
        };
        let ended = self.time("WatchRun", async {
            let mut events = client.watch_run(watch).await?.into_inner();
            let mut last = None;
            while let Some(event) = events.message().await? {
                last = event.event;
            }
            Ok(Response::new(last))
        });
        let Some(v1::watch_run_response::Event::Ended(ended)) = ended.await else {
            panic!("a run that was watched has no end");
        };
        assert_eq!((ended.status.as_str(), ended.exit_code), ("completed", 5));
        let mut client = self.client.clone();
        let get = v1::GetRunRequest {
            run_id: started.run_id,
        };
        let run = self.time("GetRun", client.get_run(get)).await;
        assert_eq!(run.stdout, "done\n");
    }

    async fn cancel(&mut self) {
        let Some(started) = self.start("sleep 1000").await else {
            return;
        };
        let mut client = self.client.clone();
        let cancel = v1::CancelRunRequest {
            run_id: started.run_id,
        };
        let run = self.time("CancelRun", client.cancel_run(cancel)).await;
        assert_eq!(run.status, "cancelled");
    }

    /// None when that is a limit.
    async fn start(&mut self, script: &str) -> Option<v1::BackgroundRun> {
        let start = v1::RunStart {
            session_id: self.session.clone(),
            program: Some(v1::run_start::Program::Argv(v1::Argv {
                args: vec!["sh".into(), "-c".into(), script.to_owned().into()],
            })),
            ..v1::RunStart::default()
        };
        let mut client = self.client.clone();
        self.try_time("StartRun", client.start_run(start)).await
    }

    async fn terminal(&mut self) {
        let create = v1::CreateTerminalRequest {
            session_id: self.session.clone(),
            argv: vec!["cat".into()],
            ..v1::CreateTerminalRequest::default()
        };
        let mut client = self.client.clone();
        let made = self.try_time("CreateTerminal", client.create_terminal(create));
        let Some(made) = made.await else {
            return;
        };
        let terminal_id = || made.terminal_id.clone();
        let write = v1::WriteTerminalRequest {
            terminal_id: terminal_id(),
            data: "hello\n".into(),
        };
        self.time("WriteTerminal", client.write_terminal(write))
            .await;
        let resize = v1::ResizeTerminalRequest {
            terminal_id: terminal_id(),
            rows: 50,
            cols: 90,
        };
        self.time("ResizeTerminal", client.resize_terminal(resize))
            .await;
        let attach = v1::AttachTerminalRequest {
            terminal_id: terminal_id(),
        };
        let said = self.time("AttachTerminal", async {
            let mut events = client.attach_terminal(attach).await?.into_inner();
            let mut said = Vec::new();
            // The line as it was typed, and as `cat` says it.
            while said.len() < b"hello\r\nhello\r\n".len() {
                let event = events.message().await?.and_then(|event| event.event);
                let Some(v1::terminal_event::Event::Data(data)) = event else {
                    break;
                };
                said.extend(data);
            }
            Ok(Response::new(said))
        });
        assert_eq!(said.await, b"hello\r\nhello\r\n");
        let mut client = self.client.clone();
        let foreground = v1::TerminalForegroundRequest {
            terminal_id: terminal_id(),
        };
        self.time("TerminalForeground", client.terminal_foreground(foreground))
            .await;
        let signal = v1::SignalTerminalRequest {
            terminal_id: terminal_id(),
            signal: 15,
        };
        self.time("SignalTerminal", client.signal_terminal(signal))
            .await;
        let destroy = v1::DestroyTerminalRequest {
            terminal_id: terminal_id(),
            grace_ms: -1,
        };
        self.time("DestroyTerminal", client.destroy_terminal(destroy))
            .await;
    }

    async fn hosts(&mut self) {
        let mut client = self.client.clone();
        let update = v1::UpdateAllowedHostsRequest {
            session_id: self.session.clone(),
            hosts: vec![format!("h{}.example", self.roll(100))],
        };
        self.time("UpdateAllowedHosts", client.update_allowed_hosts(update))
            .await;
        let watch = v1::WatchEgressRequest {
            session_id: self.session.clone(),
            ..v1::WatchEgressRequest::default()
        };
        let mut client = self.client.clone();
        self.time("WatchEgress", async {
            let mut flows = client.watch_egress(watch).await?.into_inner();
            while flows.message().await?.is_some() {}
            Ok(Response::new(()))
        })
        .await;
    }

    /// A call that must work.
    pub(super) async fn time<T>(
        &self,
        name: &'static str,
        call: impl Future<Output = Answer<T>>,
    ) -> T {
        let answer = self.try_time(name, call).await;
        answer.unwrap_or_else(|| panic!("{name} has no limit that could be reached here"))
    }

    /// A call that may run into a documented limit: none then.
    pub(super) async fn try_time<T>(
        &self,
        name: &'static str,
        call: impl Future<Output = Answer<T>>,
    ) -> Option<T> {
        let since = Instant::now();
        let answer = tokio::time::timeout(CALL_TIMEOUT, call).await;
        let answer = answer.unwrap_or_else(|_| panic!("{name} did not answer in {CALL_TIMEOUT:?}"));
        self.times
            .lock()
            .unwrap()
            .entry(name)
            .or_default()
            .push(since.elapsed());
        match answer {
            Ok(answer) => Some(answer.into_inner()),
            Err(status) if status.code() == Code::ResourceExhausted => {
                let pause = retry_after(&status).unwrap_or(Duration::from_millis(100));
                tokio::time::sleep(pause.min(Duration::from_secs(1))).await;
                None
            }
            Err(status) => panic!("{name}: {status:?}"),
        }
    }

    /// Less than `sides`.
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice % sides
    }
}
