//! Installing Python packages, without a shell.

use super::exec::{run, to_end};
use crate::grpc::model_status;
use k8e_api::convert::compat;
use k8e_api::sandbox_v1 as k8e;
use k8e_engine::Sessions;
use k8e_model::{Principal, RunStatus};
use tonic::Status;

pub(super) async fn install(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::PipInstallRequest,
) -> Result<k8e::PipInstallResponse, Status> {
    let command = compat::pip_command(&request.packages).map_err(model_status)?;
    let mut run = run(sessions, who, &request.session_id, command).await?;
    let mut output = Vec::new();
    let outcome = to_end(&mut run, |_, bytes| output.extend_from_slice(bytes)).await?;
    if outcome.status == RunStatus::TimedOut {
        output.extend_from_slice(b"\npip took too long and was ended\n");
    }
    // Two streams are in it.
    let (output, _) = compat::text(output, 2 * compat::OUTPUT_BYTES_MAX);
    Ok(k8e::PipInstallResponse {
        output,
        exit_code: outcome.exit_code,
    })
}
