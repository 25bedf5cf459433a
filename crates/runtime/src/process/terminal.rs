//! `Start` on a terminal (pty). Terminals of the guest outlive their connections; here, the end of the response stream
//! ends the terminal and all that runs on it.

use super::{Events, exit, init, output};
use crate::agent::{Agent, Failure, next};
use crate::process::proto::start_response::Event;
use crate::process::proto::{Pty, StartResponse};
use crate::registry::{Running, Stdin};
use crate::shared::Shared;
use bytes::Bytes;
use futures::StreamExt as _;
use k8e_wire::HostEnd;
use k8e_wire::proto::{
    AttachTerminal, CreateTerminal, EndTerminal, ErrorCode, Exec, ResizeTerminal, WriteTerminal,
    reply::Reply, request::Call,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of input in one call of the guest.
const WRITE_BYTES_MAX: usize = 64 * 1024;

/// Pause before input to a full terminal is retried. The command does not read, or it has just ended.
const FULL_PAUSE: Duration = Duration::from_millis(50);

/// A terminal of the guest. Dropping this ends it.
struct Terminal {
    agent: Agent,
    id: String,
}

/// State of a response stream.
struct Streamed {
    running: Option<Running>,
    reader: HostEnd,
    queue: VecDeque<Event>,
    chunk_bytes: usize,
    _terminal: Terminal,
}

/// Starts a command on a terminal and returns its response stream.
pub(super) async fn start(shared: &Arc<Shared>, exec: Exec, size: Pty) -> Result<Events, Failure> {
    // In a task of its own: if the call is cancelled in between, the terminal is still created, and then dropped.
    let open = tokio::spawn(open(Arc::clone(shared), exec, size));
    let streamed = open.await.map_err(|_| unexpected_reply())??;
    let events = futures::stream::try_unfold(streamed, |mut streamed| async move {
        let event = streamed.next().await?;
        Ok(event.map(|event| (StartResponse { event: Some(event) }, streamed)))
    });
    Ok(events.boxed())
}

async fn open(shared: Arc<Shared>, exec: Exec, size: Pty) -> Result<Streamed, Failure> {
    let running = shared.admit()?;
    let process = &running.process;
    let id = process.id.to_string();
    let create = Call::CreateTerminal(CreateTerminal {
        id: id.clone(),
        exec: Some(exec),
        rows: size.rows,
        cols: size.cols,
        awaits_reader: true,
    });
    let Reply::Started(started) = shared.agent.one(create).await? else {
        return Err(unexpected_reply());
    };
    let terminal = Terminal {
        agent: shared.agent.clone(),
        id: id.clone(),
    };
    let attach = Call::AttachTerminal(AttachTerminal { id: id.clone() });
    let mut reader = shared.agent.start(attach).await?;
    let Reply::Started(_) = next(&mut reader.replies).await? else {
        return Err(unexpected_reply());
    };
    process.set_pid(started.pid);
    process.set_stdin(Stdin::Terminal(id));
    Ok(Streamed {
        queue: VecDeque::from([init(process.id)]),
        running: Some(running),
        reader,
        chunk_bytes: shared.config.stream_chunk_size,
        _terminal: terminal,
    })
}

/// Writes input to the terminal of a process. Retries while the terminal is full and the process runs.
pub(super) async fn write(
    shared: &Shared,
    process: i32,
    id: &str,
    mut data: Bytes,
) -> Result<(), Failure> {
    while !data.is_empty() {
        let call = Call::WriteTerminal(WriteTerminal {
            id: id.to_owned(),
            data: data.slice(..data.len().min(WRITE_BYTES_MAX)),
        });
        let Reply::Done(done) = shared.agent.one(call).await? else {
            return Err(unexpected_reply());
        };
        let taken = usize::try_from(done.bytes).unwrap_or(usize::MAX);
        if taken == 0 {
            shared.registry.get(process)?;
            tokio::time::sleep(FULL_PAUSE).await;
        }
        let _ = data.split_to(taken.min(data.len()));
    }
    Ok(())
}

/// Changes the size of a terminal.
pub(super) async fn resize(shared: &Shared, id: &str, rows: u32, cols: u32) -> Result<(), Failure> {
    let call = Call::ResizeTerminal(ResizeTerminal {
        id: id.to_owned(),
        rows,
        cols,
    });
    shared.agent.one(call).await.map(drop)
}

fn unexpected_reply() -> Failure {
    Failure::new(
        ErrorCode::Io,
        "the guest agent sent an unexpected reply for a terminal",
    )
}

// === impl Terminal ===

impl Drop for Terminal {
    fn drop(&mut self) {
        // Without an async runtime this process is exiting, and the terminals end with it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let (agent, id) = (self.agent.clone(), std::mem::take(&mut self.id));
        runtime.spawn(async move {
            let grace_ms = 0;
            let end = EndTerminal { id, grace_ms };
            let _ = agent.one(Call::EndTerminal(end)).await;
        });
    }
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
            match next(&mut self.reader.replies).await? {
                Reply::Data(data) => {
                    output(&mut self.queue, data, self.chunk_bytes, Event::Stdout);
                }
                Reply::Exited(exited) => {
                    self.running = None;
                    self.queue.push_back(exit(exited.exit_code));
                }
                _ => return Err(unexpected_reply()),
            }
        }
    }
}
