//! Exposed services: services of a session that have a URL.

use super::{engine_status, model_status};
use k8e_api::{convert, v1};
use k8e_engine::{ExposedService, Sessions};
use k8e_model::Principal;
use tonic::Status;

pub(super) async fn expose(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ExposeServiceRequest,
) -> Result<v1::ExposedService, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let port = convert::service_port(request.port.into()).map_err(model_status)?;
    let host = convert::service_host(&request.host).map_err(model_status)?;
    let exposed = sessions.expose(who, &id, port, host).await;
    exposed.map(service).map_err(engine_status)
}

pub(super) async fn unexpose(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::UnexposeServiceRequest,
) -> Result<v1::UnexposeServiceResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let port = convert::service_port(request.port.into()).map_err(model_status)?;
    let ok = sessions.unexpose(who, &id, port).await;
    let ok = ok.map_err(engine_status)?;
    Ok(v1::UnexposeServiceResponse { ok })
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ListExposedRequest,
) -> Result<v1::ListExposedResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let exposed = sessions.exposed(who, &id).await.map_err(engine_status)?;
    Ok(v1::ListExposedResponse {
        services: exposed.into_iter().map(service).collect(),
    })
}

fn service(exposed: ExposedService) -> v1::ExposedService {
    let ExposedService { exposure, url } = exposed;
    v1::ExposedService {
        port: exposure.port.get().into(),
        url,
        host: exposure.host.to_string(),
        started_at_unix_ms: exposure.started_at,
        token: exposure.token.reveal(),
        session_id: exposure.session.to_string(),
    }
}
