//! Calls whose engine side is not here yet.

use k8e_api::sandbox_v1 as k8e;
use k8e_api::status::to_status;
use k8e_engine::Sessions;
use k8e_model::{Code, Principal};
use tonic::Status;

pub(super) async fn pause(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::PauseSessionRequest,
) -> Result<k8e::PauseSessionResponse, Status> {
    Err(not_yet("PauseSession"))
}

pub(super) async fn resume(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::ResumeSessionRequest,
) -> Result<k8e::ResumeSessionResponse, Status> {
    Err(not_yet("ResumeSession"))
}

pub(super) async fn run_sub_agent(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::RunSubAgentRequest,
) -> Result<k8e::RunSubAgentResponse, Status> {
    Err(not_yet("RunSubAgent"))
}

pub(super) async fn confirm(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::ConfirmActionRequest,
) -> Result<k8e::ConfirmActionResponse, Status> {
    Err(not_yet("ConfirmAction"))
}

pub(super) async fn approve(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::ApproveActionRequest,
) -> Result<k8e::ApproveActionResponse, Status> {
    Err(not_yet("ApproveAction"))
}

pub(super) async fn snapshot_put(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::SnapshotPutRequest,
) -> Result<k8e::SnapshotPutResponse, Status> {
    Err(not_yet("SnapshotPut"))
}

pub(super) async fn snapshot_get(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::SnapshotGetRequest,
) -> Result<k8e::SnapshotGetResponse, Status> {
    Err(not_yet("SnapshotGet"))
}

pub(super) async fn snapshot_list(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::SnapshotListRequest,
) -> Result<k8e::SnapshotListResponse, Status> {
    Err(not_yet("SnapshotList"))
}

pub(super) async fn expose(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::ExposeServiceRequest,
) -> Result<k8e::ExposeServiceResponse, Status> {
    Err(not_yet("ExposeService"))
}

pub(super) async fn unexpose(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::UnexposeServiceRequest,
) -> Result<k8e::UnexposeServiceResponse, Status> {
    Err(not_yet("UnexposeService"))
}

pub(super) async fn list_exposed(
    _sessions: &Sessions,
    _who: &Principal,
    _request: k8e::ListExposedRequest,
) -> Result<k8e::ListExposedResponse, Status> {
    Err(not_yet("ListExposed"))
}

fn not_yet(call: &str) -> Status {
    to_status(
        Code::Unsupported,
        &format!("{call} is not served by this version"),
    )
}
