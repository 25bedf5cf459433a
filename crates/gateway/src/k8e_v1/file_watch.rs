//! `WatchFiles`: changes in a directory of a session, as they happen.

use super::{Answers, engine_status, files, stopping};
use futures::future::{BoxFuture, Either, select};
use futures::{FutureExt as _, StreamExt as _};
use k8e_api::v1;
use k8e_engine::{FileEvent, FileWatch, Sessions};
use k8e_model::Principal;
use std::pin::pin;
use tonic::Status;

pub(super) async fn watch(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::WatchFilesRequest,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Answers<v1::WatchFilesResponse>, Status> {
    let (id, path) = files::place(&request.session_id, &request.path)?;
    let watch = sessions
        .watch_files(who, &id, &path, request.recursive)
        .await
        .map_err(engine_status)?;
    let watching = Watching {
        watch,
        stop: stop.boxed(),
    };
    let started = futures::stream::iter([Ok(v1::WatchFilesResponse { events: Vec::new() })]);
    // The stream owns the watch: a client that disconnects ends it in the guest.
    let rest = futures::stream::unfold(Some(watching), next_events);
    Ok(started.chain(rest).boxed())
}

/// A client that watches files, until the session ends or the server stops.
struct Watching {
    watch: FileWatch,
    stop: BoxFuture<'static, ()>,
}

type Next = Option<(Result<v1::WatchFilesResponse, Status>, Option<Watching>)>;

async fn next_events(watching: Option<Watching>) -> Next {
    let mut watching = watching?;
    let events = match select(pin!(watching.watch.next()), &mut watching.stop).await {
        Either::Left((events, _)) => events,
        Either::Right(_) => return Some((Err(stopping()), None)),
    };
    Some(match events {
        Ok(events) => {
            let events = events.into_iter().map(file_event).collect();
            (Ok(v1::WatchFilesResponse { events }), Some(watching))
        }
        Err(error) => (Err(engine_status(error)), None),
    })
}

fn file_event(event: FileEvent) -> v1::FileEvent {
    v1::FileEvent {
        r#type: event.change.as_str().to_owned(),
        path: event.path,
        directory: event.directory,
        rename_id: event.rename_id,
    }
}
