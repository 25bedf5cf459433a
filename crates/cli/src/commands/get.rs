//! `k8e sandbox get`: shows a session.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;

/// Arguments of `k8e sandbox get`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox get $SID | jq -r .phase")]
pub struct GetArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
}

pub(crate) async fn run(args: GetArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::GetSessionRequest {
        session_id: args.session_id,
    };
    let session = client.get_session(request).await?.into_inner();
    output::json(&SessionJson::from(session)).map(|()| 0)
}

/// Whether a session has ended.
pub(super) async fn ended(client: &mut Client, session_id: &str) -> Result<bool, Failure> {
    let request = v1::GetSessionRequest {
        session_id: session_id.to_owned(),
    };
    Ok(client.get_session(request).await?.into_inner().phase == "ended")
}
