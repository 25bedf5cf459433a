//! Terminals (PTYs).

use crate::k8e_v1::{Answers, engine_status, model_status, stopping};
use futures::future::{BoxFuture, Either, select};
use futures::{FutureExt as _, StreamExt as _};
use k8e_api::convert::{self, sandbox_v1};
use k8e_api::sandbox_v1 as pb;
use k8e_api::sandbox_v1::terminal_stream_response::Frame;
use k8e_engine::{RunTarget, Sessions, TerminalEvent, TerminalRequest, TerminalStream};
use k8e_model::Principal;
use std::pin::pin;
use tonic::Status;

/// What the Go server answers when no process group is in the foreground.
const NO_GROUP: i32 = -1;

/// The command gets the session's environment and secrets too, unlike in the Go server.
pub(super) async fn create(
    sessions: &Sessions,
    who: &Principal,
    request: pb::CreateTerminalRequest,
) -> Result<pb::CreateTerminalResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let (command, (rows, cols)) = sandbox_v1::terminal_command(request).map_err(model_status)?;
    let request = TerminalRequest {
        target: RunTarget::Existing(id),
        command,
        rows,
        cols,
    };
    let made = sessions.create_terminal(who, request).await;
    let (view, _) = made.map_err(engine_status)?;
    Ok(pb::CreateTerminalResponse {
        terminal_id: view.id.to_string(),
        pid: view.pid,
    })
}

pub(super) async fn stream(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::TerminalStreamRequest,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Answers<pb::TerminalStreamResponse>, Status> {
    let id = sandbox_v1::terminal_id(&request.terminal_id).map_err(model_status)?;
    let stream = sessions.attach_terminal(who, &id).await;
    let reading = Reading {
        stream: stream.map_err(engine_status)?,
        stop: stop.boxed(),
    };
    Ok(futures::stream::unfold(Some(reading), next_frame).boxed())
}

pub(super) async fn write(
    sessions: &Sessions,
    who: &Principal,
    request: pb::TerminalWriteRequest,
) -> Result<pb::TerminalWriteResponse, Status> {
    let id = sandbox_v1::terminal_id(&request.terminal_id).map_err(model_status)?;
    convert::terminal_input(&request.data).map_err(model_status)?;
    let written = sessions.write_terminal(who, &id, request.data).await;
    written.map_err(engine_status)?;
    Ok(pb::TerminalWriteResponse { ok: true })
}

pub(super) async fn resize(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::TerminalResizeRequest,
) -> Result<pb::TerminalResizeResponse, Status> {
    let id = sandbox_v1::terminal_id(&request.terminal_id).map_err(model_status)?;
    let size = sandbox_v1::terminal_size(request.rows, request.cols).map_err(model_status)?;
    let resized = sessions.resize_terminal(who, &id, size).await;
    resized.map_err(engine_status)?;
    Ok(pb::TerminalResizeResponse { ok: true })
}

pub(super) async fn foreground(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::TerminalForegroundRequest,
) -> Result<pb::TerminalForegroundResponse, Status> {
    let id = sandbox_v1::terminal_id(&request.terminal_id).map_err(model_status)?;
    let foreground = sessions.terminal_foreground(who, &id).await;
    let foreground = foreground.map_err(engine_status)?;
    Ok(pb::TerminalForegroundResponse {
        process_group_id: match foreground.group {
            0 => NO_GROUP,
            group => group,
        },
        input_waiting: foreground.input_waiting == Some(true),
    })
}

pub(super) async fn signal(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::TerminalSignalRequest,
) -> Result<pb::TerminalSignalResponse, Status> {
    let id = sandbox_v1::terminal_id(&request.terminal_id).map_err(model_status)?;
    let signal = sandbox_v1::signal_number(request.signal).map_err(model_status)?;
    let group = sessions.signal_terminal(who, &id, signal).await;
    Ok(pb::TerminalSignalResponse {
        process_group_id: group.map_err(engine_status)?,
    })
}

pub(super) async fn destroy(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::TerminalDestroyRequest,
) -> Result<pb::TerminalDestroyResponse, Status> {
    let id = sandbox_v1::terminal_id(&request.terminal_id).map_err(model_status)?;
    let grace = sandbox_v1::terminal_grace(request.grace_ms).map_err(model_status)?;
    let destroyed = sessions.destroy_terminal(who, &id, Some(grace)).await;
    destroyed.map_err(engine_status)?;
    Ok(pb::TerminalDestroyResponse { ok: true })
}

/// A client that reads a terminal, until that ends or the server stops.
struct Reading {
    stream: TerminalStream,
    stop: BoxFuture<'static, ()>,
}

type Next = Option<(Result<pb::TerminalStreamResponse, Status>, Option<Reading>)>;

async fn next_frame(reading: Option<Reading>) -> Next {
    let mut reading = reading?;
    let event = match select(pin!(reading.stream.next()), &mut reading.stop).await {
        Either::Left((event, _)) => event?,
        Either::Right(_) => return Some((Err(stopping()), None)),
    };
    let frame = match event {
        Ok(TerminalEvent::Data(data)) => Frame::Data(data),
        Ok(TerminalEvent::Exited(exit)) => Frame::Exit(pb::TerminalExit {
            exit_code: exit.exit_code,
            signal: sandbox_v1::signal_name(exit.signal),
        }),
        Err(error) => return Some((Err(engine_status(error)), None)),
    };
    let frame = Some(frame);
    Some((Ok(pb::TerminalStreamResponse { frame }), Some(reading)))
}
