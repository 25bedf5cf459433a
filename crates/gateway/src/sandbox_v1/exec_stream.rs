//! `ExecStream`: a command's output as it comes.
//!
//! The Go server passes on the SSE frames of its agent, and its command line shows them to people. Here chunks are plain
//! text, and SSE frames are for clients that ask for them. Either way the trailers have the exit code.

use super::exec::{broken, run};
use super::sse::Sse;
use crate::k8e_v1::{Answers, model_status};
use crate::text::Joiner;
use futures::StreamExt as _;
use k8e_api::convert::sandbox_v1;
use k8e_api::sandbox_v1 as pb;
use k8e_engine::{Run, RunEvent, Sessions};
use k8e_model::{Outcome, Principal};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

/// Metadata with which a client asks for SSE frames: `sse`.
const FRAMING: &str = "x-k8e-stream";

const EXIT_CODE: &str = "x-k8e-exit-code";
const STATUS: &str = "x-k8e-status";

/// How output is put into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Plain,
    Sse,
}

/// A command under way. Dropping it ends the command: its client disconnected.
struct Streaming {
    run: Run,
    stdout: Joiner,
    stderr: Joiner,
    sse: Option<Sse>,
    ended: Option<Outcome>,
}

/// The framing that a client asks for.
pub(super) fn framing(metadata: &MetadataMap) -> Framing {
    match metadata.get(FRAMING) {
        Some(framing) if framing == "sse" => Framing::Sse,
        _ => Framing::Plain,
    }
}

pub(super) async fn start(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::ExecRequest,
    framing: Framing,
) -> Result<Answers<pb::ExecStreamResponse>, Status> {
    let mut command = sandbox_v1::command(request).map_err(model_status)?;
    // Backpressure: the client sets the pace, so nothing has to be truncated.
    command.output_bytes_max = None;
    let streaming = Streaming {
        run: run(sessions, who, &request.session_id, command).await?,
        stdout: Joiner::default(),
        stderr: Joiner::default(),
        sse: (framing == Framing::Sse).then(Sse::default),
        ended: None,
    };
    Ok(futures::stream::unfold(Some(streaming), next_chunk).boxed())
}

type Next = Option<(Result<pb::ExecStreamResponse, Status>, Option<Streaming>)>;

async fn next_chunk(streaming: Option<Streaming>) -> Next {
    let mut streaming = streaming?;
    match streaming.next().await {
        Ok(Some(chunk)) => Some((Ok(pb::ExecStreamResponse { chunk }), Some(streaming))),
        // Not an error: a status is how trailers are sent.
        Ok(None) => Some((Err(trailers(streaming.ended.as_ref())), None)),
        Err(status) => Some((Err(status), None)),
    }
}

// === impl Streaming ===

impl Streaming {
    /// The next chunk that is not empty; none at the end.
    async fn next(&mut self) -> Result<Option<String>, Status> {
        while self.ended.is_none() {
            let Some(event) = self.run.next().await else {
                return Err(Status::aborted("the run ended without an end"));
            };
            let chunk = match event.map_err(broken)? {
                RunEvent::Started { pid } => {
                    let sse = self.sse.as_ref();
                    sse.map(|_| Sse::pid(pid)).unwrap_or_default()
                }
                RunEvent::Stdout(bytes) => {
                    let text = self.stdout.push(&bytes);
                    self.framed(text)
                }
                RunEvent::Stderr(bytes) => {
                    let text = self.stderr.push(&bytes);
                    self.framed(text)
                }
                RunEvent::Exited(outcome) => self.end(outcome),
            };
            if !chunk.is_empty() {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }

    /// What was held back, and the exit frame.
    fn end(&mut self, outcome: Outcome) -> String {
        let rest = self.stdout.finish() + &self.stderr.finish();
        let mut chunk = self.framed(rest);
        if let Some(sse) = &mut self.sse {
            chunk += &sse.exit(outcome.exit_code);
        }
        self.ended = Some(outcome);
        chunk
    }

    fn framed(&mut self, text: String) -> String {
        match &mut self.sse {
            Some(sse) => sse.data(&text),
            None => text,
        }
    }
}

fn trailers(outcome: Option<&Outcome>) -> Status {
    let mut metadata = MetadataMap::new();
    if let Some(outcome) = outcome {
        metadata.insert(EXIT_CODE, outcome.exit_code.into());
        let status = MetadataValue::from_static(outcome.status.as_str());
        metadata.insert(STATUS, status);
    }
    Status::with_metadata(Code::Ok, "", metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_for_clients_that_ask() {
        let mut metadata = MetadataMap::new();
        assert_eq!(framing(&metadata), Framing::Plain);
        metadata.insert(FRAMING, "sse".parse().unwrap());
        assert_eq!(framing(&metadata), Framing::Sse);
        metadata.insert(FRAMING, "json".parse().unwrap());
        assert_eq!(framing(&metadata), Framing::Plain);
    }
}
