//! `k8e sandbox subagent`.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;

pub(super) const LONG_ABOUT: &str = "\
Make a session that lives in the sandbox of another.

It sees the same /workspace, network and limits as its parent, and has a history, background runs and
shells of its own. Every command in it gets its parent's environment and secrets, K8E_SESSION_ID and
K8E_PARENT_SESSION_ID.

Destroying it ends what it started, and nothing of its parent's. It ends with its parent, and is
paused with it. A session has at most 16, and a sub-agent has none.

Example:
  SUB=$(k8e sandbox subagent $SID --path research | jq -r .session_id)
  k8e sandbox run 'pwd; ls ..' --session-id $SUB
  k8e sandbox destroy $SUB";

/// Arguments of `k8e sandbox subagent`.
#[derive(Args, Debug)]
pub struct SubagentArgs {
    /// The session whose sandbox it is to live in
    #[arg(value_name = "PARENT")]
    parent_session_id: String,

    /// Where its commands start: below /workspace, made if it is missing
    #[arg(
        long,
        default_value = "",
        value_name = "PATH",
        hide_default_value = true
    )]
    path: String,

    /// What kind of agent it is, in a word of yours
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
