//! Commands that are waited for, and those in the background.

use crate::grpc::{engine_status, model_status};
use k8e_api::convert::compat;
use k8e_api::sandbox_v1 as k8e;
use k8e_api::status::to_status;
use k8e_engine::{Error, Run, RunEvent, RunRequest, RunTarget, Sessions};
use k8e_model::{Code, Command, Outcome, Principal};
use tonic::Status;

/// K8E's command line takes these for a session that expired, makes a new one and runs the command
/// again.
const RUN_AGAIN: [tonic::Code; 3] = [
    tonic::Code::NotFound,
    tonic::Code::FailedPrecondition,
    tonic::Code::Unavailable,
];

pub(super) async fn exec(
    sessions: &Sessions,
    who: &Principal,
    request: k8e::ExecRequest,
) -> Result<k8e::ExecResponse, Status> {
    if request.background {
        return start(sessions, who, request).await;
    }
    let command = compat::command(&request).map_err(model_status)?;
    let mut run = run(sessions, who, &request.session_id, command).await?;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let outcome = to_end(&mut run, |stream, bytes| match stream {
        Stream::Stdout => stdout.extend_from_slice(bytes),
        Stream::Stderr => stderr.extend_from_slice(bytes),
    });
    let outcome = outcome.await?;
    Ok(k8e::ExecResponse {
        session_id: request.session_id,
        language: request.language,
        ..compat::exec_response(&outcome, stdout, stderr)
    })
}

pub(super) async fn poll(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::PollRunRequest,
) -> Result<k8e::PollRunResponse, Status> {
    let id = compat::run_id(&request.run_id).map_err(model_status)?;
    let run = sessions.poll_run(who, &id).await.map_err(engine_status)?;
    Ok(compat::poll_response(run))
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
    let id = compat::session_id(session_id).map_err(model_status)?;
    let target = RunTarget::Existing(id);
    let run = sessions.run(who, RunRequest { target, command }).await;
    run.map_err(engine_status)
}

/// Hands on what a command writes, up to its end. Dropping this ends the command: its caller left.
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

/// What goes wrong once a command has begun: it must not be run twice, so it is told another code.
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
    // In K8E's words. Here only those count that are not over.
    let message = format!("background run limit reached ({max} active runs); wait for one to end");
    to_status(Code::Exhausted, &message)
}

async fn start(
    sessions: &Sessions,
    who: &Principal,
    request: k8e::ExecRequest,
) -> Result<k8e::ExecResponse, Status> {
    let command = compat::background_command(&request).map_err(model_status)?;
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let target = RunTarget::Existing(id);
    let started = sessions
        .start_background(who, RunRequest { target, command })
        .await
        .map_err(not_started)?;
    Ok(k8e::ExecResponse {
        session_id: request.session_id,
        run_id: started.run.id.to_string(),
        status: "started".to_owned(),
        language: request.language,
        ..k8e::ExecResponse::default()
    })
}
