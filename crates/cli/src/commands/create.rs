//! `k8e sandbox create`.

use super::hosts;
use super::spec::SpecArgs;
use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use crate::units;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;

/// What `k8e sandbox create --help` begins with.
pub(super) const LONG_ABOUT: &str = "\
Make a session: a sandbox that lives until it is destroyed, expires, or is not used for long enough.";

/// Arguments of `k8e sandbox create`.
#[derive(Args, Debug)]
#[command(after_long_help = concat!("\
Examples:
  SID=$(k8e sandbox create | jq -r .session_id)
  k8e sandbox create --memory 2GiB --cpus 2 --ttl 1h --label job=nightly
  k8e sandbox create --allowed-hosts @python,api.example.com
  k8e sandbox create --session-id my-box --idle-timeout never

", hosts::help!()))]
pub struct CreateArgs {
    /// Its id; a random one is hard to guess [default: random]
    #[arg(long, value_name = "ID")]
    session_id: Option<String>,

    /// A variable for every command in it; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    env: Vec<(String, String)>,

    #[command(flatten)]
    spec: SpecArgs,
}

// === impl CreateArgs ===

impl CreateArgs {
    pub(crate) fn request(self) -> Result<v1::CreateSessionRequest, Failure> {
        let mut request = self.spec.request()?;
        request.session_id = self.session_id.unwrap_or_default();
        request.env = self.env.into_iter().collect();
        Ok(request)
    }
}

pub(crate) async fn run(
    request: v1::CreateSessionRequest,
    mut client: Client,
) -> Result<u8, Failure> {
    let session = client.create_session(request).await?.into_inner();
    output::json(&SessionJson::from(session)).map(|()| 0)
}
