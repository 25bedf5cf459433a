//! Options of a new session: the flags that `run`, `create` and `shell` share.

use super::hosts;
use crate::failure::Failure;
use crate::units::{self, Span};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;

/// Client kind of this command line: a `run` reuses only sessions that a run of the same kind created.
const CLIENT_KIND: &str = "cli";

/// Flags for a new session.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "New session")]
pub(crate) struct SpecArgs {
    /// Tenant of the session; a `run` reuses only sessions of the same tenant [default: the API key's first]
    #[arg(long, env = "K8E_SANDBOX_TENANT", value_name = "NAME")]
    pub(crate) tenant: Option<String>,

    /// Runtime (isolation): gvisor or native; `k8e sandbox status` lists those that work [default: the server's]
    #[arg(long, value_name = "KIND")]
    runtime: Option<String>,

    /// Template of the root file system: host (the server's own /usr, read-only), a name of `k8e template list`, or an
    /// image that the server then fetches, as python:3.12 [default: host]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,

    /// Memory limit of the whole sandbox, in bytes or as 512MiB [default: the server's]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    memory: Option<u64>,

    /// CPU limit, as 0.5 or 2 [default: the server's]
    #[arg(long, value_name = "N", value_parser = units::cpus)]
    cpus: Option<u32>,

    /// Limit for processes and threads [default: the server's]
    #[arg(long, value_name = "N")]
    pids: Option<u32>,

    /// Disk limit: how much can be written, in bytes or as 4GiB [default: the server's]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    disk: Option<u64>,

    /// Egress allow-list: host names, *.host, host:port, networks, presets as @python; or none, or all
    /// [default: the server's]
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    pub(crate) allowed_hosts: Vec<String>,

    /// Environment variable of all commands with the value of one of your secrets (`k8e secret`), as in
    /// GH_TOKEN=github:token; may be repeated
    #[arg(long, value_name = "ENV=NAME[:KEY]", value_parser = units::pair)]
    pub(crate) secret: Vec<(String, String)>,

    /// TTL: the session is destroyed this long after its creation, as 2h, or never [default: the server's]
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    ttl: Option<Span>,

    /// Idle timeout: the session is destroyed when it was not used for so long, as 10m, or never [default: the server's]
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    idle_timeout: Option<Span>,

    /// Label, to tell sessions apart in `sessions` and `get`; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    label: Vec<(String, String)>,
}

// === impl SpecArgs ===

impl SpecArgs {
    /// The request; flags that were not set are empty, for the server's defaults.
    pub(crate) fn request(self) -> Result<v1::CreateSessionRequest, Failure> {
        if !self.allowed_hosts.is_empty() {
            hosts::check(&self.allowed_hosts)?;
        }
        Ok(v1::CreateSessionRequest {
            session_id: String::new(),
            tenant: self.tenant.unwrap_or_default(),
            runtime: self.runtime.unwrap_or_default(),
            template: self.template.unwrap_or_default(),
            env: Default::default(),
            labels: self.label.into_iter().collect(),
            limits: Some(v1::Limits {
                memory_bytes: self.memory.unwrap_or(0),
                cpu_millis: self.cpus.unwrap_or(0),
                pids: self.pids.unwrap_or(0),
                disk_bytes: self.disk.unwrap_or(0),
            }),
            ttl_s: self.ttl.map_or(0, Span::wire_seconds),
            idle_timeout_s: self.idle_timeout.map_or(0, Span::wire_seconds),
            allowed_hosts: self.allowed_hosts,
            secret_refs: self.secret.into_iter().map(secret_ref).collect(),
            client: CLIENT_KIND.to_owned(),
        })
    }
}

/// The session that a `run` without flags for a new session would use; none when it would make one. An empty
/// `tenant` is the server's default for the caller.
pub(super) async fn run_session(
    client: &mut Client,
    tenant: &str,
) -> Result<Option<String>, Failure> {
    let request = v1::CreateSessionRequest {
        tenant: tenant.to_owned(),
        client: CLIENT_KIND.to_owned(),
        ..Default::default()
    };
    let found = client.find_run_session(request).await?.into_inner();
    Ok(Some(found.session_id).filter(|id| !id.is_empty()))
}

fn secret_ref((env_var, named): (String, String)) -> v1::SecretRef {
    let (secret_name, key) = super::secret::named(&named);
    v1::SecretRef {
        secret_name,
        key,
        env_var,
    }
}
