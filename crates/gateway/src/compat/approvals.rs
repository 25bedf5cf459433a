//! Confirm and approve.

use crate::grpc::{engine_status, model_status, stopping};
use k8e_api::convert::{self, compat};
use k8e_api::sandbox_v1 as k8e;
use k8e_engine::Sessions;
use k8e_model::{ApprovalState, ApprovalTime, Caller};
use tonic::Status;

/// Without an id it asks, with one it waits for the answer. K8E's forgets a question when who waits goes away.
pub(super) async fn confirm(
    sessions: &Sessions,
    caller: &Caller,
    request: k8e::ConfirmActionRequest,
    stopped: impl Future<Output = ()>,
) -> Result<k8e::ConfirmActionResponse, Status> {
    if request.approval_id.is_empty() {
        let session = compat::session_id(&request.session_id).map_err(model_status)?;
        let action = convert::approval_action(request.action).map_err(model_status)?;
        let asked = sessions.request_approval(caller, &session, action, ApprovalTime::default());
        let approval = asked.await.map_err(engine_status)?;
        return Ok(k8e::ConfirmActionResponse {
            approval_id: approval.id.into(),
            approved: false,
        });
    }
    let id = compat::approval_id(&request.approval_id).map_err(model_status)?;
    let approval = tokio::select! {
        approval = sessions.wait_approval(&caller.principal, &id) => approval.map_err(engine_status)?,
        () = stopped => return Err(stopping()),
    };
    let approved = matches!(approval.state, ApprovalState::Decided(decision) if decision.approved);
    Ok(k8e::ConfirmActionResponse {
        approval_id: approval.id.into(),
        approved,
    })
}

pub(super) async fn approve(
    sessions: &Sessions,
    caller: &Caller,
    request: k8e::ApproveActionRequest,
) -> Result<k8e::ApproveActionResponse, Status> {
    let id = compat::approval_id(&request.approval_id).map_err(model_status)?;
    let reason = convert::approval_reason(request.reason).map_err(model_status)?;
    let decided = sessions.decide_approval(caller, &id, request.approved, reason);
    decided.await.map_err(engine_status)?;
    Ok(k8e::ApproveActionResponse { ok: true })
}
