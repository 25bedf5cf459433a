//! One run on the server, as `run` and `exec` share it: flags, standard input, events, result.

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

/// Messages of standard input on their way: enough to keep the connection busy.
const INPUT_QUEUE_MAX: usize = 4;

/// Flags of a command, in whatever session.
#[derive(Args, Debug)]
pub(crate) struct CommandArgs {
    /// Print output as it comes, as bytes, instead of JSON at the end
    #[arg(long)]
    raw: bool,

    /// How long it may take: seconds, or 90s, 10m, never [default: the server's, 30]
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    timeout: Option<Span>,

    /// A variable of its environment; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    env: Vec<(String, String)>,

    /// Its working directory [default: /workspace]
    #[arg(long, value_name = "DIR")]
    workdir: Option<String>,

    /// The user it runs as, inside [default: root]
    #[arg(long, value_name = "USER")]
    user: Option<String>,

    /// Pass standard input on to it
    #[arg(long)]
    stdin: bool,

    /// Output to keep of each stream, in JSON; 0 is all
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = units::size)]
    max_output: u64,
}

/// What to run, and how to show it.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) start: v1::RunStart,
    /// Shown in the result of code.
    pub(crate) language: Option<&'static str>,
    raw: bool,
}

/// Runs it. The exit code is the command's.
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
                "the server ended the run without saying how it went",
                "internal",
            )
        })?;
        match event.event {
            Some(Event::Started(event)) => started = event,
            Some(Event::Stdout(bytes)) => sink.stdout(&bytes).await?,
            Some(Event::Stderr(bytes)) => sink.stderr(&bytes).await?,
            Some(Event::Exited(exited)) => break exited,
            // Of a newer server.
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

/// Where output goes.
enum Sink {
    Raw(Raw),
    Kept(Kept),
}

#[derive(Default)]
struct Kept {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// K8E's keys, and a few more.
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
    /// Whether it was made for this run: its files are new.
    session_created: bool,
    status: String,
    duration_ms: u64,
    truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    language: Option<&'static str>,
    runtime: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits_hit: Vec<String>,
    /// Names, or addresses, that the session's rules or the server's denied while it ran.
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

    /// A request that lacks its program and its session.
    pub(crate) fn request(self) -> Request {
        let start = v1::RunStart {
            env: self.env.into_iter().collect(),
            cwd: self.workdir.unwrap_or_default(),
            user: self.user.unwrap_or_default(),
            timeout_ms: self.timeout.map_or(0, Span::wire_millis),
            // Raw output is as long as it is, at the reader's pace.
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
        // An unreadable standard input ends like an empty one: the command sees its end.
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

/// Exit codes are bytes; anything else is a server that is not ours.
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
