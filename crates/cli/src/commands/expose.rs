//! `k8e sandbox expose | unexpose | exposed`: services in a session that have a URL.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// What `k8e sandbox expose --help` begins with.
pub(super) const LONG_ABOUT: &str = "\
Give a service in a session a URL, and print it. Whoever has the URL can use the service until
`unexpose`, or until the session ends; nobody else can. Asking again gives the same URL.

The service may listen on 127.0.0.1 inside. HTTP, streams of events and WebSockets go through. Open
the URL in a browser, or send its token as `authorization: Bearer …` or `x-k8e-token: …`.";

/// Which session.
#[derive(Args, Debug)]
struct SessionArgs {
    /// The session [default: the tenant's newest]
    #[arg(long, env = "K8E_SANDBOX_SESSION_ID", value_name = "ID")]
    session_id: Option<String>,

    /// Whose newest session, when none is named
    #[arg(long, env = "K8E_SANDBOX_TENANT", value_name = "NAME")]
    tenant: Option<String>,
}

/// Which service.
#[derive(Args, Debug)]
struct PortArgs {
    /// The port that the service listens on
    #[arg(value_name = "PORT", required_unless_present = "port", value_parser = clap::value_parser!(u16).range(1..))]
    number: Option<u16>,

    /// The same with a flag
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

    /// Where it listens inside: a loopback address
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,

    #[command(flatten)]
    session: SessionArgs,
}

/// Arguments of `k8e sandbox unexpose`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The URL is not found from now on, and open connections are cut. `ok` is false when it had none.

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

/// K8E's keys, and the token alone.
#[derive(Serialize)]
struct ExposedJson {
    url: String,
    port: u32,
    session_id: String,
    host: String,
    token: String,
    started_at: i64,
}

/// K8E's keys.
#[derive(Serialize)]
struct UnexposedJson {
    ok: bool,
    port: u32,
    session_id: String,
}

/// K8E's keys.
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
    /// The session that is named, or the tenant's newest. None is made: nothing could listen in it.
    async fn find(self, client: &mut Client) -> Result<String, Failure> {
        if let Some(named) = self.session_id.filter(|named| !named.is_empty()) {
            return Ok(named);
        }
        let tenant = self.tenant.filter(|tenant| !tenant.is_empty());
        let tenant = match tenant {
            Some(tenant) => tenant,
            None => {
                let status = client.get_status(v1::GetStatusRequest {}).await?;
                status.into_inner().default_tenant
            }
        };
        let request = v1::ListSessionsRequest {
            phase: "active".to_owned(),
            tenant: tenant.clone(),
        };
        let sessions = client.list_sessions(request).await?.into_inner().sessions;
        let newest = sessions.iter().max_by_key(|one| one.created_at_unix_ms);
        let Some(newest) = newest else {
            return Err(Failure::request(
                format!(
                    "tenant {tenant} has no session: name one with --session-id, or make it with `k8e sandbox create`"
                ),
                "not_found",
            ));
        };
        // Who runs the server sees everybody's, and must not open somebody's by mistake.
        if sessions.iter().any(|one| one.owner != newest.owner) {
            return Err(Failure::request(
                format!(
                    "several owners have sessions of tenant {tenant}: name one with --session-id"
                ),
                "invalid",
            ));
        }
        Ok(newest.session_id.clone())
    }
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
