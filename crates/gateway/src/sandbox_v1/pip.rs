//! Installing Python packages, without a shell.

use super::exec::{run, to_end};
use crate::k8e_v1::model_status;
use k8e_api::convert::sandbox_v1;
use k8e_api::sandbox_v1 as pb;
use k8e_engine::Sessions;
use k8e_model::{Principal, RunStatus};
use tonic::Status;

pub(super) async fn install(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::PipInstallRequest,
) -> Result<pb::PipInstallResponse, Status> {
    let command = sandbox_v1::pip_command(&request.packages).map_err(model_status)?;
    let mut run = run(sessions, who, &request.session_id, command).await?;
    let mut output = Vec::new();
    let outcome = to_end(&mut run, |_, bytes| output.extend_from_slice(bytes)).await?;
    if outcome.status == RunStatus::TimedOut {
        output.extend_from_slice(b"\npip took too long and was ended\n");
    }
    // Both streams are in it.
    let (output, _) = sandbox_v1::text(output, 2 * sandbox_v1::OUTPUT_BYTES_MAX);
    Ok(pb::PipInstallResponse {
        output,
        exit_code: outcome.exit_code,
    })
}
