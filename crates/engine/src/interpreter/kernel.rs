//! A kernel: the process of a context, the task that talks to it, and its executions.

use super::protocol::{self, Streams, TooLong};
use super::{ContextSpec, ExecutionEvent};
use crate::live::Live;
use crate::recorder::Recorder;
use crate::{Error, Run, RunEvent, RunInput, RunRequest, RunTarget, Sessions};
use bytes::Bytes;
use k8e_model::{
    Command, Env, Language, Outcome, Phase, Principal, Program, RunStatus, SessionId, TimeLimit,
};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

/// A kernel says that it is ready within this: an interpreter on a busy machine takes seconds. E2B's JavaScript client
/// waits 60 seconds for the first byte.
const START_WITHIN: Duration = Duration::from_secs(45);

/// Executions of one context that wait for their turn: their code is in memory.
const WAITING_MAX: usize = 8;

/// Output and results of one execution. Clients keep all of it in memory; code that prints for ever is ended by this.
const OUTPUT_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Time of one execution; a program that runs longer is a command.
const EXECUTION_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// An execution that goes on for this long after an interrupt loses its kernel, and the context its variables.
const INTERRUPT_WITHIN: Duration = Duration::from_secs(10);

/// A reader that takes nothing for this long is gone.
const STALLED_MAX: Duration = Duration::from_secs(60);

/// Messages on their way to a kernel: an execution, and its interrupt. One that does not read them is stuck.
const INPUTS_MAX: usize = 4;

const SIGINT: i32 = 2;

/// Exit code of a shell that did not find a program.
const NOT_FOUND: i32 = 127;

const PYTHON: &str = concat!(include_str!("charts.py"), "\n", include_str!("kernel.py"));
const NODE: &str = include_str!("kernel.js");
const BASH: &str = include_str!("kernel.sh");

/// Gives the JavaScript kernel descriptors of its own for messages, which Node.js cannot do itself. What else writes to
/// standard output writes to standard error.
const NODE_START: &str = r#"exec node -e "$0" "$@" 3<&0 4>&1 </dev/null 1>&2"#;

/// An execution that waits for its turn.
pub(super) struct Request {
    pub(super) code: String,
    pub(super) env: Env,
    pub(super) events: mpsc::Sender<ExecutionEvent>,
}

/// A kernel that was started. Dropping it ends the process.
pub(super) struct Kernel {
    requests: mpsc::Sender<Request>,
    _stop: oneshot::Sender<()>,
}

/// What a kernel is sent.
enum Input {
    Data(Bytes),
    Signal(i32),
}

/// How a kernel ended.
enum Ended {
    Exited(Outcome),
    Failed(String),
    TooLong,
}

/// The kernel's task.
struct Task {
    language: Language,
    run: Run,
    inputs: mpsc::Sender<Input>,
    streams: Streams,
    stop: oneshot::Receiver<()>,
    count: u64,
    recorder: Recorder,
    live: Arc<Live>,
}

/// The reader of an execution.
struct Reader {
    /// None when it is gone, or gets nothing more.
    events: Option<mpsc::Sender<ExecutionEvent>>,
    bytes_left: usize,
    /// How the execution is recorded.
    status: &'static str,
}

// === impl Kernel ===

