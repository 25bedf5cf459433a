//! Foreground runs: the first message starts one, later ones are its input, the answers are its output and exit.
//!
//! The stream of answers owns the engine's run. A client that disconnects drops the stream, and with it the run: closing
//! is cancelling.

use super::{Answers, engine_status, first_message, message_status, model_status};
use futures::StreamExt as _;
use futures::future::{Either, select};
use k8e_api::convert;
use k8e_api::status::to_status;
use k8e_api::v1::{self, run_event::Event, run_request::Message};
use k8e_engine::{Run, RunEvent, RunInput, Sessions};
use k8e_model::{Code, Principal};
use std::pin::pin;
use tokio::task::JoinHandle;
use tonic::{Status, Streaming};

pub(super) async fn run(
    sessions: &Sessions,
    who: &Principal,
    mut messages: Streaming<v1::RunRequest>,
) -> Result<Answers<v1::RunEvent>, Status> {
    let start = first(&mut messages).await?;
    let stdin = start.stdin;
    let request = convert::run_request(start).map_err(model_status)?;
    let mut run = sessions.run(who, request).await.map_err(engine_status)?;
    let input = run
        .take_input()
        .map(|input| Pump::spawn(messages, input, stdin));
    Ok(futures::stream::unfold(Some(Answering { run, input }), next_event).boxed())
}

async fn first(messages: &mut Streaming<v1::RunRequest>) -> Result<v1::RunStart, Status> {
    let first = first_message(messages, "run").await?;
    match first.and_then(|first| first.message) {
        Some(Message::Start(start)) => Ok(start),
        _ => Err(to_status(
            Code::Invalid,
            "the first message of a run must say what to run",
        )),
    }
}

/// A run, and the task that feeds its input, which ends with it.
struct Answering {
    run: Run,
    input: Option<Pump>,
}

/// Passes a client's input on. Stops when dropped.
struct Pump(JoinHandle<Result<(), Status>>);

type Next = Option<(Result<v1::RunEvent, Status>, Option<Answering>)>;

async fn next_event(answering: Option<Answering>) -> Next {
    let Answering { mut run, mut input } = answering?;
    let event = loop {
        let Some(pump) = &mut input else {
            break run.next().await;
        };
        let pumped = match select(pin!(run.next()), &mut pump.0).await {
            Either::Left((event, _)) => break event,
            Either::Right((pumped, _)) => pumped,
        };
        // The client's stream is over: ended properly, and the run goes on; or cancelled, which ends the run.
        input = None;
        if let Ok(Err(status)) = pumped {
            return Some((Err(status), None));
        }
    };
    match event? {
        Ok(event) => {
            let event = wire_event(&run, event);
            Some((
                Ok(v1::RunEvent { event: Some(event) }),
                Some(Answering { run, input }),
            ))
        }
        Err(error) => Some((Err(engine_status(error)), None)),
    }
}

fn wire_event(run: &Run, event: RunEvent) -> Event {
    match event {
        RunEvent::Started { pid } => Event::Started(v1::RunStarted {
            session_id: run.session_id.to_string(),
            session_created: run.session_created,
            pid,
            runtime: run.runtime.to_string(),
        }),
        RunEvent::Stdout(bytes) => Event::Stdout(bytes),
        RunEvent::Stderr(bytes) => Event::Stderr(bytes),
        RunEvent::Exited(outcome) => Event::Exited(convert::exited(outcome)),
    }
}

// === impl Pump ===

impl Pump {
    fn spawn(messages: Streaming<v1::RunRequest>, input: RunInput, stdin: bool) -> Self {
        Self(tokio::spawn(pump(messages, input, stdin)))
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An error: the client broke the protocol, cancelled or disconnected. A command that reads no more input is no error: the
/// rest is dropped, as by a pipe.
async fn pump(
    mut messages: Streaming<v1::RunRequest>,
    mut input: RunInput,
    stdin: bool,
) -> Result<(), Status> {
    while let Some(message) = messages.message().await.map_err(message_status)? {
        match message.message {
            Some(Message::Stdin(data)) if stdin => {
                let _ = input.data(data).await;
            }
            Some(Message::Stdin(_)) => {
                return Err(to_status(
                    Code::Invalid,
                    "standard input comes, but the run was started without",
                ));
            }
            Some(Message::StdinEnd(_)) => {
                let _ = input.end().await;
            }
            Some(Message::Signal(signal)) => {
                input.signal(signal).await.map_err(engine_status)?;
            }
            Some(Message::Start(_)) => {
                return Err(to_status(
                    Code::Invalid,
                    "a run is started once: open another call",
                ));
            }
            None => {}
        }
    }
    if stdin {
        let _ = input.end().await;
    }
    Ok(())
}
