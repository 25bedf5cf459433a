//! Background runs: they outlive the call that started them.

use super::{Answers, engine_status, model_status, stopping};
use futures::future::{BoxFuture, Either, select};
use futures::{FutureExt as _, StreamExt as _};
use k8e_api::v1::watch_run_response::Event;
use k8e_api::{convert, v1};
use k8e_engine::{RunWatch, RunWatchEvent, Sessions};
use k8e_model::Principal;
use std::pin::pin;
use tonic::Status;

pub(super) async fn start(
    sessions: &Sessions,
    who: &Principal,
    start: v1::RunStart,
) -> Result<v1::BackgroundRun, Status> {
    let request = convert::background_request(start).map_err(model_status)?;
    let started = sessions
        .start_background(who, request)
        .await
        .map_err(engine_status)?;
    Ok(v1::BackgroundRun {
        session_created: started.session_created,
        ..convert::background_run(started.run)
    })
}

pub(super) async fn get(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::GetRunRequest,
) -> Result<v1::BackgroundRun, Status> {
    let id = convert::run_id(&request.run_id).map_err(model_status)?;
    let run = sessions.poll_run(who, &id).await.map_err(engine_status)?;
    Ok(convert::background_run(run))
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ListRunsRequest,
) -> Result<v1::ListRunsResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let runs = sessions.list_runs(who, &id).await.map_err(engine_status)?;
    Ok(v1::ListRunsResponse {
        runs: runs.into_iter().map(convert::background_run).collect(),
    })
}

pub(super) async fn cancel(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::CancelRunRequest,
) -> Result<v1::BackgroundRun, Status> {
    let id = convert::run_id(&request.run_id).map_err(model_status)?;
    let run = sessions.cancel_run(who, &id).await.map_err(engine_status)?;
    Ok(convert::background_run(run))
}

pub(super) async fn watch(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::WatchRunRequest,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Answers<v1::WatchRunResponse>, Status> {
    let id = convert::run_id(&request.run_id).map_err(model_status)?;
    let watch = sessions.watch_run(who, &id).await.map_err(engine_status)?;
    let watching = Watching {
        watch,
        stop: stop.boxed(),
    };
    Ok(futures::stream::unfold(Some(watching), next_event).boxed())
}

/// A client that watches a run, until that ends or the server stops.
struct Watching {
    watch: RunWatch,
    stop: BoxFuture<'static, ()>,
}

type Next = Option<(Result<v1::WatchRunResponse, Status>, Option<Watching>)>;

async fn next_event(watching: Option<Watching>) -> Next {
    let mut watching = watching?;
    let event = match select(pin!(watching.watch.next()), &mut watching.stop).await {
        Either::Left((event, _)) => event?,
        Either::Right(_) => return Some((Err(stopping()), None)),
    };
    let event = match event {
        Ok(RunWatchEvent::Stdout(data)) => Event::Stdout(data),
        Ok(RunWatchEvent::Stderr(data)) => Event::Stderr(data),
        Ok(RunWatchEvent::Ended(run)) => Event::Ended(convert::background_run(*run)),
        Err(error) => return Some((Err(engine_status(error)), None)),
    };
    let event = Some(event);
    Some((Ok(v1::WatchRunResponse { event }), Some(watching)))
}
