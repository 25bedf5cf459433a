//! `process.Process`: commands of a sandbox, with pipes or a terminal. A command outlives the call that started it.

use super::body::{Answer, BoxError, Upload};
use super::connect::{self, Error, Messages, Rpc, end, frame, unary};
use super::envd::Authenticated;
use super::error::Failure;
use super::user::User;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hyper::Request;
use hyper::body::Incoming;
use k8e_engine::{
    CommandConfig, CommandEvent, CommandExit, CommandInput, CommandStart, CommandStream,
    CommandView,
};
use k8e_model::{Code, Command, Program, TimeLimit};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// Longest tag of a command: it is kept and compared.
const TAG_BYTES_MAX: usize = 256;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct ProcessConfig {
    #[serde(default)]
    cmd: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    envs: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cwd: Option<String>,
}

#[derive(Debug, Deserialize)]
struct StartRequest {
    #[serde(default)]
    process: ProcessConfig,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Pty {
    size: Option<Size>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Size {
    #[serde(default)]
    cols: u32,
    #[serde(default)]
    rows: u32,
}

#[derive(Debug, Default, Deserialize)]
struct Selector {
    pid: Option<u32>,
    tag: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SelectRequest {
    #[serde(default)]
    process: Selector,
}

#[derive(Debug, Deserialize)]
struct InputRequest {
    #[serde(default)]
    process: Selector,
    #[serde(default)]
    input: Input,
}

#[derive(Debug, Default, Deserialize)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

#[derive(Debug, Deserialize)]
struct StreamInputRequest {
    start: Option<SelectRequest>,
    data: Option<StreamData>,
}

#[derive(Debug, Deserialize)]
struct StreamData {
    #[serde(default)]
    input: Input,
}

#[derive(Debug, Deserialize)]
struct SignalRequest {
    #[serde(default)]
    process: Selector,
    #[serde(default)]
    signal: Value,
}

#[derive(Debug, Deserialize)]
struct UpdateRequest {
    #[serde(default)]
    process: Selector,
    pty: Option<Pty>,
}

/// Serves one call.
pub(super) async fn serve(
    call: &Authenticated<'_>,
    rpc: Rpc,
    method: &str,
    request: Request<Incoming>,
) -> Result<Answer, Failure> {
    let user = User::of_headers(request.headers());
    let upload = Upload(request.into_body());
    match method {
        "Start" => {
            let started = start(call, rpc, user, upload).await;
            Ok(streamed(started, rpc, None))
        }
        "Connect" => {
            let connected = attach(call, rpc, upload).await;
            let deadline = rpc.timeout.map(|timeout| Instant::now() + timeout);
            Ok(streamed(connected, rpc, deadline))
        }
        "StreamInput" => {
            let frame = match stream_input(call, upload).await {
                Ok(()) => [frame(&json!({})), end(None)].concat(),
                Err(error) => end(Some(&error)).to_vec(),
            };
            Ok(connect::stream(futures::stream::once(async move {
                Ok(Bytes::from(frame))
            })))
        }
        "List" => unary(list(call).await),
        "SendInput" => unary(send_input(call, rpc, upload).await),
        "CloseStdin" => unary(close_stdin(call, rpc, upload).await),
        "SendSignal" => unary(send_signal(call, rpc, upload).await),
        "Update" => unary(update(call, rpc, upload).await),
        _ => Err(Failure::not_found(format!(
            "no such call: process.Process/{method}"
        ))),
    }
}

async fn start(
    call: &Authenticated<'_>,
    rpc: Rpc,
    user: Result<User, Failure>,
    upload: Upload,
) -> Result<CommandStream, Error> {
    let user = user?;
    let request: StartRequest = rpc.message(upload).await?;
    let command = command(call, rpc, user, &request).await?;
    let ProcessConfig {
        cmd,
        args,
        envs,
        cwd,
    } = request.process;
    if request
        .tag
        .as_ref()
        .is_some_and(|tag| tag.len() > TAG_BYTES_MAX)
    {
        return Err(Error::invalid(format!(
            "tag: at most {TAG_BYTES_MAX} bytes"
        )));
    }
    let start = CommandStart {
        session: call.id.clone(),
        command,
        terminal: request.pty.map(size).transpose()?,
        config: CommandConfig {
            cmd,
            args,
            envs,
            cwd,
            tag: request.tag,
        },
    };
    let started = call.api.sessions.start_command(&call.who, start).await;
    started.map_err(|error| call.refused(&error))
}

async fn command(
    call: &Authenticated<'_>,
    rpc: Rpc,
    user: User,
    request: &StartRequest,
) -> Result<Command, Error> {
    let ProcessConfig {
        cmd,
        args,
        envs,
        cwd,
    } = &request.process;
    let argv = std::iter::once(cmd).chain(args);
    let argv = argv
        .map(|arg| Bytes::copy_from_slice(arg.as_bytes()))
        .collect();
    let model = |error: k8e_model::Error| Error::invalid(error.message);
    let mut env = envs.clone();
    env.entry("LOGNAME".to_owned())
        .or_insert_with(|| user.name().to_owned());
    let home = match cwd.as_deref().filter(|cwd| !cwd.is_empty()) {
        None => user.home().to_owned(),
        Some(cwd) => {
            let absolute = user.absolute(cwd);
            let missing = |_| Error::invalid(format!("cwd '{absolute}' does not exist"));
            let path = user.path(cwd)?;
            let found = call
                .api
                .sessions
                .stat_target(&call.who, &call.id, &path)
                .await;
            found.map_err(|error| match error.code() == Code::NotFound {
                true => missing(()),
                false => call.refused(&error),
            })?;
            absolute
        }
    };
    let mut command = Command::new(Program::Argv(argv)).map_err(model)?;
    command = command
        .in_dir(&home)
        .map_err(model)?
        .as_user(user.name())
        .map_err(model)?;
    command.env = env.try_into().map_err(model)?;
    command.timeout = rpc.timeout.map_or(TimeLimit::Never, TimeLimit::After);
    // Old clients say nothing and send input; new ones say that they send none.
    command.stdin = request.stdin.unwrap_or(true) && request.pty.is_none();
    Ok(command)
}

fn size(pty: Pty) -> Result<(u16, u16), Error> {
    let Some(Size { cols, rows }) = pty.size else {
        return Ok((0, 0));
    };
    let checked =
        |count: u32| u16::try_from(count).map_err(|_| Error::invalid("pty size: at most 65535"));
    Ok((checked(rows)?, checked(cols)?))
}

async fn attach(
    call: &Authenticated<'_>,
    rpc: Rpc,
    upload: Upload,
) -> Result<CommandStream, Error> {
    let request: SelectRequest = rpc.message(upload).await?;
    let pid = selected(call, &request.process).await?;
    let stream = call
        .api
        .sessions
        .connect_command(&call.who, &call.id, pid)
        .await;
    stream.map_err(|error| call.refused(&error))
}

async fn list(call: &Authenticated<'_>) -> Result<Value, Error> {
    let listed = call.api.sessions.list_commands(&call.who, &call.id).await;
    let listed = listed.map_err(|error| call.refused(&error))?;
    let described = |view: CommandView| {
        let CommandConfig {
            cmd,
            args,
            envs,
            cwd,
            tag,
        } = view.config;
        let mut process =
            json!({ "config": ProcessConfig { cmd, args, envs, cwd }, "pid": view.pid });
        if let Some(tag) = tag {
            process["tag"] = tag.into();
        }
        process
    };
    let processes: Vec<Value> = listed.into_iter().map(described).collect();
    Ok(json!({ "processes": processes }))
}

async fn send_input(call: &Authenticated<'_>, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
    let InputRequest { process, input } = rpc.message(upload).await?;
    let pid = selected(call, &process).await?;
    give(call, pid, input).await?;
    Ok(json!({}))
}

async fn give(call: &Authenticated<'_>, pid: u32, input: Input) -> Result<(), Error> {
    let decoded = |text: &str| {
        let bytes = STANDARD.decode(text);
        bytes
            .map(Bytes::from)
            .map_err(|_| Error::invalid("input is not base64"))
    };
    let input = match (&input.stdin, &input.pty) {
        (Some(stdin), None) => CommandInput::Stdin(decoded(stdin)?),
        (None, Some(pty)) => CommandInput::Terminal(decoded(pty)?),
        _ => return Err(Error::invalid("input needs one of stdin and pty")),
    };
    let sent = call
        .api
        .sessions
        .send_command_input(&call.who, &call.id, pid, input)
        .await;
    sent.map_err(|error| call.refused(&error))
}

async fn stream_input(call: &Authenticated<'_>, upload: Upload) -> Result<(), Error> {
    let mut messages = Messages::new(upload);
    let mut pid = None;
    while let Some(message) = messages.next::<StreamInputRequest>().await? {
        if let Some(start) = message.start {
            pid = Some(selected(call, &start.process).await?);
        }
        if let Some(data) = message.data {
            let pid = pid.ok_or_else(|| Error::invalid("data before start"))?;
            give(call, pid, data.input).await?;
        }
    }
    Ok(())
}

async fn close_stdin(call: &Authenticated<'_>, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
    let request: SelectRequest = rpc.message(upload).await?;
    let pid = selected(call, &request.process).await?;
    let closed = call
        .api
        .sessions
        .close_command_input(&call.who, &call.id, pid)
        .await;
    closed.map_err(|error| call.refused(&error))?;
    Ok(json!({}))
}

async fn send_signal(call: &Authenticated<'_>, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
    let request: SignalRequest = rpc.message(upload).await?;
    let signal = match (request.signal.as_str(), request.signal.as_i64()) {
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => SIGKILL,
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => SIGTERM,
        _ => {
            return Err(Error::new(
                "unimplemented",
                "signals: SIGNAL_SIGKILL or SIGNAL_SIGTERM",
            ));
        }
    };
    let pid = selected(call, &request.process).await?;
    let sent = call
        .api
        .sessions
        .signal_command(&call.who, &call.id, pid, signal)
        .await;
    sent.map_err(|error| call.refused(&error))?;
    Ok(json!({}))
}

async fn update(call: &Authenticated<'_>, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
    let request: UpdateRequest = rpc.message(upload).await?;
    let pid = selected(call, &request.process).await?;
    if let Some(pty) = request.pty {
        let resized = call
            .api
            .sessions
            .resize_command(&call.who, &call.id, pid, size(pty)?)
            .await;
        resized.map_err(|error| call.refused(&error))?;
    }
    Ok(json!({}))
}

async fn selected(call: &Authenticated<'_>, selector: &Selector) -> Result<u32, Error> {
    match (selector.pid, &selector.tag) {
        (Some(pid), None) => Ok(pid),
        (None, Some(tag)) => {
            let found = call
                .api
                .sessions
                .command_by_tag(&call.who, &call.id, tag)
                .await;
            found.map_err(|error| call.refused(&error))
        }
        _ => Err(Error::invalid("process needs one of pid and tag")),
    }
}

/// The events of a command as a stream of messages: its start, its output, its end.
fn streamed(command: Result<CommandStream, Error>, rpc: Rpc, deadline: Option<Instant>) -> Answer {
    let command = match command {
        Ok(command) => command,
        Err(error) => return connect::failed_stream(&error),
    };
    let first = event(&json!({ "start": { "pid": command.pid } }));
    let events = Events {
        command,
        keepalive: rpc.keepalive,
        deadline,
        first: Some(first),
        over: false,
    };
    connect::stream(futures::stream::unfold(events, |mut events| async move {
        let frame = events.next().await?;
        Some((Ok::<_, BoxError>(frame), events))
    }))
}

struct Events {
    command: CommandStream,
    keepalive: Duration,
    deadline: Option<Instant>,
    first: Option<Bytes>,
    over: bool,
}

// === impl Events ===

impl Events {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        if self.over {
            return None;
        }
        let deadline = self.deadline;
        let reached = async {
            match deadline {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let next = tokio::select! {
            next = self.command.next() => next,
            () = sleep(self.keepalive) => return Some(event(&json!({ "keepalive": {} }))),
            () = reached => {
                self.over = true;
                return Some(end(Some(&Error::deadline())));
            }
        };
        let data =
            |name: &str, bytes: &Bytes| event(&json!({ "data": { name: STANDARD.encode(bytes) } }));
        let last = match next {
            Some(CommandEvent::Stdout(bytes)) => return Some(data("stdout", &bytes)),
            Some(CommandEvent::Stderr(bytes)) => return Some(data("stderr", &bytes)),
            Some(CommandEvent::Terminal(bytes)) => return Some(data("pty", &bytes)),
            Some(CommandEvent::Exited(exit)) if exit.timed_out => end(Some(&Error::deadline())),
            Some(CommandEvent::Exited(exit)) => {
                Bytes::from([event(&json!({ "end": ended(exit) })), end(None)].concat())
            }
            Some(CommandEvent::Failed(code, message)) => end(Some(&Error::of_code(code, message))),
            None => {
                let message = "this client did not read what the command wrote";
                end(Some(&Error::new("resource_exhausted", message)))
            }
        };
        self.over = true;
        Some(last)
    }
}

fn event(event: &Value) -> Bytes {
    frame(&json!({ "event": event }))
}

/// How a command ended, in the words of E2B's server.
fn ended(exit: CommandExit) -> Value {
    match exit {
        CommandExit {
            signal: 0,
            exit_code: 0,
            ..
        } => json!({ "exited": true, "status": "exit status 0" }),
        CommandExit {
            signal: 0,
            exit_code,
            ..
        } => {
            let status = format!("exit status {exit_code}");
            json!({ "exitCode": exit_code, "exited": true, "status": status, "error": status })
        }
        CommandExit { signal, .. } => {
            let status = match signal {
                SIGKILL => "signal: killed".to_owned(),
                SIGTERM => "signal: terminated".to_owned(),
                signal => format!("signal: {signal}"),
            };
            json!({ "exitCode": -1, "exited": false, "status": status, "error": status })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::connect::decode;
    use super::*;

    #[test]
    fn requests_are_read_in_both_spellings() {
        let start: StartRequest = decode(
            br#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{"A":"b"},"cwd":"/"},"stdin":false,"x":1}"#,
        )
        .unwrap();
        assert_eq!(
            (start.process.cmd.as_str(), start.stdin),
            ("/bin/bash", Some(false))
        );
        let pty: StartRequest =
            decode(br#"{"process":{"cmd":"a"},"pty":{"size":{"cols":80,"rows":24}}}"#).unwrap();
        assert_eq!(size(pty.pty.unwrap()), Ok((24, 80)));
        let huge: StartRequest = decode(br#"{"pty":{"size":{"cols":70000}}}"#).unwrap();
        assert!(size(huge.pty.unwrap()).is_err());
        assert!(decode::<StartRequest>(b"[]").is_err());
        assert!(decode::<SelectRequest>(br#"{"process":{"pid":-1}}"#).is_err());
    }

    #[test]
    fn ends_are_written_as_clients_expect() {
        let exit = |exit_code, signal| CommandExit {
            exit_code,
            signal,
            timed_out: false,
        };
        assert_eq!(
            ended(exit(0, 0)),
            json!({"exited": true, "status": "exit status 0"})
        );
        assert_eq!(ended(exit(3, 0))["exitCode"], 3);
        assert_eq!(ended(exit(137, 9))["exitCode"], -1);
        assert_eq!(ended(exit(137, 9))["status"], "signal: killed");
    }
}
