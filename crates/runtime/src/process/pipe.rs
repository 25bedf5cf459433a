//! `Start` without a terminal: streams output as it comes. Stdin goes through a task that owns the guest call.
//!
//! Writing a frame to the guest must not be cancelled in the middle, and a gRPC call can be cancelled at any time. So
//! calls hand their bytes to the task and wait.

use super::{Events, exit, init, output};
use crate::agent::{Failure, next};
use crate::process::proto::StartResponse;
use crate::process::proto::start_response::Event;
use crate::registry::{Running, Stdin, StdinWrite};
use crate::shared::Shared;
use futures::StreamExt as _;
use k8e_wire::proto::{ErrorCode, Exec, input::Input, reply::Reply, request::Call};
use k8e_wire::{HostEnd, Inputs, Replies};
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Capacity of the channel to that task. Each call waits until its own write is done.
const STDIN_WRITES_MAX: usize = 1;

/// State of a response stream. Dropping it kills the command and all its descendants.
struct Streamed {
    running: Option<Running>,
    replies: Replies,
    stdin_task: StdinTask,
    queue: VecDeque<Event>,
    chunk_bytes: usize,
}

/// The task that owns the guest call. Dropping it cancels the call.
struct StdinTask(JoinHandle<()>);

impl Drop for StdinTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts a command and returns its response stream.
pub(super) async fn start(shared: &Shared, mut exec: Exec) -> Result<Events, Failure> {
    let running = shared.admit()?;
    exec.stdin = true;
    let HostEnd {
        mut replies,
        inputs,
    } = shared.agent.start(Call::Exec(exec)).await?;
    let (stdin, writes) = mpsc::channel(STDIN_WRITES_MAX);
    let stdin_task = StdinTask(tokio::spawn(forward(writes, inputs)));
    let Reply::Started(started) = next(&mut replies).await? else {
        return Err(unexpected_reply());
    };
    let process = &running.process;
    process.set_pid(started.pid);
    process.set_stdin(Stdin::Pipe {
        writes: stdin,
        ended: AtomicBool::new(false),
    });
    let streamed = Streamed {
        queue: VecDeque::from([init(process.id)]),
        running: Some(running),
        replies,
        stdin_task,
        chunk_bytes: shared.config.stream_chunk_size,
    };
    let events = futures::stream::try_unfold(streamed, |mut streamed| async move {
        let event = streamed.next().await?;
        Ok(event.map(|event| (StartResponse { event: Some(event) }, streamed)))
    });
    Ok(events.boxed())
}

/// Forwards writes to the guest, in order, until the command ends.
async fn forward(mut writes: mpsc::Receiver<StdinWrite>, mut inputs: Inputs) {
    let mut ended = false;
    while let Some((input, done)) = writes.recv().await {
        let is_end = matches!(input, Input::End(_));
        // An end may be repeated by a client whose first call was cancelled. Data after it is dropped.
        if ended {
            if is_end {
                let _ = done.send(());
            }
            continue;
        }
        ended = is_end;
        if inputs.send(input).await.is_err() {
            break;
        }
        let _ = done.send(());
    }
    // Dropping the inputs would cancel the call, which lasts as long as the response stream.
    drop(writes);
    std::future::pending::<()>().await;
}

fn unexpected_reply() -> Failure {
    Failure::new(
        ErrorCode::Io,
        "the guest agent sent an unexpected reply to a command",
    )
}

// === impl Streamed ===

impl Streamed {
    async fn next(&mut self) -> Result<Option<Event>, Failure> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Ok(Some(event));
            }
            if self.running.is_none() {
                return Ok(None);
            }
            #[expect(
                clippy::wildcard_enum_match_arm,
                reason = "any other reply is a protocol error, also a kind that is added later"
            )]
            match next(&mut self.replies).await? {
                Reply::Stdout(data) => {
                    output(&mut self.queue, data, self.chunk_bytes, Event::Stdout);
                }
                Reply::Stderr(data) => {
                    output(&mut self.queue, data, self.chunk_bytes, Event::Stderr);
                }
                Reply::Exited(exited) => {
                    // Unregistered before the client receives the exit event.
                    self.running = None;
                    self.stdin_task.0.abort();
                    self.queue.push_back(exit(exited.exit_code));
                }
                _ => return Err(unexpected_reply()),
            }
        }
    }
}
