//! Sessions, what they may reach, and their processes.

use crate::grpc::{engine_status, model_status};
use k8e_api::convert::{self, compat};
use k8e_api::sandbox_v1 as k8e;
use k8e_engine::{ListFilter, SessionView, Sessions};
use k8e_model::{Principal, SubAgentSpec};
use tonic::Status;

/// Always makes one: which session to use again is for K8E's clients to know.
pub(super) async fn create(
    sessions: &Sessions,
    who: &Principal,
    request: k8e::CreateSessionRequest,
) -> Result<k8e::CreateSessionResponse, Status> {
    let defaults = sessions.defaults();
    let spec = compat::session_spec(request, defaults.limits, defaults.lifetime);
    let mut spec = spec.map_err(model_status)?;
    spec.runtime = sessions.runtime_or_fallback(spec.runtime);
    let view = sessions.create(who, spec).await.map_err(engine_status)?;
    Ok(k8e::CreateSessionResponse {
        session_id: view.session.id.to_string(),
        pod_ip: String::new(),
    })
}

pub(super) async fn get(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::GetSessionRequest,
) -> Result<k8e::GetSessionResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let view = sessions.get(who, &id).await.map_err(engine_status)?;
    Ok(session(&view))
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::ListSessionsRequest,
) -> Result<k8e::ListSessionsResponse, Status> {
    let filter = ListFilter {
        phase: convert::phase_filter(&request.phase).map_err(model_status)?,
        tenant: None,
    };
    let list = sessions.list(who, filter).await.map_err(engine_status)?;
    Ok(k8e::ListSessionsResponse {
        sessions: list.iter().map(session).collect(),
    })
}

pub(super) async fn destroy(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::DestroySessionRequest,
) -> Result<k8e::DestroySessionResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    sessions.destroy(who, &id).await.map_err(engine_status)?;
    Ok(k8e::DestroySessionResponse { ok: true })
}

pub(super) async fn pause(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::PauseSessionRequest,
) -> Result<k8e::PauseSessionResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    sessions.pause(who, &id).await.map_err(engine_status)?;
    Ok(k8e::PauseSessionResponse { ok: true })
}

pub(super) async fn resume(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::ResumeSessionRequest,
) -> Result<k8e::ResumeSessionResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    sessions.resume(who, &id).await.map_err(engine_status)?;
    Ok(k8e::ResumeSessionResponse { ok: true })
}

/// Any session can have them; K8E's must have a tenant, and its sub-agents cannot run anything.
pub(super) async fn run_sub_agent(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::RunSubAgentRequest,
) -> Result<k8e::RunSubAgentResponse, Status> {
    let parent = compat::session_id(&request.parent_session_id).map_err(model_status)?;
    let spec = SubAgentSpec::new(&request.agent_type, &request.workspace_path);
    let spec = spec.map_err(model_status)?;
    let made = sessions.create_sub_agent(who, &parent, spec).await;
    let session_id = made.map_err(engine_status)?.session.id.to_string();
    Ok(k8e::RunSubAgentResponse { session_id })
}

pub(super) async fn update_hosts(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::UpdateAllowedHostsRequest,
) -> Result<k8e::UpdateAllowedHostsResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let policy = convert::allowed_hosts(&request.hosts).map_err(model_status)?;
    let now = sessions.set_allowed_hosts(who, &id, policy).await;
    let hosts = compat::allowed_hosts(&now.map_err(engine_status)?);
    Ok(k8e::UpdateAllowedHostsResponse { hosts })
}

pub(super) async fn processes(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::GetProcessesRequest,
) -> Result<k8e::GetProcessesResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let processes = sessions.processes(who, &id).await.map_err(engine_status)?;
    let processes = processes.into_iter().map(|process| k8e::ProcessInfo {
        pid: process.pid,
        comm: String::from_utf8_lossy(&process.comm).into_owned(),
        state: process.state.to_string(),
    });
    Ok(k8e::GetProcessesResponse {
        processes: processes.collect(),
    })
}

fn session(view: &SessionView) -> k8e::GetSessionResponse {
    compat::session(&view.session, view.expires_at, view.background_runs)
}
