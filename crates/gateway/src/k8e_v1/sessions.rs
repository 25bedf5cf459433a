//! Sessions, the server's status and pools, and processes.

use super::{engine_status, model_status};
use k8e_api::{convert, v1};
use k8e_engine::{ForkMemory, ForkedSession, ListFilter, PoolStatus, SessionView, Sessions};
use k8e_model::Principal;
use tonic::Status;

pub(super) fn status(sessions: &Sessions, who: &Principal) -> v1::Status {
    let status = sessions.status();
    let runtimes = status.runtimes.into_iter().map(|runtime| v1::Runtime {
        name: runtime.kind.to_string(),
        usable: runtime.usable,
        reason: runtime.reason,
    });
    v1::Status {
        version: status.version.to_owned(),
        runtimes: runtimes.collect(),
        default_runtime: status
            .default_runtime
            .map(|kind| kind.to_string())
            .unwrap_or_default(),
        default_limits: Some(convert::limits(&status.limits)),
        sessions_active: u32::try_from(status.active).unwrap_or(u32::MAX),
        sessions_max: u32::try_from(status.max).unwrap_or(u32::MAX),
        network: status.network,
        started_at_unix_ms: status.started_at,
        tenants: who.tenants().entries(),
        default_tenant: who.tenants().default_tenant().to_string(),
    }
}

pub(super) fn pools(sessions: &Sessions) -> v1::GetPoolsResponse {
    v1::GetPoolsResponse {
        pools: sessions.pools().into_iter().map(pool).collect(),
    }
}

pub(super) fn find_run_session(
    sessions: &Sessions,
    who: &Principal,
    request: v1::CreateSessionRequest,
) -> Result<v1::FindRunSessionResponse, Status> {
    let spec = convert::session_spec(request).map_err(model_status)?;
    let found = sessions.run_session(who, &spec);
    Ok(v1::FindRunSessionResponse {
        session_id: found.map(|id| id.to_string()).unwrap_or_default(),
    })
}

pub(super) async fn create(
    sessions: &Sessions,
    who: &Principal,
    request: v1::CreateSessionRequest,
) -> Result<v1::Session, Status> {
    let spec = convert::session_spec(request).map_err(model_status)?;
    sessions
        .create(who, spec)
        .await
        .map(session)
        .map_err(engine_status)
}

pub(super) async fn get(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::GetSessionRequest,
) -> Result<v1::Session, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    sessions
        .get(who, &id)
        .await
        .map(session)
        .map_err(engine_status)
}

pub(super) async fn list(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ListSessionsRequest,
) -> Result<v1::ListSessionsResponse, Status> {
    let filter = ListFilter {
        phase: convert::phase_filter(&request.phase).map_err(model_status)?,
        tenant: convert::tenant_filter(&request.tenant).map_err(model_status)?,
    };
    let list = sessions.list(who, filter).await.map_err(engine_status)?;
    Ok(v1::ListSessionsResponse {
        sessions: list.into_iter().map(session).collect(),
    })
}

pub(super) async fn destroy(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::DestroySessionRequest,
) -> Result<v1::DestroySessionResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    sessions.destroy(who, &id).await.map_err(engine_status)?;
    Ok(v1::DestroySessionResponse {})
}

pub(super) async fn pause(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::PauseSessionRequest,
) -> Result<v1::Session, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let paused = sessions.pause(who, &id).await;
    paused.map(session).map_err(engine_status)
}

pub(super) async fn resume(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ResumeSessionRequest,
) -> Result<v1::Session, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let resumed = sessions.resume(who, &id).await;
    resumed.map(session).map_err(engine_status)
}

pub(super) async fn fork(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ForkSessionRequest,
) -> Result<v1::ForkSessionResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let spec = convert::fork_spec(request).map_err(model_status)?;
    let forked = sessions.fork(who, &id, spec).await.map_err(engine_status)?;
    Ok(v1::ForkSessionResponse {
        stopped_us: u64::try_from(forked.stopped.as_micros()).unwrap_or(u64::MAX),
        forks: forked.sessions.into_iter().map(forked_session).collect(),
    })
}

fn forked_session(fork: ForkedSession) -> v1::Fork {
    let session_id = fork.id.to_string();
    match fork.made {
        Ok((view, memory)) => v1::Fork {
            session_id,
            session: Some(session(view)),
            memory: memory.as_str().to_owned(),
            reason: match memory {
                ForkMemory::Copied => String::new(),
                ForkMemory::None { reason } => reason,
            },
            ..v1::Fork::default()
        },
        Err(error) => v1::Fork {
            session_id,
            error: error.to_string(),
            error_code: error.code().as_str().to_owned(),
            ..v1::Fork::default()
        },
    }
}

pub(super) async fn create_sub_agent(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::CreateSubAgentRequest,
) -> Result<v1::Session, Status> {
    let parent = convert::session_id(&request.parent_session_id).map_err(model_status)?;
    let spec = convert::sub_agent_spec(request).map_err(model_status)?;
    let made = sessions.create_sub_agent(who, &parent, spec).await;
    made.map(session).map_err(engine_status)
}

pub(super) async fn processes(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::ListProcessesRequest,
) -> Result<v1::ListProcessesResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let processes = sessions.processes(who, &id).await.map_err(engine_status)?;
    let processes = processes.into_iter().map(|process| v1::Process {
        pid: process.pid,
        ppid: process.ppid,
        state: process.state.to_string(),
        comm: String::from_utf8_lossy(&process.comm).into_owned(),
        cmdline: process.cmdline,
        rss_bytes: process.rss_bytes,
        uid: process.uid,
    });
    Ok(v1::ListProcessesResponse {
        processes: processes.collect(),
    })
}

fn pool(pool: PoolStatus) -> v1::Pool {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    v1::Pool {
        template: pool.template.to_string(),
        runtime: pool.runtime.to_string(),
        min: count(pool.size.min()),
        max: count(pool.size.max()),
        target: count(pool.target),
        ready: count(pool.ready),
        pending: count(pool.pending),
        hits: pool.hits,
        misses: pool.misses,
        claim_p50_us: pool.claim_p50_us,
        claim_p99_us: pool.claim_p99_us,
        failure: pool.failure,
        unfit: pool.unfit,
    }
}

fn session(view: SessionView) -> v1::Session {
    v1::Session {
        expires_at_unix_ms: view.expires_at.unwrap_or(0),
        network: view.network,
        oom_kills: view.limit_events.oom_kills,
        pids_refused: view.limit_events.pids_refused,
        background_runs: u32::try_from(view.background_runs).unwrap_or(u32::MAX),
        ..convert::session(&view.session)
    }
}

pub(super) async fn metrics(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::GetSessionMetricsRequest,
) -> Result<v1::SessionMetrics, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let metrics = sessions.session_metrics(who, &id).await;
    let metrics = metrics.map_err(engine_status)?;
    Ok(v1::SessionMetrics {
        at_unix_ms: metrics.at,
        cpu_millis: metrics.cpu_millis,
        cpu_used_percent: metrics.cpu_used_percent,
        cpu_time_us: u64::try_from(metrics.cpu_time.as_micros()).unwrap_or(u64::MAX),
        memory_used_bytes: metrics.memory_used_bytes,
        memory_total_bytes: metrics.memory_total_bytes,
        memory_cache_bytes: metrics.memory_cache_bytes,
        disk_used_bytes: metrics.disk_used_bytes,
        disk_total_bytes: metrics.disk_total_bytes,
    })
}
