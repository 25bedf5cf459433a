//! Terminals (PTYs): create, attach, type, resize, signal.

use super::{Answers, engine_status, model_status, stopping};
use futures::future::{BoxFuture, Either, select};
use futures::{FutureExt as _, StreamExt as _};
use k8e_api::v1::terminal_event::Event;
use k8e_api::{convert, v1};
use k8e_engine::{
    Sessions, TerminalEvent, TerminalExit, TerminalRequest, TerminalStream, TerminalView,
};
use k8e_model::Principal;
use std::pin::pin;
use tonic::Status;

pub(super) async fn create(
    sessions: &Sessions,
    who: &Principal,
    mut request: v1::CreateTerminalRequest,
) -> Result<v1::Terminal, Status> {
    let (command, (rows, cols)) = convert::terminal_command(&mut request).map_err(model_status)?;
    let target =
        convert::run_target(&request.session_id, false, request.create).map_err(model_status)?;
    let request = TerminalRequest {
        target,
        command,
        rows,
        cols,
    };
    let (view, session_created) = sessions
        .create_terminal(who, request)
        .await
        .map_err(engine_status)?;
    Ok(v1::Terminal {
        session_created,
        ..terminal(view)
    })
}

pub(super) async fn attach(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::AttachTerminalRequest,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Answers<v1::TerminalEvent>, Status> {
    let id = convert::terminal_id(&request.terminal_id).map_err(model_status)?;
    let stream = sessions
        .attach_terminal(who, &id)
        .await
        .map_err(engine_status)?;
    let reading = Reading {
        stream,
        stop: stop.boxed(),
    };
    Ok(futures::stream::unfold(Some(reading), next_event).boxed())
}

pub(super) async fn write(
    sessions: &Sessions,
    who: &Principal,
    request: v1::WriteTerminalRequest,
) -> Result<v1::WriteTerminalResponse, Status> {
    let id = convert::terminal_id(&request.terminal_id).map_err(model_status)?;
    convert::terminal_input(&request.data).map_err(model_status)?;
    let written = sessions.write_terminal(who, &id, request.data).await;
    written.map_err(engine_status)?;
    Ok(v1::WriteTerminalResponse {})
}

pub(super) async fn resize(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ResizeTerminalRequest,
) -> Result<v1::ResizeTerminalResponse, Status> {
    let id = convert::terminal_id(&request.terminal_id).map_err(model_status)?;
    let size = convert::terminal_size(request.rows, request.cols).map_err(model_status)?;
    let resized = sessions.resize_terminal(who, &id, size).await;
    resized.map_err(engine_status)?;
    Ok(v1::ResizeTerminalResponse {})
}

pub(super) async fn foreground(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::TerminalForegroundRequest,
) -> Result<v1::TerminalForegroundResponse, Status> {
    let id = convert::terminal_id(&request.terminal_id).map_err(model_status)?;
    let foreground = sessions.terminal_foreground(who, &id).await;
    let foreground = foreground.map_err(engine_status)?;
    let input_waiting = match foreground.input_waiting {
        Some(true) => v1::InputWaiting::Yes,
        Some(false) => v1::InputWaiting::No,
        None => v1::InputWaiting::Unspecified,
    };
    Ok(v1::TerminalForegroundResponse {
        process_group_id: foreground.group,
        input_waiting: input_waiting.into(),
    })
}

pub(super) async fn signal(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::SignalTerminalRequest,
) -> Result<v1::SignalTerminalResponse, Status> {
    let id = convert::terminal_id(&request.terminal_id).map_err(model_status)?;
    let group = sessions.signal_terminal(who, &id, request.signal).await;
    Ok(v1::SignalTerminalResponse {
        process_group_id: group.map_err(engine_status)?,
    })
}

pub(super) async fn destroy(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::DestroyTerminalRequest,
) -> Result<v1::DestroyTerminalResponse, Status> {
    let id = convert::terminal_id(&request.terminal_id).map_err(model_status)?;
    let grace = convert::terminal_grace(request.grace_ms).map_err(model_status)?;
    let destroyed = sessions.destroy_terminal(who, &id, grace).await;
    destroyed.map_err(engine_status)?;
    Ok(v1::DestroyTerminalResponse {})
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ListTerminalsRequest,
) -> Result<v1::ListTerminalsResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let views = sessions.list_terminals(who, &id).await;
    let views = views.map_err(engine_status)?;
    Ok(v1::ListTerminalsResponse {
        terminals: views.into_iter().map(terminal).collect(),
    })
}

/// A client that reads a terminal, until that ends or the server stops.
struct Reading {
    stream: TerminalStream,
    stop: BoxFuture<'static, ()>,
}

type Next = Option<(Result<v1::TerminalEvent, Status>, Option<Reading>)>;

async fn next_event(reading: Option<Reading>) -> Next {
    let mut reading = reading?;
    let event = match select(pin!(reading.stream.next()), &mut reading.stop).await {
        Either::Left((event, _)) => event?,
        Either::Right(_) => return Some((Err(stopping()), None)),
    };
    let event = match event {
        Ok(TerminalEvent::Data(data)) => Event::Data(data),
        Ok(TerminalEvent::Exited(exit)) => Event::Exited(exited(exit)),
        Err(error) => return Some((Err(engine_status(error)), None)),
    };
    let event = Some(event);
    Some((Ok(v1::TerminalEvent { event }), Some(reading)))
}

fn terminal(view: TerminalView) -> v1::Terminal {
    v1::Terminal {
        terminal_id: view.id.to_string(),
        session_id: view.session.to_string(),
        pid: view.pid,
        program: view.program,
        rows: view.rows,
        cols: view.cols,
        created_at_unix_ms: view.created_at,
        exited: view.exited.map(exited),
        session_created: false,
    }
}

fn exited(exit: TerminalExit) -> v1::TerminalExited {
    v1::TerminalExited {
        exit_code: exit.exit_code,
        signal: exit.signal,
    }
}
