//! Terminals.

use crate::grpc::{Answers, engine_status, model_status, stopping};
use futures::future::{BoxFuture, Either, select};
use futures::{FutureExt as _, StreamExt as _};
use k8e_api::convert::{self, compat};
use k8e_api::sandbox_v1 as k8e;
use k8e_api::sandbox_v1::terminal_stream_response::Frame;
use k8e_engine::{RunTarget, Sessions, TerminalEvent, TerminalRequest, TerminalStream};
use k8e_model::Principal;
use std::pin::pin;
use tonic::Status;

/// What K8E says when nobody is in the foreground.
const NO_GROUP: i32 = -1;

/// Gives the command the session's environment and secrets too, which K8E forgets.
pub(super) async fn create(
    sessions: &Sessions,
    who: &Principal,
    request: k8e::CreateTerminalRequest,
) -> Result<k8e::CreateTerminalResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let (command, (rows, cols)) = compat::terminal_command(request).map_err(model_status)?;
    let request = TerminalRequest {
        target: RunTarget::Existing(id),
        command,
        rows,
        cols,
    };
    let made = sessions.create_terminal(who, request).await;
    let (view, _) = made.map_err(engine_status)?;
    Ok(k8e::CreateTerminalResponse {
        terminal_id: view.id.to_string(),
        pid: view.pid,
    })
}

pub(super) async fn stream(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::TerminalStreamRequest,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Answers<k8e::TerminalStreamResponse>, Status> {
    let id = compat::terminal_id(&request.terminal_id).map_err(model_status)?;
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
    request: k8e::TerminalWriteRequest,
) -> Result<k8e::TerminalWriteResponse, Status> {
    let id = compat::terminal_id(&request.terminal_id).map_err(model_status)?;
    convert::terminal_input(&request.data).map_err(model_status)?;
    let written = sessions.write_terminal(who, &id, request.data).await;
    written.map_err(engine_status)?;
    Ok(k8e::TerminalWriteResponse { ok: true })
}

pub(super) async fn resize(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::TerminalResizeRequest,
) -> Result<k8e::TerminalResizeResponse, Status> {
    let id = compat::terminal_id(&request.terminal_id).map_err(model_status)?;
    let size = compat::terminal_size(request.rows, request.cols).map_err(model_status)?;
    let resized = sessions.resize_terminal(who, &id, size).await;
    resized.map_err(engine_status)?;
    Ok(k8e::TerminalResizeResponse { ok: true })
}

pub(super) async fn foreground(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::TerminalForegroundRequest,
) -> Result<k8e::TerminalForegroundResponse, Status> {
    let id = compat::terminal_id(&request.terminal_id).map_err(model_status)?;
    let foreground = sessions.terminal_foreground(who, &id).await;
    let foreground = foreground.map_err(engine_status)?;
    Ok(k8e::TerminalForegroundResponse {
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
    request: &k8e::TerminalSignalRequest,
) -> Result<k8e::TerminalSignalResponse, Status> {
    let id = compat::terminal_id(&request.terminal_id).map_err(model_status)?;
    let signal = compat::signal_number(request.signal).map_err(model_status)?;
    let group = sessions.signal_terminal(who, &id, signal).await;
    Ok(k8e::TerminalSignalResponse {
        process_group_id: group.map_err(engine_status)?,
    })
}

pub(super) async fn destroy(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::TerminalDestroyRequest,
) -> Result<k8e::TerminalDestroyResponse, Status> {
    let id = compat::terminal_id(&request.terminal_id).map_err(model_status)?;
    let grace = compat::terminal_grace(request.grace_ms).map_err(model_status)?;
    let destroyed = sessions.destroy_terminal(who, &id, Some(grace)).await;
    destroyed.map_err(engine_status)?;
    Ok(k8e::TerminalDestroyResponse { ok: true })
}

/// Somebody who reads, until the terminal is over or the server stops.
struct Reading {
    stream: TerminalStream,
    stop: BoxFuture<'static, ()>,
}

type Next = Option<(Result<k8e::TerminalStreamResponse, Status>, Option<Reading>)>;

async fn next_frame(reading: Option<Reading>) -> Next {
    let mut reading = reading?;
    let event = match select(pin!(reading.stream.next()), &mut reading.stop).await {
        Either::Left((event, _)) => event?,
        Either::Right(_) => return Some((Err(stopping()), None)),
    };
    let frame = match event {
        Ok(TerminalEvent::Data(data)) => Frame::Data(data),
        Ok(TerminalEvent::Exited(exit)) => Frame::Exit(k8e::TerminalExit {
            exit_code: exit.exit_code,
            signal: compat::signal_name(exit.signal),
        }),
        Err(error) => return Some((Err(engine_status(error)), None)),
    };
    let frame = Some(frame);
    Some((Ok(k8e::TerminalStreamResponse { frame }), Some(reading)))
}
