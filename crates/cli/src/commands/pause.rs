//! `k8e sandbox pause` and `resume`: stops and continues all processes of a session.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;

pub(super) const LONG_ABOUT: &str = "\
Pause a session: stop all its processes until it is resumed.

Memory, files and processes are kept, also when the server is stopped, killed or restarted meanwhile.
Commands, background runs and shells in progress continue after `k8e sandbox resume`; new ones are
refused. A paused session uses no CPU but keeps its memory.

Timeouts keep counting: a command whose --timeout is over ends when the session is resumed. The idle
timeout of a session does not count while it is paused, its TTL does. Sub-agents are paused with it.

Example:
  k8e sandbox pause $SID
  k8e sandbox sessions --phase paused
  k8e sandbox resume $SID";

/// Arguments of `k8e sandbox pause`.
#[derive(Args, Debug)]
pub struct PauseArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
}

/// Arguments of `k8e sandbox resume`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox resume $SID | jq -r .phase")]
pub struct ResumeArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
}

pub(crate) async fn pause(args: PauseArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::PauseSessionRequest {
        session_id: args.session_id,
    };
    let session = client.pause_session(request).await?.into_inner();
    output::json(&SessionJson::from(session)).map(|()| 0)
}

pub(crate) async fn resume(args: ResumeArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ResumeSessionRequest {
        session_id: args.session_id,
    };
    let session = client.resume_session(request).await?.into_inner();
    output::json(&SessionJson::from(session)).map(|()| 0)
}
