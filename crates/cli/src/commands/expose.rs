//! `k8e sandbox expose`, `unexpose` and `exposed`: URLs for services in a session.

use super::spec;
use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// First paragraphs of `k8e sandbox expose --help`.
pub(super) const LONG_ABOUT: &str = "\
Expose a service in a session at a URL, and print it. The URL contains a secret token: whoever has it
can use the service until `unexpose` or the end of the session. Repeated calls print the same URL.

The service may listen on 127.0.0.1 in the sandbox. HTTP, server-sent events and WebSocket are
forwarded. Open the URL in a browser, or send its token as `authorization: Bearer …` or
`x-k8e-token: …`.";

/// The session of the service.
#[derive(Args, Debug)]
struct SessionArgs {
    /// Session of the service [default: the one that a plain `k8e sandbox run` uses, see `status`]
    #[arg(long, env = "K8E_SANDBOX_SESSION_ID", value_name = "ID")]
    session_id: Option<String>,

    /// Tenant whose `run` session to use when --session-id is not set [default: the API key's first]
    #[arg(long, env = "K8E_SANDBOX_TENANT", value_name = "NAME")]
    tenant: Option<String>,
}

/// The port of the service, as argument or flag.
#[derive(Args, Debug)]
struct PortArgs {
    /// Port that the service listens on in the sandbox
    #[arg(value_name = "PORT", required_unless_present = "port", value_parser = clap::value_parser!(u16).range(1..))]
    number: Option<u16>,

    /// The same as a flag
    #[arg(long, value_name = "PORT", conflicts_with = "number", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
}

/// Arguments of `k8e sandbox expose`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox run --background --session-id $SID 'python3 -m http.server 8000 --bind 127.0.0.1'
  URL=$(k8e sandbox expose 8000 --session-id $SID | jq -r .url)
  curl \"$URL\"

Output:
  {\"url\":\"http://…/k8e/expose/…/8000/?k8e_token=…\",\"port\":8000,\"session_id\":\"…\",\"host\":\"127.0.0.1\",
   \"token\":\"…\",\"started_at\":…}")]
pub struct ExposeArgs {
    #[command(flatten)]
    port: PortArgs,

    /// Loopback address that the service listens on in the sandbox
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,

    #[command(flatten)]
    session: SessionArgs,
}

/// Arguments of `k8e sandbox unexpose`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The URL answers 404 from now on, and open connections are cut. `ok` is false when the port was not exposed.

Example:
  k8e sandbox unexpose 8000 --session-id $SID")]
pub struct UnexposeArgs {
    #[command(flatten)]
    port: PortArgs,

    #[command(flatten)]
    session: SessionArgs,
}

/// Arguments of `k8e sandbox exposed`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox exposed --session-id $SID | jq -r '.services[].url'")]
pub struct ExposedArgs {
    #[command(flatten)]
    session: SessionArgs,
}

/// JSON output: the keys of the Go K8E, and the token.
#[derive(Serialize)]
struct ExposedJson {
    url: String,
    port: u32,
    session_id: String,
    host: String,
    token: String,
    started_at: i64,
}

/// JSON output, with the keys of the Go K8E.
#[derive(Serialize)]
struct UnexposedJson {
    ok: bool,
    port: u32,
    session_id: String,
}

/// JSON output, with the keys of the Go K8E.
#[derive(Serialize)]
struct ListJson {
    session_id: String,
    services: Vec<ServiceJson>,
}

#[derive(Serialize)]
struct ServiceJson {
    port: u32,
    url: String,
    host: String,
    token: String,
    /// Unix seconds.
    started_at: i64,
}

pub(crate) async fn expose(args: ExposeArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ExposeServiceRequest {
        session_id: args.session.find(&mut client).await?,
        port: args.port.number(),
        host: args.host,
    };
    let service = client.expose_service(request).await?.into_inner();
    output::json(&ExposedJson {
        url: service.url,
        port: service.port,
        session_id: service.session_id,
        host: service.host,
        token: service.token,
        started_at: service.started_at_unix_ms / 1000,
    })
    .map(|()| 0)
}

pub(crate) async fn unexpose(args: UnexposeArgs, mut client: Client) -> Result<u8, Failure> {
    let session_id = args.session.find(&mut client).await?;
    let port = args.port.number();
    let request = v1::UnexposeServiceRequest {
        session_id: session_id.clone(),
        port,
    };
    let ok = client.unexpose_service(request).await?.into_inner().ok;
    output::json(&UnexposedJson {
        ok,
        port,
        session_id,
    })
    .map(|()| 0)
}

pub(crate) async fn list(args: ExposedArgs, mut client: Client) -> Result<u8, Failure> {
    let session_id = args.session.find(&mut client).await?;
    let request = v1::ListExposedRequest {
        session_id: session_id.clone(),
    };
    let services = client.list_exposed(request).await?.into_inner().services;
    let services = services.into_iter().map(ServiceJson::from).collect();
    output::json(&ListJson {
        session_id,
        services,
    })
    .map(|()| 0)
}

// === impl SessionArgs ===

impl SessionArgs {
    /// The session that is named, or the one that a plain `run` would use. None is made: nothing could listen in it.
    async fn find(self, client: &mut Client) -> Result<String, Failure> {
        if let Some(named) = self.session_id.filter(|named| !named.is_empty()) {
            return Ok(named);
        }
        let tenant = self.tenant.unwrap_or_default();
        let found = spec::run_session(client, &tenant).await?;
        found.ok_or_else(|| no_run_session(&tenant))
    }
}

fn no_run_session(tenant: &str) -> Failure {
    let tenant = match tenant {
        "" => String::new(),
        tenant => format!(" for tenant {tenant}"),
    };
    Failure::request(
        format!(
            "no session is named, and `k8e sandbox run` has none{tenant} yet: name the session of the service with \
             --session-id (`k8e sandbox sessions` lists them), or start the service with `k8e sandbox run --background`"
        ),
        "not_found",
    )
}

// === impl PortArgs ===

impl PortArgs {
    fn number(&self) -> u32 {
        self.number.or(self.port).unwrap_or_default().into()
    }
}

// === impl ServiceJson ===

impl From<v1::ExposedService> for ServiceJson {
    fn from(service: v1::ExposedService) -> Self {
        Self {
            port: service.port,
            url: service.url,
            host: service.host,
            token: service.token,
            started_at: service.started_at_unix_ms / 1000,
        }
    }
}
