//! Egress: allowed hosts of a session, and the log of its attempts.

use super::{Answers, engine_status, model_status, stopping};
use futures::future::{BoxFuture, Either, select};
use futures::{FutureExt as _, StreamExt as _};
use k8e_api::{convert, v1};
use k8e_engine::{FlowStream, Sessions};
use k8e_model::{FlowVerdict, Principal};
use std::pin::pin;
use tonic::Status;

pub(super) async fn update(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::UpdateAllowedHostsRequest,
) -> Result<v1::UpdateAllowedHostsResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let policy = convert::allowed_hosts(&request.hosts).map_err(model_status)?;
    let now = sessions
        .set_allowed_hosts(who, &id, policy)
        .await
        .map_err(engine_status)?;
    Ok(v1::UpdateAllowedHostsResponse {
        hosts: now.entries(),
    })
}

pub(super) async fn watch(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::WatchEgressRequest,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Answers<v1::EgressFlow>, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let flows = sessions
        .watch_egress(who, &id, request.follow)
        .await
        .map_err(engine_status)?;
    let watching = Watching {
        flows,
        denied_only: request.denied_only,
        stop: stop.boxed(),
    };
    Ok(futures::stream::unfold(Some(watching), next_flow).boxed())
}

/// A client that watches egress, until the session ends or the server stops.
struct Watching {
    flows: FlowStream,
    denied_only: bool,
    stop: BoxFuture<'static, ()>,
}

type Next = Option<(Result<v1::EgressFlow, Status>, Option<Watching>)>;

/// A stop of the server is an error: a stream that just ends means that the session has ended.
async fn next_flow(watching: Option<Watching>) -> Next {
    let mut watching = watching?;
    loop {
        let flow = match select(pin!(watching.flows.next()), &mut watching.stop).await {
            Either::Left((flow, _)) => flow?,
            Either::Right(_) => return Some((Err(stopping()), None)),
        };
        if !watching.denied_only || flow.verdict == FlowVerdict::Denied {
            return Some((Ok(convert::egress_flow(flow)), Some(watching)));
        }
    }
}
