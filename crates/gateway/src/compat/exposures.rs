//! Services that have a URL.

use crate::grpc::{engine_status, model_status};
use k8e_api::convert::{self, compat};
use k8e_api::sandbox_v1 as k8e;
use k8e_engine::Sessions;
use k8e_model::Principal;
use tonic::Status;

/// The URL has a token in it: K8E's are open to everybody who can guess a session's id.
pub(super) async fn expose(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::ExposeServiceRequest,
) -> Result<k8e::ExposeServiceResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let port = convert::service_port(request.port.into()).map_err(model_status)?;
    let host = convert::service_host(&request.host).map_err(model_status)?;
    let exposed = sessions.expose(who, &id, port, host).await;
    let url = exposed.map_err(engine_status)?.url;
    Ok(k8e::ExposeServiceResponse { url })
}

pub(super) async fn unexpose(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::UnexposeServiceRequest,
) -> Result<k8e::UnexposeServiceResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let port = convert::service_port(request.port.into()).map_err(model_status)?;
    let ok = sessions.unexpose(who, &id, port).await;
    let ok = ok.map_err(engine_status)?;
    Ok(k8e::UnexposeServiceResponse { ok })
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::ListExposedRequest,
) -> Result<k8e::ListExposedResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let exposed = sessions.exposed(who, &id).await.map_err(engine_status)?;
    let services = exposed.into_iter().map(|service| k8e::ExposedService {
        port: service.exposure.port.get().into(),
        url: service.url,
        host: service.exposure.host.to_string(),
        started_at: service.exposure.started_at / 1000,
    });
    Ok(k8e::ListExposedResponse {
        services: services.collect(),
    })
}
