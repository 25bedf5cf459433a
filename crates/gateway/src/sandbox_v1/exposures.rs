//! Exposed services: services of a session that have a URL.

use crate::k8e_v1::{engine_status, model_status};
use k8e_api::convert::{self, sandbox_v1};
use k8e_api::sandbox_v1 as pb;
use k8e_engine::Sessions;
use k8e_model::Principal;
use tonic::Status;

/// The URL has a token in it: those of the Go server are open to everybody who can guess a session's id.
pub(super) async fn expose(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::ExposeServiceRequest,
) -> Result<pb::ExposeServiceResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let port = convert::service_port(request.port.into()).map_err(model_status)?;
    let host = convert::service_host(&request.host).map_err(model_status)?;
    let exposed = sessions.expose(who, &id, port, host).await;
    let url = exposed.map_err(engine_status)?.url;
    Ok(pb::ExposeServiceResponse { url })
}

pub(super) async fn unexpose(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::UnexposeServiceRequest,
) -> Result<pb::UnexposeServiceResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let port = convert::service_port(request.port.into()).map_err(model_status)?;
    let ok = sessions.unexpose(who, &id, port).await;
    let ok = ok.map_err(engine_status)?;
    Ok(pb::UnexposeServiceResponse { ok })
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::ListExposedRequest,
) -> Result<pb::ListExposedResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let exposed = sessions.exposed(who, &id).await.map_err(engine_status)?;
    let services = exposed.into_iter().map(|service| pb::ExposedService {
        port: service.exposure.port.get().into(),
        url: service.url,
        host: service.exposure.host.to_string(),
        started_at: service.exposure.started_at / 1000,
    });
    Ok(pb::ListExposedResponse {
        services: services.collect(),
    })
}