impl Kernel {
    /// Starts the process, and waits until it is ready.
    pub(super) async fn start(
        sessions: &Sessions,
        who: &Principal,
        session: &SessionId,
        spec: &ContextSpec,
    ) -> Result<Self, Error> {
        let live = sessions.live(who, session).await?;
        let request = RunRequest {
            target: RunTarget::Existing(session.clone()),
            command: command(spec)?,
        };
        let mut run = sessions.run(who, request).await?.without_transcript();
        let input = run.take_input().ok_or(Error::InputClosed("it has ended"))?;
        let (inputs, to_write) = mpsc::channel(INPUTS_MAX);
        tokio::spawn(write(input, to_write));
        let (stop, stopped) = oneshot::channel();
        let mut task = Task {
            language: spec.language,
            run,
            inputs,
            streams: Streams::new(spec.language),
            stop: stopped,
            count: 0,
            recorder: sessions.shared.recorder.clone(),
            live,
        };
        let failed = |reason: String| Error::KernelFailed {
            language: spec.language.as_str(),
            reason,
        };
        match timeout(START_WITHIN, task.ready()).await {
            Ok(Ok(())) => {}
            Ok(Err(Ended::Exited(outcome))) if outcome.exit_code == NOT_FOUND => {
                return Err(Error::NoInterpreter {
                    program: "node",
                    hint: match task.live.record.image {
                        Some(_) => "the image does not have it; choose an image that does",
                        None => Language::Node.install_hint(),
                    },
                });
            }
            Ok(Err(ended)) => return Err(failed(ended.reason())),
            Err(_) => {
                return Err(failed(format!(
                    "it was not ready within {START_WITHIN:?}: the machine or the sandbox is too busy, try again"
                )));
            }
        }
        let (requests, to_do) = mpsc::channel(WAITING_MAX);
        tokio::spawn(task.serve(to_do));
        Ok(Self {
            requests,
            _stop: stop,
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        !self.requests.is_closed()
    }

    /// Adds an execution to the queue.
    pub(super) fn submit(&self, request: Request) -> Result<(), Error> {
        let full = |_| Error::ContextBusy { max: WAITING_MAX };
        self.requests.try_send(request).map_err(full)
    }
}

fn command(spec: &ContextSpec) -> Result<Command, Error> {
    let invalid = |error: k8e_model::Error| Error::Invalid(error.message);
    let code = |code: &'static str| Program::Code {
        language: spec.language,
        code: Bytes::from_static(code.as_bytes()),
    };
    let program = match spec.language {
        Language::Python => code(PYTHON),
        Language::Bash => code(BASH),
        Language::Node | Language::Ts => {
            let argv = ["sh", "-c", NODE_START, NODE, spec.language.as_str()];
            Program::Argv(argv.map(|arg| Bytes::from_static(arg.as_bytes())).to_vec())
        }
    };
    let mut command = Command::new(program)
        .map_err(invalid)?
        .in_dir(&spec.cwd)
        .map_err(invalid)?
        .as_user(&spec.user)
        .map_err(invalid)?;
    let env = [("LOGNAME".to_owned(), spec.user.clone())];
    command.env = Env::try_from(std::collections::BTreeMap::from(env)).map_err(invalid)?;
    command.timeout = TimeLimit::Never;
    command.stdin = true;
    Ok(command)
}

/// Writes to a kernel, which may read slowly. Ends with the kernel.
async fn write(mut input: RunInput, mut to_write: mpsc::Receiver<Input>) {
    while let Some(next) = to_write.recv().await {
        let written = match next {
            Input::Data(data) => input.data(data).await,
            Input::Signal(signal) => input.signal(signal).await,
        };
        if written.is_err() {
            return;
        }
    }
}

// === impl Task ===

impl Task {
    async fn ready(&mut self) -> Result<(), Ended> {
        while !self.streams.ended() {
            let event = self.run.next().await;
            self.decode(event)?;
        }
        Ok(())
    }

    async fn serve(mut self, mut to_do: mpsc::Receiver<Request>) {
        self.work(&mut to_do).await;
        // Ends the process, and whatever it started.
        drop(self);
        to_do.close();
        while let Some(request) = to_do.recv().await {
            let reason = "the kernel ended before this execution had its turn: run it again";
            Reader::new(request.events).fail("ExecutionAborted", reason);
        }
    }

    /// Runs what is asked for, until the kernel ends.
    async fn work(&mut self, to_do: &mut mpsc::Receiver<Request>) {
        loop {
            let request = tokio::select! {
                request = to_do.recv() => match request {
                    Some(request) => request,
                    None => return,
                },
                // What is written between executions has no reader.
                event = self.run.next() => match self.decode(event) {
                    Ok(_) => continue,
                    Err(_) => return,
                },
            };
            // One whose client has left need not run.
            if request.events.is_closed() {
                continue;
            }
            self.count += 1;
            let mut reader = Reader::new(request.events);
            let count = self.count;
            reader.send(ExecutionEvent::Started { count }).await;
            let executed = self.execute(&request.code, &request.env, &mut reader).await;
            if let Err(reason) = &executed {
                // Before the reader learns of it: its next execution must find a new kernel.
                to_do.close();
                if let Some((name, value)) = reason {
                    reader.fail(name, value);
                }
            }
            let detail = json!({
                "language": self.language.as_str(),
                "count": count,
                "status": reader.status,
            });
            self.recorder
                .event(&self.live.record, "code_executed", detail);
            if executed.is_err() {
                return;
            }
        }
    }

    /// Runs code to its end. An error when the kernel has ended or must: what its reader is told, if there is one.
    async fn execute(
        &mut self,
        code: &str,
        env: &Env,
        reader: &mut Reader,
    ) -> Result<(), Option<(&'static str, String)>> {
        let over = |name, value: &str| Err(Some((name, value.to_owned())));
        let Ok(id) = random_id() else {
            reader.fail("ExecutionAborted", "this machine has no random numbers");
            return Ok(());
        };
        self.streams.begin(&id);
        let message = protocol::execution(self.language, &id, code, env);
        if self.inputs.try_send(Input::Data(message)).is_err() {
            return over("ExecutionAborted", "the kernel does not read its input");
        }
        let too_long = Instant::now() + EXECUTION_MAX;
        let mut interrupted: Option<Instant> = None;
        while !self.streams.ended() {
            let deadline = interrupted.unwrap_or(too_long);
            let event = tokio::select! {
                biased;
                _ = &mut self.stop => {
                    return over("ContextRestarting", "the context was restarted or removed");
                }
                () = reader.gone(), if interrupted.is_none() => {
                    interrupted = Some(self.interrupt(&id));
                    continue;
                }
                () = sleep_until(deadline) => {
                    if interrupted.is_some() && self.live.phase() == Phase::Paused {
                        // It can do nothing until the session is resumed.
                        interrupted = Some(Instant::now() + INTERRUPT_WITHIN);
                        continue;
                    }
                    if interrupted.is_some() {
                        // Nobody reads the reason; the next execution finds a new kernel.
                        reader.status = "killed";
                        return Err(None);
                    }
                    reader.fail("ExecutionAborted", "it ran for 24 hours: run it as a command instead");
                    continue;
                }
                event = self.run.next() => event,
            };
            match self.decode(event) {
                Ok(events) => {
                    for event in events {
                        reader.send(event).await;
                    }
                }
                Err(ended) => {
                    let reason = ended.reason();
                    let lost = "Its variables are lost; the next execution starts a new kernel";
                    return over("UnexpectedEndOfExecution", &format!("{reason}. {lost}"));
                }
            }
        }
        Ok(())
    }

