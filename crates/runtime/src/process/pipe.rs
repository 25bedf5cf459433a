//! `Start` without a terminal: output as it comes, input through a task that owns the guest's call.
//!
//! A frame to the guest must not be cut in half, so nobody who may be cancelled writes one: callers
//! hand their bytes to the task and wait.

use super::{Events, exit, init, output};
use crate::agent::{Failure, next};
use crate::process::proto::StartResponse;
use crate::process::proto::start_response::Event;
use crate::registry::{Feed, Running, Stdin};
use crate::shared::Shared;
use futures::StreamExt as _;
use k8e_wire::proto::{ErrorCode, Exec, input::Input, reply::Reply, request::Call};
use k8e_wire::{HostEnd, Inputs, Replies};
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Inputs that wait for the one before: each caller waits for its own.
const FEEDS_MAX: usize = 1;

/// A command that is being streamed. Dropped, the command and all it started is killed.
struct Streamed {
    running: Option<Running>,
    replies: Replies,
    feeder: Feeder,
    queue: VecDeque<Event>,
    chunk_bytes: usize,
}

/// Has the guest's call, whose end is its end.
struct Feeder(JoinHandle<()>);

impl Drop for Feeder {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts a command; its events.
pub(super) async fn start(shared: &Shared, mut exec: Exec) -> Result<Events, Failure> {
    let running = shared.admit()?;
    exec.stdin = true;
    let HostEnd {
        mut replies,
        inputs,
    } = shared.agent.start(Call::Exec(exec)).await?;
    let (feed, feeds) = mpsc::channel(FEEDS_MAX);
    let feeder = Feeder(tokio::spawn(forward(feeds, inputs)));
    let Reply::Started(started) = next(&mut replies).await? else {
        return Err(out_of_turn());
    };
    let process = &running.process;
    process.set_pid(started.pid);
    process.set_stdin(Stdin::Pipe {
        feed,
        ended: AtomicBool::new(false),
    });
    let streamed = Streamed {
        queue: VecDeque::from([init(process.id)]),
        running: Some(running),
        replies,
        feeder,
        chunk_bytes: shared.config.stream_chunk_size,
    };
    let events = futures::stream::try_unfold(streamed, |mut streamed| async move {
        let event = streamed.next().await?;
        Ok(event.map(|event| (StartResponse { event: Some(event) }, streamed)))
    });
    Ok(events.boxed())
}

/// Hands to the guest what callers give, one after the other, until it takes no more.
async fn forward(mut feeds: mpsc::Receiver<Feed>, mut inputs: Inputs) {
    let mut ended = false;
    while let Some((input, taken)) = feeds.recv().await {
        let is_end = matches!(input, Input::End(_));
        // Said again by a caller who did not hear that it was taken. Data after it is for nobody.
        if ended {
            if is_end {
                let _ = taken.send(());
            }
            continue;
        }
        ended = is_end;
        if inputs.send(input).await.is_err() {
            break;
        }
        let _ = taken.send(());
    }
    // Dropping the inputs would cancel: that is for who drops the stream.
    drop(feeds);
    std::future::pending::<()>().await;
}

fn out_of_turn() -> Failure {
    Failure::new(
        ErrorCode::Io,
        "the agent answered a command with something else",
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
                reason = "any other reply is out of turn, also one that does not exist yet"
            )]
            match next(&mut self.replies).await? {
                Reply::Stdout(data) => {
                    output(&mut self.queue, data, self.chunk_bytes, Event::Stdout);
                }
                Reply::Stderr(data) => {
                    output(&mut self.queue, data, self.chunk_bytes, Event::Stderr);
                }
                Reply::Exited(exited) => {
                    // By the time a client hears of the end, its number is nobody's.
                    self.running = None;
                    self.feeder.0.abort();
                    self.queue.push_back(exit(exited.exit_code));
                }
                _ => return Err(out_of_turn()),
            }
        }
    }
}
