//! `k8e sandbox destroy`.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// Arguments of `k8e sandbox destroy`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Everything in it is gone afterwards: save files first.

Example:
  k8e sandbox read $SID result.json --raw > result.json && k8e sandbox destroy $SID")]
pub struct DestroyArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,
}

#[derive(Serialize)]
struct DestroyJson {
    ok: bool,
    session_id: String,
}

pub(crate) async fn run(args: DestroyArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::DestroySessionRequest {
        session_id: args.session_id.clone(),
    };
    client.destroy_session(request).await?;
    output::json(&DestroyJson {
        ok: true,
        session_id: args.session_id,
    })
    .map(|()| 0)
}
