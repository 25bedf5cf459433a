//! `Exec` in the foreground and in the background, and `PollRun`.

use crate::k8e_v1::{engine_status, model_status};
use k8e_api::convert::sandbox_v1;
use k8e_api::sandbox_v1 as pb;
use k8e_api::status::to_status;
use k8e_engine::{Error, Run, RunEvent, RunRequest, RunTarget, Sessions};
use k8e_model::{Code, Command, Outcome, Principal};
use tonic::Status;

/// Codes that the command line of the Go K8E takes for an expired session: it makes a new one and runs the command again.
const RUN_AGAIN: [tonic::Code; 3] = [
    tonic::Code::NotFound,
    tonic::Code::FailedPrecondition,
    tonic::Code::Unavailable,
];

pub(super) async fn exec(
    sessions: &Sessions,
    who: &Principal,
    request: pb::ExecRequest,
) -> Result<pb::ExecResponse, Status> {
    if request.background {
        return start(sessions, who, request).await;
    }
    let command = sandbox_v1::command(&request).map_err(model_status)?;
    let mut run = run(sessions, who, &request.session_id, command).await?;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let outcome = to_end(&mut run, |stream, bytes| match stream {
        Stream::Stdout => stdout.extend_from_slice(bytes),
        Stream::Stderr => stderr.extend_from_slice(bytes),
    });
    let outcome = outcome.await?;
    Ok(pb::ExecResponse {
        session_id: request.session_id,
        language: request.language,
        ..sandbox_v1::exec_response(&outcome, stdout, stderr)
    })
}

pub(super) async fn poll(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::PollRunRequest,
) -> Result<pb::PollRunResponse, Status> {
    let id = sandbox_v1::run_id(&request.run_id).map_err(model_status)?;
    let run = sessions.poll_run(who, &id).await.map_err(engine_status)?;
    Ok(sandbox_v1::poll_response(run))
}

/// Which stream bytes came from.
pub(super) enum Stream {
    Stdout,
    Stderr,
}

/// Starts a command in a session.
pub(super) async fn run(
    sessions: &Sessions,
    who: &Principal,
    session_id: &str,
    command: Command,
) -> Result<Run, Status> {
    let id = sandbox_v1::session_id(session_id).map_err(model_status)?;
    let target = RunTarget::Existing(id);
    let run = sessions.run(who, RunRequest { target, command }).await;
    run.map_err(engine_status)
}

/// Passes on the output of a command up to its end. Dropping this ends the command: its client disconnected.
pub(super) async fn to_end(
    run: &mut Run,
    mut take: impl FnMut(Stream, &[u8]),
) -> Result<Outcome, Status> {
    while let Some(event) = run.next().await {
        match event.map_err(broken)? {
            RunEvent::Started { .. } => {}
            RunEvent::Stdout(bytes) => take(Stream::Stdout, &bytes),
            RunEvent::Stderr(bytes) => take(Stream::Stderr, &bytes),
            RunEvent::Exited(outcome) => return Ok(outcome),
        }
    }
    Err(to_status(Code::Internal, "the run ended without an end"))
}

/// An error after the command has begun: it must not be run twice, so codes of [`RUN_AGAIN`] become `ABORTED`.
pub(super) fn broken(error: Error) -> Status {
    let status = engine_status(error);
    if RUN_AGAIN.contains(&status.code()) {
        return Status::aborted(status.message());
    }
    status
}

fn not_started(error: Error) -> Status {
    let Error::SessionBusy { max, .. } = error else {
        return engine_status(error);
    };
    // The Go server's text. Here only runs that are not over count.
    let message = format!("background run limit reached ({max} active runs); wait for one to end");
    to_status(Code::Exhausted, &message)
}

async fn start(
    sessions: &Sessions,
    who: &Principal,
    request: pb::ExecRequest,
) -> Result<pb::ExecResponse, Status> {
    let command = sandbox_v1::background_command(&request).map_err(model_status)?;
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let target = RunTarget::Existing(id);
    let started = sessions
        .start_background(who, RunRequest { target, command })
        .await
        .map_err(not_started)?;
    Ok(pb::ExecResponse {
        session_id: request.session_id,
        run_id: started.run.id.to_string(),
        status: "started".to_owned(),
        language: request.language,
        ..pb::ExecResponse::default()
    })
}
