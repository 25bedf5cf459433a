//! Approvals: `ConfirmAction` and `ApproveAction`.

use crate::k8e_v1::{engine_status, model_status, stopping};
use k8e_api::convert::{self, sandbox_v1};
use k8e_api::sandbox_v1 as pb;
use k8e_engine::Sessions;
use k8e_model::{ApprovalState, ApprovalTime, Caller};
use tonic::Status;

/// Without an id it asks for approval, with one it waits for the decision. The Go server forgets a request whose waiting
/// client disconnects.
pub(super) async fn confirm(
    sessions: &Sessions,
    caller: &Caller,
    request: pb::ConfirmActionRequest,
    stopped: impl Future<Output = ()>,
) -> Result<pb::ConfirmActionResponse, Status> {
    if request.approval_id.is_empty() {
        let session = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
        let action = convert::approval_action(request.action).map_err(model_status)?;
        let asked = sessions.request_approval(caller, &session, action, ApprovalTime::default());
        let approval = asked.await.map_err(engine_status)?;
        return Ok(pb::ConfirmActionResponse {
            approval_id: approval.id.into(),
            approved: false,
        });
    }
    let id = sandbox_v1::approval_id(&request.approval_id).map_err(model_status)?;
    let approval = tokio::select! {
        approval = sessions.wait_approval(&caller.principal, &id) => approval.map_err(engine_status)?,
        () = stopped => return Err(stopping()),
    };
    let approved = matches!(approval.state, ApprovalState::Decided(decision) if decision.approved);
    Ok(pb::ConfirmActionResponse {
        approval_id: approval.id.into(),
        approved,
    })
}

pub(super) async fn approve(
    sessions: &Sessions,
    caller: &Caller,
    request: pb::ApproveActionRequest,
) -> Result<pb::ApproveActionResponse, Status> {
    let id = sandbox_v1::approval_id(&request.approval_id).map_err(model_status)?;
    let reason = convert::approval_reason(request.reason).map_err(model_status)?;
    let decided = sessions.decide_approval(caller, &id, request.approved, reason);
    decided.await.map_err(engine_status)?;
    Ok(pb::ApproveActionResponse { ok: true })
}
