//! `k8e sandbox sessions`: lists sessions.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// Arguments of `k8e sandbox sessions`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox sessions | jq -r '.sessions[].session_id'
  k8e sandbox sessions --phase all --tenant my-project")]
pub struct SessionsArgs {
    /// Only sessions in this phase: creating, active, paused, terminating, ended or all
    #[arg(long, default_value = "active", value_name = "PHASE")]
    phase: String,

    /// Only sessions of this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
}

#[derive(Serialize)]
struct SessionsJson {
    sessions: Vec<SessionJson>,
}

pub(crate) async fn run(args: SessionsArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ListSessionsRequest {
        phase: args.phase,
        tenant: args.tenant.unwrap_or_default(),
    };
    let sessions = client.list_sessions(request).await?.into_inner().sessions;
    let sessions = sessions.into_iter().map(SessionJson::from).collect();
    output::json(&SessionsJson { sessions }).map(|()| 0)
}
