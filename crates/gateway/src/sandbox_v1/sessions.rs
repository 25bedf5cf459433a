//! Sessions, their allowed hosts and their processes.

use crate::k8e_v1::{engine_status, model_status};
use k8e_api::convert::{self, sandbox_v1};
use k8e_api::sandbox_v1 as pb;
use k8e_engine::{ListFilter, SessionView, Sessions};
use k8e_model::{Principal, SubAgentSpec};
use tonic::Status;

/// Always creates a session: `sandbox.v1` clients decide themselves which one to use again.
pub(super) async fn create(
    sessions: &Sessions,
    who: &Principal,
    request: pb::CreateSessionRequest,
) -> Result<pb::CreateSessionResponse, Status> {
    let mut spec = sandbox_v1::session_spec(request).map_err(model_status)?;
    spec.runtime = sessions.runtime_or_fallback(spec.runtime);
    let view = sessions.create(who, spec).await.map_err(engine_status)?;
    Ok(pb::CreateSessionResponse {
        session_id: view.session.id.to_string(),
        pod_ip: String::new(),
    })
}

pub(super) async fn get(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::GetSessionRequest,
) -> Result<pb::GetSessionResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let view = sessions.get(who, &id).await.map_err(engine_status)?;
    Ok(session(&view))
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::ListSessionsRequest,
) -> Result<pb::ListSessionsResponse, Status> {
    let filter = ListFilter {
        phase: convert::phase_filter(&request.phase).map_err(model_status)?,
        tenant: None,
    };
    let list = sessions.list(who, filter).await.map_err(engine_status)?;
    Ok(pb::ListSessionsResponse {
        sessions: list.iter().map(session).collect(),
    })
}

pub(super) async fn destroy(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::DestroySessionRequest,
) -> Result<pb::DestroySessionResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    sessions.destroy(who, &id).await.map_err(engine_status)?;
    Ok(pb::DestroySessionResponse { ok: true })
}

pub(super) async fn pause(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::PauseSessionRequest,
) -> Result<pb::PauseSessionResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    sessions.pause(who, &id).await.map_err(engine_status)?;
    Ok(pb::PauseSessionResponse { ok: true })
}

pub(super) async fn resume(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::ResumeSessionRequest,
) -> Result<pb::ResumeSessionResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    sessions.resume(who, &id).await.map_err(engine_status)?;
    Ok(pb::ResumeSessionResponse { ok: true })
}

/// Any session can have sub-agents; in the Go server it must have a tenant, and its sub-agents cannot run anything.
pub(super) async fn run_sub_agent(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::RunSubAgentRequest,
) -> Result<pb::RunSubAgentResponse, Status> {
    let parent = sandbox_v1::session_id(&request.parent_session_id).map_err(model_status)?;
    let spec = SubAgentSpec::new(&request.agent_type, &request.workspace_path);
    let spec = spec.map_err(model_status)?;
    let made = sessions.create_sub_agent(who, &parent, spec).await;
    let session_id = made.map_err(engine_status)?.session.id.to_string();
    Ok(pb::RunSubAgentResponse { session_id })
}

pub(super) async fn update_hosts(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::UpdateAllowedHostsRequest,
) -> Result<pb::UpdateAllowedHostsResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let policy = convert::allowed_hosts(&request.hosts).map_err(model_status)?;
    let now = sessions.set_allowed_hosts(who, &id, policy).await;
    let hosts = sandbox_v1::allowed_hosts(&now.map_err(engine_status)?);
    Ok(pb::UpdateAllowedHostsResponse { hosts })
}

pub(super) async fn processes(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::GetProcessesRequest,
) -> Result<pb::GetProcessesResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let processes = sessions.processes(who, &id).await.map_err(engine_status)?;
    let processes = processes.into_iter().map(|process| pb::ProcessInfo {
        pid: process.pid,
        comm: String::from_utf8_lossy(&process.comm).into_owned(),
        state: process.state.to_string(),
    });
    Ok(pb::GetProcessesResponse {
        processes: processes.collect(),
    })
}

fn session(view: &SessionView) -> pb::GetSessionResponse {
    sandbox_v1::session(&view.session, view.expires_at, view.background_runs)
}
