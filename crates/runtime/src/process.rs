//! gRPC service `process.v1.ProcessService` of sandboxd (port 9090): start, execute, stdin, signals, terminals.

mod pipe;
mod terminal;

use crate::agent::Failure;
use crate::registry::{Stdin, StdinWrite};
use crate::run::{add_line, run};
use crate::shared::{Shared, working_dir};
use bytes::Bytes;
use futures::stream::BoxStream;
use k8e_wire::proto::{End, EnvVar, ErrorCode, Exec, input::Input};
use proto::process_service_server::ProcessService;
use proto::start_response::Event;
use proto::write_stdin_request::Payload;
use proto::{
    ExecuteRequest, ExecuteResponse, ExitEvent, InitEvent, ProcessConfig, ResizeTtyRequest,
    ResizeTtyResponse, SendSignalRequest, SendSignalResponse, Signal, StartRequest, StartResponse,
    WriteStdinRequest, WriteStdinResponse,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};

/// Generated from `proto/process/v1`.
#[expect(unreachable_pub, reason = "generated")]
pub(crate) mod proto {
    include!("gen/process.v1.rs");
}

/// Encoded file descriptor set, for server reflection.
pub(crate) const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/process.v1.bin");

/// Output in one `Execute` response: the default message limit of gRPC clients, 4 MiB, less room for the other fields
/// and the notice about cut output.
const EXECUTE_BYTES_MAX: usize = 4 * 1024 * 1024 - 64 * 1024;

/// EOT (Ctrl-D): end of input on a terminal.
const END_OF_INPUT: &[u8] = b"\x04";

/// The service implementation.
#[derive(Clone)]
pub(crate) struct Processes(Arc<Shared>);

/// Response stream of `Start`.
type Events = BoxStream<'static, Result<StartResponse, Status>>;

// === impl Processes ===

impl Processes {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Builds the guest call for a process configuration.
    async fn exec(&self, config: Option<ProcessConfig>) -> Result<Exec, Failure> {
        let config = config.unwrap_or_default();
        if config.command.first().is_none_or(String::is_empty) {
            let message = "config.command is empty: name a program, and its arguments";
            return Err(Failure::new(ErrorCode::Invalid, message));
        }
        let root = &self.0.root;
        let cwd = match config.cwd.as_deref() {
            None | Some("") => root.dir().clone(),
            Some(path) => working_dir(root, path).await?,
        };
        let mut exec = self.0.exec(config.command, &cwd);
        let env = config.env_vars.into_iter().map(|(name, value)| EnvVar {
            name: name.into(),
            value: value.into(),
        });
        exec.env.extend(env);
        Ok(exec)
    }
}

#[tonic::async_trait]
impl ProcessService for Processes {
    type StartStream = Events;

    async fn start(&self, request: Request<StartRequest>) -> Result<Response<Events>, Status> {
        let StartRequest { config, pty } = request.into_inner();
        let exec = self.exec(config).await?;
        let events = match pty {
            None => pipe::start(&self.0, exec).await?,
            Some(pty) => terminal::start(&self.0, exec, pty).await?,
        };
        Ok(Response::new(events))
    }

    async fn execute(
        &self,
        request: Request<ExecuteRequest>,
    ) -> Result<Response<ExecuteResponse>, Status> {
        let mut exec = self.exec(request.into_inner().config).await?;
        exec.output_bytes_max = EXECUTE_BYTES_MAX as u64;
        let mut finished = run(&self.0, exec).await?;
        finished.fit(EXECUTE_BYTES_MAX);
        if let Some(notice) = finished.cut_notice() {
            add_line(&mut finished.stderr, &notice);
        }
        Ok(Response::new(ExecuteResponse {
            exit_code: finished.exited.exit_code,
            stdout: finished.stdout.into(),
            stderr: finished.stderr.into(),
        }))
    }