    /// Interrupts the execution; returns until when it must have ended.
    fn interrupt(&self, id: &str) -> Instant {
        // A queue that is full has a kernel that does not read: the deadline ends it.
        let _ = self.inputs.try_send(Input::Signal(SIGINT));
        if let Some(message) = protocol::interrupt(self.language, id) {
            let _ = self.inputs.try_send(Input::Data(message));
        }
        Instant::now() + INTERRUPT_WITHIN
    }

    fn decode(
        &mut self,
        event: Option<Result<RunEvent, Error>>,
    ) -> Result<Vec<ExecutionEvent>, Ended> {
        match event {
            Some(Ok(RunEvent::Started { .. })) => Ok(Vec::new()),
            Some(Ok(RunEvent::Stdout(data))) => {
                let events = self.streams.stdout(&data);
                events.map_err(|TooLong| Ended::TooLong)
            }
            Some(Ok(RunEvent::Stderr(data))) => {
                Ok(self.streams.stderr(&data).into_iter().collect())
            }
            Some(Ok(RunEvent::Exited(outcome))) => Err(Ended::Exited(outcome)),
            Some(Err(error)) => Err(Ended::Failed(error.to_string())),
            None => Err(Ended::Failed("it has ended".to_owned())),
        }
    }
}

// === impl Ended ===

impl Ended {
    fn reason(&self) -> String {
        match self {
            Self::Exited(outcome) if outcome.status == RunStatus::OomKilled => {
                "the kernel was killed because the sandbox reached its memory limit".to_owned()
            }
            Self::Exited(outcome) if outcome.signal != 0 => {
                format!("the kernel was killed by signal {}", outcome.signal)
            }
            Self::Exited(outcome) => format!("the kernel exited with code {}", outcome.exit_code),
            Self::Failed(reason) => reason.clone(),
            Self::TooLong => format!(
                "the kernel sent a message of more than {} bytes and was ended",
                protocol::MESSAGE_BYTES_MAX
            ),
        }
    }
}

// === impl Reader ===

impl Reader {
    fn new(events: mpsc::Sender<ExecutionEvent>) -> Self {
        Self {
            events: Some(events),
            bytes_left: OUTPUT_BYTES_MAX,
            status: "ok",
        }
    }

    /// Delivers an event. Too much output ends the execution, with an error.
    async fn send(&mut self, event: ExecutionEvent) {
        let bytes = match &event {
            ExecutionEvent::Started { .. } => 0,
            ExecutionEvent::Stdout(data) | ExecutionEvent::Stderr(data) => data.len(),
            ExecutionEvent::Result { data, .. } => data
                .iter()
                .map(|(mime, text)| mime.len() + text.len())
                .sum(),
            ExecutionEvent::Error {
                name,
                value,
                traceback,
            } => {
                self.status = "error";
                name.len() + value.len() + traceback.len()
            }
        };
        match self.bytes_left.checked_sub(bytes) {
            Some(left) => self.bytes_left = left,
            None => {
                let message = format!(
                    "more than {OUTPUT_BYTES_MAX} bytes of output and results: write them to a file"
                );
                return self.fail("OutputLimitExceeded", &message);
            }
        }
        let Some(events) = &self.events else { return };
        if !matches!(timeout(STALLED_MAX, events.send(event)).await, Ok(Ok(()))) {
            self.events = None;
        }
    }

    /// Ends the stream with an error of the server's.
    fn fail(&mut self, name: &str, value: &str) {
        self.status = "aborted";
        let event = ExecutionEvent::Error {
            name: name.to_owned(),
            value: value.to_owned(),
            traceback: format!("{name}: {value}\n"),
        };
        if let Some(events) = self.events.take() {
            // The queue may be full, and nothing waits for this one.
            tokio::spawn(async move { timeout(STALLED_MAX, events.send(event)).await });
        }
    }

    /// Resolves when nobody reads any more.
    async fn gone(&mut self) {
        if let Some(events) = &self.events {
            events.closed().await;
            self.events = None;
            self.status = "interrupted";
        }
    }
}

/// 128 random bits, in hexadecimal digits.
pub(super) fn random_id() -> Result<String, Error> {
    let mut random = [0; 16];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut random)
        .map_err(|_| Error::Invalid("this machine has no random numbers".to_owned()))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(random)))
}
