//! `k8e sandbox create`.

use super::spec::SpecArgs;
use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use crate::units;
use clap::Args;
use k8e_api::client::Client;

/// What `k8e sandbox create --help` begins with.
pub(super) const LONG_ABOUT: &str = "\
Make a session: a sandbox that lives until it is destroyed, expires, or is not used for long enough.";

/// Arguments of `k8e sandbox create`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  SID=$(k8e sandbox create | jq -r .session_id)
  k8e sandbox create --memory 2GiB --cpus 2 --ttl 1h --label job=nightly
  k8e sandbox create --session-id my-box --idle-timeout never")]
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

pub(crate) async fn run(args: CreateArgs, mut client: Client) -> Result<u8, Failure> {
    let mut request = args.spec.request();
    request.session_id = args.session_id.unwrap_or_default();
    request.env = args.env.into_iter().collect();
    let session = client.create_session(request).await?.into_inner();
    output::json(&SessionJson::from(session)).map(|()| 0)
}
