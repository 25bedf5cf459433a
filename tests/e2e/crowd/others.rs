//! Calls about what outlives a command: pauses, sub-agents, approvals, snapshots and exposed services.

use super::calls::Caller;
use k8e_api::v1;

impl Caller {
    pub(super) async fn pausing(&mut self) {
        let session_id = || self.session.clone();
        let mut client = self.client.clone();
        let pause = v1::PauseSessionRequest {
            session_id: session_id(),
        };
        let paused = self.time("PauseSession", client.pause_session(pause)).await;
        assert_eq!(paused.phase, "paused");
        let resume = v1::ResumeSessionRequest {
            session_id: session_id(),
        };
        let resumed = self.time("ResumeSession", client.resume_session(resume));
        assert_eq!(resumed.await.phase, "active");
    }

    pub(super) async fn sub_agent(&mut self) {
        let create = v1::CreateSubAgentRequest {
            parent_session_id: self.session.clone(),
            workspace_path: "/workspace/child".to_owned(),
            ..v1::CreateSubAgentRequest::default()
        };
        let mut client = self.client.clone();
        let made = self.try_time("CreateSubAgent", client.create_sub_agent(create));
        let Some(made) = made.await else {
            return;
        };
        let parent = std::mem::replace(&mut self.session, made.session_id);
        self.run().await;
        self.leave().await;
        self.session = parent;
    }

    pub(super) async fn approval(&mut self) {
        let ask = v1::RequestApprovalRequest {
            session_id: self.session.clone(),
            action: "drop the database".to_owned(),
            ..v1::RequestApprovalRequest::default()
        };
        let mut client = self.client.clone().approvals;
        let asked = self.time("RequestApproval", client.request_approval(ask));
        let approval_id = asked.await.approval_id;
        let list = v1::ListApprovalsRequest {
            session_id: self.session.clone(),
            all: false,
        };
        let listed = self.time("ListApprovals", client.list_approvals(list));
        assert_eq!(listed.await.approvals.len(), 1);
        let decide = v1::DecideApprovalRequest {
            approval_id: approval_id.clone(),
            approved: true,
            reason: "why not".to_owned(),
        };
        self.time("DecideApproval", client.decide_approval(decide))
            .await;
        let wait = v1::WaitApprovalRequest { approval_id };
        let decided = self.time("WaitApproval", client.wait_approval(wait));
        assert_eq!(decided.await.state, "approved");
    }

    pub(super) async fn snapshot(&mut self) {
        let mut client = self.client.clone().snapshots;
        let name = format!("snapshot-{}", self.roll(100));
        let layers = vec!["a".repeat(64)];
        let put = v1::PutSnapshotRequest {
            name: name.clone(),
            layers: layers.clone(),
        };
        self.time("PutSnapshot", client.put_snapshot(put)).await;
        let get = v1::GetSnapshotRequest { name };
        let got = self.time("GetSnapshot", client.get_snapshot(get)).await;
        assert_eq!(got.layers, layers);
        let list = client.list_snapshots(v1::ListSnapshotsRequest {});
        self.time("ListSnapshots", list).await;
    }

    pub(super) async fn exposure(&mut self) {
        let session_id = || self.session.clone();
        let mut client = self.client.clone();
        let port = 8000;
        let expose = v1::ExposeServiceRequest {
            session_id: session_id(),
            port,
            ..v1::ExposeServiceRequest::default()
        };
        self.time("ExposeService", client.expose_service(expose))
            .await;
        let list = v1::ListExposedRequest {
            session_id: session_id(),
        };
        let listed = self.time("ListExposed", client.list_exposed(list)).await;
        assert_eq!(listed.services.len(), 1);
        let unexpose = v1::UnexposeServiceRequest {
            session_id: session_id(),
            port,
        };
        let gone = self.time("UnexposeService", client.unexpose_service(unexpose));
        assert!(gone.await.ok);
    }
}
