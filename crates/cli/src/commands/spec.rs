//! What a new session shall be like: the flags that `run` and `create` share.

use super::hosts;
use crate::failure::Failure;
use crate::units::{self, Span};
use clap::Args;
use k8e_api::v1;

/// What this client calls itself: it uses again only sessions that runs of the same kind made.
pub(super) const CLIENT_KIND: &str = "cli";

/// Flags of a new session.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "New session")]
pub(crate) struct SpecArgs {
    /// The tenant that the session is for; each has its own [default: the API key's first]
    #[arg(long, env = "K8E_SANDBOX_TENANT", value_name = "NAME")]
    pub(crate) tenant: Option<String>,

    /// The kind of isolation, as `k8e sandbox status` lists them [default: the server's]
    #[arg(long, value_name = "KIND")]
    runtime: Option<String>,

    /// Where its root file system comes from [default: host]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,

    /// Memory of everything in it, as 512MiB
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    memory: Option<u64>,

    /// CPUs, as 0.5 or 2
    #[arg(long, value_name = "N", value_parser = units::cpus)]
    cpus: Option<u32>,

    /// Processes and threads
    #[arg(long, value_name = "N")]
    pids: Option<u32>,

    /// What it may write to disk, as 4GiB
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    disk: Option<u64>,

    /// What it may reach: hosts, *.hosts, host:port, networks, @python and other presets; or none,
    /// or all [default: the server's]
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    pub(crate) allowed_hosts: Vec<String>,

    /// A secret of yours as a variable for its commands, as in GH_TOKEN=github:token; may be repeated
    #[arg(long, value_name = "ENV=NAME[:KEY]", value_parser = units::pair)]
    pub(crate) secret: Vec<(String, String)>,

    /// How long it lives, as 2h, or never
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    ttl: Option<Span>,

    /// How long it lives unused, as 10m, or never
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    idle_timeout: Option<Span>,

    /// To find it again; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::pair)]
    label: Vec<(String, String)>,
}

// === impl SpecArgs ===

impl SpecArgs {
    /// As a request; what was not said is left to the server.
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

fn secret_ref((env_var, named): (String, String)) -> v1::SecretRef {
    let (secret_name, key) = super::secret::named(&named);
    v1::SecretRef {
        secret_name,
        key,
        env_var,
    }
}
