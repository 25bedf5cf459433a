//! The `Run` stream, shared by `run` and `exec`: flags, standard input, output events, result.

use super::ended::{self, Asked};
use crate::failure::{EXIT_REQUEST, Failure};
use crate::output::{self, Raw};
use crate::render::Text;
use crate::units::{self, Span};
use clap::Args;
use k8e_api::CHUNK_BYTES;
use k8e_api::client::Client;
use k8e_api::v1::{self, run_event::Event, run_request::Message};
use serde::Serialize;
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Queue of standard input messages: enough to keep the connection busy.
const INPUT_QUEUE_MAX: usize = 4;

/// Flags of a command.
#[derive(Args, Debug)]
pub(crate) struct CommandArgs {
    /// Stream the output as bytes instead of printing JSON at the end
    #[arg(long)]
    raw: bool,

    /// Timeout, after which the command is killed: seconds, or 90s, 10m, never [default: the server's, 30s unless
    /// configured]
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    timeout: Option<Span>,

    /// Environment variable of the command; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    env: Vec<(String, String)>,

    /// Working directory in the sandbox [default: /workspace]
    #[arg(long, value_name = "DIR")]
    workdir: Option<String>,

    /// User in the sandbox that it runs as [default: root]
    #[arg(long, value_name = "USER")]
    user: Option<String>,

    /// Forward standard input to the command
    #[arg(long)]
    stdin: bool,

    /// Largest output in JSON, for standard output and standard error each; the rest is cut, 0 for no limit
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = units::size)]
    max_output: u64,
}

/// A validated run request, and how to print its output.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) start: v1::RunStart,
    /// Language of the code, for the JSON output; `None` for a program.
    pub(crate) language: Option<&'static str>,
    raw: bool,
}

/// Runs it and returns the exit code of the command.
pub(crate) async fn drive(mut client: Client, request: Request) -> Result<u8, Failure> {
    let Request {
        start,
        language,
        raw,
    } = request;
    let stdin = start.stdin;
    let asked = Asked {
        timeout_ms: start.timeout_ms,
        fresh: start.fresh,
        allowed_hosts: (start.create.as_ref())
            .map_or_else(Vec::new, |create| create.allowed_hosts.clone()),
    };
    let (sender, receiver) = mpsc::channel(INPUT_QUEUE_MAX);
    let first = v1::RunRequest {
        message: Some(Message::Start(start)),
    };
    sender.try_send(first).expect("a new channel has room");
    // Dropping the sender ends the input; the feeder does so when standard input ends.
    let feeder = stdin.then(|| tokio::spawn(feed(sender)));
    let mut events = client
        .run(ReceiverStream::new(receiver))
        .await?
        .into_inner();
    let mut sink = if raw {
        Sink::Raw(Raw::new())
    } else {
        Sink::Kept(Kept::default())
    };
    let mut started = v1::RunStarted::default();
    let exited = loop {
        let event = events.message().await?.ok_or_else(|| {
            Failure::request(
                "the server closed the stream without the exit code of the command",
                "internal",
            )
        })?;
        match event.event {
            Some(Event::Started(event)) => started = event,
            Some(Event::Stdout(bytes)) => sink.stdout(&bytes).await?,
            Some(Event::Stderr(bytes)) => sink.stderr(&bytes).await?,
            Some(Event::Exited(exited)) => break exited,
            // An event of a newer server.
            None => {}
        }
    };
    if let Some(feeder) = feeder {
        feeder.abort();
    }
    let exit = exit_code(exited.exit_code);
    let notes = ended::notes(&asked, &started.session_id, &exited, raw);
    if let Sink::Kept(kept) = sink {
        output::json(&RunJson::new(kept, &started, exited, language))?;
    }
    notes.iter().for_each(|note| output::note(note));
    Ok(exit)
}

/// Destination of the output.
enum Sink {
    Raw(Raw),
    Kept(Kept),
}

#[derive(Default)]
struct Kept {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// JSON output: the keys of the Go K8E, and more.
#[derive(Serialize)]
struct RunJson {
    stdout: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_base64: Option<String>,
    stderr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_base64: Option<String>,
    exit_code: i32,
    session_id: String,
    /// Whether the session was created for this run: its files are new.
    session_created: bool,
    status: String,
    duration_ms: u64,
    truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    language: Option<&'static str>,
    runtime: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits_hit: Vec<String>,
    /// Host names, or addresses, to which egress was denied during the run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    egress_denied: Vec<String>,
}

// === impl CommandArgs ===

impl CommandArgs {
    pub(crate) fn raw(&self) -> bool {
        self.raw
    }

