//! `k8e.v1.Approvals`: asked by agents, decided by people.

use super::{Answer, engine_status, model_status, stopping};
use crate::auth::{caller, principal};
use k8e_api::v1::approvals_server::Approvals;
use k8e_api::{convert, v1};
use k8e_engine::{ApprovalFilter, Sessions};
use tokio::sync::watch;
use tonic::{Request, Response};

/// The service.
pub(super) struct Service {
    pub(super) sessions: Sessions,
    pub(super) stopped: watch::Receiver<bool>,
}

// === impl Service ===

#[tonic::async_trait]
impl Approvals for Service {
    async fn request_approval(
        &self,
        request: Request<v1::RequestApprovalRequest>,
    ) -> Answer<v1::Approval> {
        let caller = caller(&request)?;
        let asked = convert::approval_request(request.into_inner()).map_err(model_status)?;
        let (session, action, time) = asked;
        let sessions = &self.sessions;
        let approval = sessions
            .request_approval(&caller, &session, action, time)
            .await;
        let approval = approval.map_err(engine_status)?;
        Ok(Response::new(convert::approval(approval)))
    }

    async fn wait_approval(
        &self,
        request: Request<v1::WaitApprovalRequest>,
    ) -> Answer<v1::Approval> {
        let who = principal(&request)?;
        let id = convert::approval_id(&request.get_ref().approval_id).map_err(model_status)?;
        let approval = tokio::select! {
            approval = self.sessions.wait_approval(&who, &id) => approval.map_err(engine_status)?,
            () = crate::signal(&self.stopped) => return Err(stopping()),
        };
        Ok(Response::new(convert::approval(approval)))
    }

    async fn decide_approval(
        &self,
        request: Request<v1::DecideApprovalRequest>,
    ) -> Answer<v1::Approval> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let id = convert::approval_id(&request.approval_id).map_err(model_status)?;
        let reason = convert::approval_reason(request.reason).map_err(model_status)?;
        let decided = self
            .sessions
            .decide_approval(&caller, &id, request.approved, reason)
            .await;
        let approval = decided.map_err(engine_status)?;
        Ok(Response::new(convert::approval(approval)))
    }

    async fn list_approvals(
        &self,
        request: Request<v1::ListApprovalsRequest>,
    ) -> Answer<v1::ListApprovalsResponse> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let filter = ApprovalFilter {
            session: convert::session_filter(&request.session_id).map_err(model_status)?,
            all: request.all,
        };
        let listed = self.sessions.list_approvals(&who, &filter).await;
        let listed = listed.map_err(engine_status)?.into_iter();
        Ok(Response::new(v1::ListApprovalsResponse {
            approvals: listed.map(convert::approval).collect(),
        }))
    }
}
