//! `k8e sandbox status`: shows the state of the server.

use super::spec;
use crate::failure::Failure;
use crate::output;
use crate::render::LimitsJson;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

/// Arguments of `k8e sandbox status`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
session_id is the session that `run` without flags for a new session would use; empty when it would
create one. When no server can be reached, prints \"available\":false and exits with 2.

Example:
  k8e sandbox status | jq '.runtimes[] | select(.usable)'")]
pub struct StatusArgs {
    /// Tenant whose session to show [default: that of a `run` without --tenant]
    #[arg(long, env = "K8E_SANDBOX_TENANT", value_name = "NAME")]
    tenant: Option<String>,
}

#[derive(Serialize)]
struct StatusJson {
    available: bool,
    /// The session that `run` without flags for a new session would use; empty when it would create one.
    session_id: String,
    tenant_id: String,
    /// Tenants that the caller may create sessions for; `*` is any.
    tenants: Vec<String>,
    version: String,
    default_runtime: String,
    runtimes: Vec<RuntimeJson>,
    default_limits: LimitsJson,
    sessions_active: u32,
    sessions_max: u32,
    network: String,
    started_at: i64,
}

#[derive(Serialize)]
struct RuntimeJson {
    name: String,
    usable: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
}

/// JSON output when no server can be reached, with the keys of the Go K8E.
#[derive(Serialize)]
struct UnavailableJson<'a> {
    available: bool,
    session_id: &'a str,
    tenant_id: &'a str,
    error: &'a str,
    detail: &'a str,
}

pub(crate) async fn run(
    args: StatusArgs,
    connected: Result<Client, Failure>,
) -> Result<u8, Failure> {
    match connected {
        Ok(client) => available(args, client).await,
        Err(failure) => unavailable(&args, &failure),
    }
}

async fn available(args: StatusArgs, mut client: Client) -> Result<u8, Failure> {
    let status = client
        .get_status(v1::GetStatusRequest {})
        .await?
        .into_inner();
    let tenant = args.tenant.filter(|tenant| !tenant.is_empty());
    let tenant = tenant.unwrap_or(status.default_tenant);
    let found = spec::run_session(&mut client, &tenant).await?;
    let runtime = |r: v1::Runtime| RuntimeJson {
        name: r.name,
        usable: r.usable,
        reason: r.reason,
    };
    let json = StatusJson {
        available: true,
        session_id: found.unwrap_or_default(),
        tenant_id: tenant,
        tenants: status.tenants,
        version: status.version,
        default_runtime: status.default_runtime,
        runtimes: status.runtimes.into_iter().map(runtime).collect(),
        default_limits: status.default_limits.unwrap_or_default().into(),
        sessions_active: status.sessions_active,
        sessions_max: status.sessions_max,
        network: status.network,
        started_at: status.started_at_unix_ms / 1000,
    };
    output::json(&json).map(|()| 0)
}

fn unavailable(args: &StatusArgs, failure: &Failure) -> Result<u8, Failure> {
    if let Failure::Told { error, detail, .. } = failure {
        output::json(&UnavailableJson {
            available: false,
            session_id: "",
            tenant_id: args.tenant.as_deref().unwrap_or_default(),
            error,
            detail,
        })?;
        output::note(error);
    }
    Ok(failure.exit())
}
