//! `k8e sandbox subagent`: creates a session in the sandbox of another.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;

pub(super) const LONG_ABOUT: &str = "\
Create a sub-agent: a session that shares the sandbox of another.

It has the same /workspace, network and limits as its parent, and its own history, background runs and
shells. Its commands get the environment and secrets of the parent, K8E_SESSION_ID and
K8E_PARENT_SESSION_ID.

Destroying it kills the processes that it started, and none of its parent. It is paused and ends with
its parent. A session has at most 16 sub-agents; a sub-agent cannot have any.

Example:
  SUB=$(k8e sandbox subagent $SID --path research | jq -r .session_id)
  k8e sandbox run 'pwd; ls ..' --session-id $SUB
  k8e sandbox destroy $SUB";

/// Arguments of `k8e sandbox subagent`.
#[derive(Args, Debug)]
pub struct SubagentArgs {
    /// Id of the parent session
    #[arg(value_name = "PARENT")]
    parent_session_id: String,

    /// Working directory of its commands, below /workspace; created if missing [default: /workspace]
    #[arg(
        long,
        default_value = "",
        value_name = "PATH",
        hide_default_value = true
    )]
    path: String,

    /// Type of the agent: any word, shown by `get`
    #[arg(
        long = "type",
        default_value = "",
        value_name = "WORD",
        hide_default_value = true
    )]
    agent_type: String,
}

pub(crate) async fn run(args: SubagentArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::CreateSubAgentRequest {
        parent_session_id: args.parent_session_id,
        agent_type: args.agent_type,
        workspace_path: args.path,
    };
    let session = client.create_sub_agent(request).await?.into_inner();
    output::json(&SessionJson::from(session)).map(|()| 0)
}
