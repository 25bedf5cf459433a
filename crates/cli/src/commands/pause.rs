//! `k8e sandbox pause` and `resume`.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;

pub(super) const LONG_ABOUT: &str = "\
Stop everything in a session until it is resumed.

Memory, files and processes stay as they are, also when the server is stopped, killed or started
again meanwhile. Commands, background runs and shells that are under way stand still and go on after
`k8e sandbox resume`; new ones are refused. It uses no CPU but keeps its memory.

Clocks go on: a command whose --timeout is over by then ends when the session is resumed. A session's
idle timeout does not count while it is paused, its ttl does. Its sub-agents are paused with it.

Example:
  k8e sandbox pause $SID
  k8e sandbox sessions --phase paused
  k8e sandbox resume $SID";

/// Arguments of `k8e sandbox pause`.
#[derive(Args, Debug)]
pub struct PauseArgs {
    /// The session
    #[arg(value_name = "SESSION")]
    session_id: String,
}

/// Arguments of `k8e sandbox resume`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox resume $SID | jq -r .phase")]
pub struct ResumeArgs {
    /// The session
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
