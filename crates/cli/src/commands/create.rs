//! `k8e sandbox create`: creates a session.

use super::spec::SpecArgs;
use super::{hosts, template};
use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use crate::units;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// First paragraphs of `k8e sandbox create --help`.
pub(super) const LONG_ABOUT: &str = "\
Create a session: a sandbox that lives until it is destroyed, its TTL is over, or its idle timeout is
reached.";

/// A new session, and the run of its image's entry point if that was asked for.
#[derive(Serialize)]
struct CreatedJson {
    #[serde(flatten)]
    session: SessionJson,
    #[serde(skip_serializing_if = "Option::is_none")]
    run_id: Option<String>,
}

/// Arguments of `k8e sandbox create`.
#[derive(Args, Debug)]
#[command(after_long_help = concat!("\
Examples:
  SID=$(k8e sandbox create | jq -r .session_id)
  k8e sandbox create --memory 2GiB --cpus 2 --ttl 1h --label job=nightly
  k8e sandbox create --allowed-hosts @python,api.example.com
  k8e sandbox create --session-id my-box --idle-timeout never
  k8e sandbox create --template python:3.12

", hosts::help!()))]
pub struct CreateArgs {
    /// Id of the new session: letters, digits, - and _ [default: random]
    #[arg(long, value_name = "ID")]
    session_id: Option<String>,

    /// Environment variable of all commands in the session; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    env: Vec<(String, String)>,

    /// Start the entry point of the template's image as a background run
    #[arg(long, requires = "template")]
    entrypoint: bool,

    #[command(flatten)]
    spec: SpecArgs,
}

// === impl CreateArgs ===

impl CreateArgs {
    /// Whether the image's entry point is to be started.
    pub(crate) fn entrypoint(&self) -> bool {
        self.entrypoint
    }

    pub(crate) fn request(self) -> Result<v1::CreateSessionRequest, Failure> {
        let mut request = self.spec.request()?;
        request.session_id = self.session_id.unwrap_or_default();
        request.env = self.env.into_iter().collect();
        Ok(request)
    }
}

pub(crate) async fn run(
    request: v1::CreateSessionRequest,
    entrypoint: bool,
    mut client: Client,
) -> Result<u8, Failure> {
    template::ensure(&mut client, &request.template).await?;
    // Asked for before there is a session: without one there is nothing to make it for.
    let line = match entrypoint {
        true => Some(template::entrypoint(&mut client, &request.template).await?),
        false => None,
    };
    let session = client.create_session(request).await?.into_inner();
    let run_id = match line {
        Some(line) => Some(start(&mut client, &session.session_id, line).await?),
        None => None,
    };
    let session = SessionJson::from(session);
    output::json(&CreatedJson { session, run_id }).map(|()| 0)
}

/// Starts the image's own command line in the background.
async fn start(client: &mut Client, session: &str, line: Vec<String>) -> Result<String, Failure> {
    let args = line.into_iter().map(|arg| arg.into_bytes().into());
    let argv = v1::Argv {
        args: args.collect(),
    };
    let start = v1::RunStart {
        session_id: session.to_owned(),
        program: Some(v1::run_start::Program::Argv(argv)),
        timeout_ms: -1,
        ..Default::default()
    };
    Ok(client.start_run(start).await?.into_inner().run_id)
}