    async fn write_stdin(
        &self,
        request: Request<WriteStdinRequest>,
    ) -> Result<Response<WriteStdinResponse>, Status> {
        let WriteStdinRequest {
            process_id,
            payload,
        } = request.into_inner();
        let process = self.0.registry.get(process_id)?;
        match (process.stdin(), payload) {
            (None, _) => {
                let message = format!("process {process_id} has no input");
                return Err(Status::failed_precondition(message));
            }
            (_, None) => return Err(Status::invalid_argument("set input or eof")),
            (Some(Stdin::Terminal(id)), Some(Payload::Input(data))) => {
                terminal::write(&self.0, process_id, id, data).await?;
            }
            (Some(Stdin::Terminal(id)), Some(Payload::Eof(()))) => {
                let end = Bytes::from_static(END_OF_INPUT);
                terminal::write(&self.0, process_id, id, end).await?;
            }
            (Some(Stdin::Pipe { writes, ended }), Some(Payload::Input(data))) => {
                if ended.load(Ordering::Relaxed) {
                    let message = format!("the input of process {process_id} was ended");
                    return Err(Status::failed_precondition(message));
                }
                write_pipe(writes, Input::Data(data)).await?;
            }
            (Some(Stdin::Pipe { writes, ended }), Some(Payload::Eof(()))) => {
                // Only after it was delivered: a call that is cancelled before that may be repeated.
                if !ended.load(Ordering::Relaxed) {
                    write_pipe(writes, Input::End(End {})).await?;
                    ended.store(true, Ordering::Relaxed);
                }
            }
        }
        Ok(Response::new(WriteStdinResponse {}))
    }

    async fn send_signal(
        &self,
        request: Request<SendSignalRequest>,
    ) -> Result<Response<SendSignalResponse>, Status> {
        let request = request.into_inner();
        let process = self.0.registry.get(request.process_id)?;
        let signal = match request.signal() {
            Signal::Sigint => rustix::process::Signal::INT,
            Signal::Sigkill => rustix::process::Signal::KILL,
            Signal::Sigterm => rustix::process::Signal::TERM,
            Signal::Unspecified => {
                let message = "set signal to SIGNAL_SIGINT, SIGNAL_SIGTERM or SIGNAL_SIGKILL";
                return Err(Status::invalid_argument(message));
            }
        };
        process.signal(signal);
        Ok(Response::new(SendSignalResponse {}))
    }

    async fn resize_tty(
        &self,
        request: Request<ResizeTtyRequest>,
    ) -> Result<Response<ResizeTtyResponse>, Status> {
        let request = request.into_inner();
        let process = self.0.registry.get(request.process_id)?;
        let Some(Stdin::Terminal(id)) = process.stdin() else {
            let message = format!("process {} has no terminal", request.process_id);
            return Err(Status::failed_precondition(message));
        };
        terminal::resize(&self.0, id, request.rows, request.cols).await?;
        Ok(Response::new(ResizeTtyResponse {}))
    }
}

/// Writes to the stdin of a command. Returns when the guest has accepted it (backpressure).
async fn write_pipe(stdin: &mpsc::Sender<StdinWrite>, input: Input) -> Result<(), Status> {
    let ended = || Status::not_found("the process has ended");
    let (done, written) = oneshot::channel();
    stdin.send((input, done)).await.map_err(|_| ended())?;
    written.await.map_err(|_| ended())
}

/// Splits output into events of at most `bytes_max` bytes.
fn output(
    queue: &mut VecDeque<Event>,
    mut data: Bytes,
    bytes_max: usize,
    event: fn(Bytes) -> Event,
) {
    while !data.is_empty() {
        let chunk = data.split_to(data.len().min(bytes_max));
        queue.push_back(event(chunk));
    }
}

fn init(process_id: i32) -> Event {
    Event::Init(InitEvent { process_id })
}

fn exit(exit_code: i32) -> Event {
    Event::Exit(ExitEvent { exit_code })
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let message = failure.message;
        match failure.code {
            ErrorCode::Invalid | ErrorCode::IsDirectory | ErrorCode::NotDirectory => {
                Self::invalid_argument(message)
            }
            ErrorCode::NotFound | ErrorCode::NoProgram => Self::not_found(message),
            ErrorCode::Exists => Self::already_exists(message),
            ErrorCode::Permission | ErrorCode::Outside => Self::permission_denied(message),
            ErrorCode::Exhausted => Self::resource_exhausted(message),
            ErrorCode::Precondition => Self::failed_precondition(message),
            ErrorCode::Unspecified => Self::unavailable(message),
            ErrorCode::Io => Self::internal(message),
        }
    }
}