    pub(crate) fn stdin(&self) -> bool {
        self.stdin
    }

    /// The request, without program and session.
    pub(crate) fn request(self) -> Request {
        let start = v1::RunStart {
            env: self.env.into_iter().collect(),
            cwd: self.workdir.unwrap_or_default(),
            user: self.user.unwrap_or_default(),
            timeout_ms: self.timeout.map_or(0, Span::wire_millis),
            // Raw output is not limited: the reader's speed is the bound (backpressure).
            output_bytes_max: if self.raw { 0 } else { self.max_output },
            stdin: self.stdin,
            ..Default::default()
        };
        Request {
            start,
            language: None,
            raw: self.raw,
        }
    }
}

// === impl Sink ===

impl Sink {
    async fn stdout(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        match self {
            Self::Raw(raw) => raw.stdout(bytes).await,
            Self::Kept(kept) => {
                kept.stdout.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    async fn stderr(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        match self {
            Self::Raw(raw) => raw.stderr(bytes).await,
            Self::Kept(kept) => {
                kept.stderr.extend_from_slice(bytes);
                Ok(())
            }
        }
    }
}

// === impl RunJson ===

impl RunJson {
    fn new(
        kept: Kept,
        started: &v1::RunStarted,
        exited: v1::RunExited,
        language: Option<&'static str>,
    ) -> Self {
        let (stdout, stderr) = (Text::from(kept.stdout), Text::from(kept.stderr));
        Self {
            stdout: stdout.text,
            stdout_base64: stdout.base64,
            stderr: stderr.text,
            stderr_base64: stderr.base64,
            exit_code: exited.exit_code,
            session_id: started.session_id.clone(),
            session_created: started.session_created,
            status: exited.status,
            duration_ms: exited.duration_us / 1000,
            truncated: exited.stdout_truncated || exited.stderr_truncated,
            language,
            runtime: started.runtime.clone(),
            limits_hit: exited.limits_hit,
            egress_denied: ended::names(&exited.egress_denied),
        }
    }
}

async fn feed(sender: mpsc::Sender<v1::RunRequest>) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        // A read error of standard input is treated as its end.
        let length = stdin.read(&mut buffer).await.unwrap_or(0);
        let message = match length {
            0 => Message::StdinEnd(true),
            _ => Message::Stdin(buffer[..length].to_vec().into()),
        };
        let sent = sender
            .send(v1::RunRequest {
                message: Some(message),
            })
            .await;
        if sent.is_err() || length == 0 {
            return;
        }
    }
}

/// Converts an exit code to a byte; other values come only from a faulty server.
pub(crate) fn exit_code(code: i32) -> u8 {
    u8::try_from(code).unwrap_or(EXIT_REQUEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_has_k8es_keys() {
        let kept = Kept {
            stdout: b"hi\n".to_vec(),
            stderr: b"\xff".to_vec(),
        };
        let started = v1::RunStarted {
            session_id: "sess-a".into(),
            session_created: true,
            runtime: "native".into(),
            ..Default::default()
        };
        let exited = v1::RunExited {
            exit_code: 3,
            status: "completed".into(),
            duration_us: 1999,
            stderr_truncated: true,
            ..Default::default()
        };
        let json = serde_json::to_string(&RunJson::new(kept, &started, exited, Some("bash")));
        let want = "{\"stdout\":\"hi\\n\",\"stderr\":\"\u{fffd}\",\"stderr_base64\":\"/w==\",\"exit_code\":3,\
                    \"session_id\":\"sess-a\",\"session_created\":true,\"status\":\"completed\",\"duration_ms\":1,\"truncated\":true,\
                    \"language\":\"bash\",\"runtime\":\"native\"}";
        assert_eq!(json.unwrap(), want);
    }

    #[test]
    fn exit_codes_are_bytes() {
        assert_eq!(exit_code(0), 0);
        assert_eq!(exit_code(137), 137);
        assert_eq!(exit_code(-1), EXIT_REQUEST);
        assert_eq!(exit_code(256), EXIT_REQUEST);
    }
}
