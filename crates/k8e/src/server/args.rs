//! The flags of `k8e server`, and what they come to.

use super::egress::{Egress, EgressArgs};
use super::error::Error;
use super::process;
use clap::Args;
use k8e_cli::Globals;
use k8e_cli::units::{self, Span};
use k8e_driver::{DiskRate, Platform};
use k8e_gateway::{BaseUrl, Expose, Rate, RateLimits, TLS_CHECK_EVERY, Tcp};
use k8e_model::{Lifetime, Limits, PoolSize, RuntimeKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// K8E's port, on loopback: who wants more says so.
const LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 50051);

/// The port after it, for visitors of exposed services.
const EXPOSE_LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 50052);

/// One for who comes next and one for who comes right after. --pool-max can make it less.
const POOL_MIN_DEFAULT: u32 = 2;

/// In the data directory: certificates and their keys.
pub(super) const TLS: &str = "tls";

/// In the data directory: where `sandbox.v1` clients on this machine look for the authority.
pub(super) const TLS_LINKS: &str = "server/tls";

/// Whose members may use the socket.
const SOCKET_GROUP: &str = "k8e";

/// What `k8e server --help` begins with.
pub(crate) const LONG_ABOUT: &str = "\
Serve sandboxes on this machine. Needs root.

Clients on this machine use the socket in the data directory: root, and members of the group `k8e`.
Clients over TLS, on this machine too, use an API key (`k8e apikey create`), or a certificate of the
server's own authority that they got for one (`k8e login`). --metrics-listen shows /metrics, /healthz and /readyz to anybody who can
connect there, and nothing of a client's. Sandboxes outlive the server: after a restart it finds them again.";

/// Arguments of `k8e server`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e server
  k8e server --listen 0.0.0.0:50051 --default-memory 1GiB --max-sessions 200
  k8e server --data-dir /srv/k8e --listen none
  k8e server --allowed-hosts @python,@github --denied-hosts '*.internal.example'
  k8e server --hardened --allow-host-template")]
pub(crate) struct ServerArgs {
    /// The socket [default: k8e.sock in the data directory]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Offer only what is safe by default: a session that asks for no hosts reaches nothing (as with
    /// --allowed-hosts none), loopback is not trusted, and no sandbox is made from the template `host`. This version has no
    /// other template, so a hardened server makes sandboxes only with --allow-host-template
    #[arg(long)]
    hardened: bool,

    /// With --hardened, make sandboxes from the template `host` all the same: everything under this
    /// machine's /usr and /opt can be read in them, so keep no secrets there
    #[arg(long, requires = "hardened")]
    allow_host_template: bool,

    /// Where to listen for TLS, or none [default: 127.0.0.1:50051]
    #[arg(long, value_name = "ADDRESS", value_parser = listen)]
    listen: Option<Listen>,

    /// Let root and members of the group k8e in over TLS on loopback without key or certificate, by the uid that the kernel
    /// says owns their socket: for clients that can use neither those nor the Unix socket. A program of theirs that passes on
    /// what others send lets those in as well [default: off]
    #[arg(long, conflicts_with = "hardened")]
    trust_loopback: bool,

    /// Where to show metrics and health over HTTP, to anybody who can connect [default: nowhere]
    #[arg(long, value_name = "ADDRESS", value_parser = metrics_listen)]
    metrics_listen: Option<SocketAddr>,

    /// Where visitors of exposed services come in over HTTP, or none [default: 127.0.0.1:50052]
    #[arg(long, value_name = "ADDRESS", value_parser = listen)]
    expose_listen: Option<Listen>,

    /// What URLs of exposed services begin with, when a proxy is in front; `https://*.sandboxes.example` gives each service a
    /// host name, and so an origin, of its own [default: http:// and the address]
    #[arg(long, env = "K8E_SANDBOX_EXPOSE_BASE_URL", value_name = "URL", value_parser = base_url)]
    expose_base_url: Option<Base>,

    /// A name that others have for this machine, for the server's certificate; may be repeated
    #[arg(
        long,
        env = "K8E_SANDBOX_ADVERTISED_HOSTNAME",
        value_name = "NAME",
        value_delimiter = ','
    )]
    advertise_hostname: Vec<String>,

    /// Calls a second that one holder of a key or certificate may make that change something; twice
    /// as many at once
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_writes_per_second: u32,

    /// Calls a second that one holder may make that only look; twice as many at once
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_reads_per_second: u32,

    /// Runtime of a session that asks for none [default: gvisor where runsc is installed, else native]
    #[arg(long, value_name = "NAME")]
    default_runtime: Option<RuntimeKind>,

    /// How gVisor gets hold of system calls: systrap, kvm or ptrace
    #[arg(long, default_value = "systrap", value_name = "NAME")]
    gvisor_platform: Platform,

    /// Where gVisor does not work, give sandbox.v1 clients that ask for it the default runtime: some
    /// ask for nothing else. Their sandboxes then share this machine's kernel
    #[arg(long)]
    gvisor_fallback: bool,

    /// Memory of a sandbox that does not say
    #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = units::size)]
    default_memory: u64,

    /// CPUs of a sandbox that does not say
    #[arg(long, default_value = "1", value_name = "N", value_parser = units::cpus)]
    default_cpus: u32,

    /// Processes and threads of a sandbox that does not say
    #[arg(long, default_value_t = 256, value_name = "N")]
    default_pids: u32,

    /// Disk space of a sandbox that does not say
    #[arg(long, default_value = "4GiB", value_name = "SIZE", value_parser = units::size)]
    default_disk: u64,

    /// Memory that a sandbox may ask for [default: this machine's]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    max_memory: Option<u64>,

    /// CPUs that a sandbox may ask for [default: this machine's]
    #[arg(long, value_name = "N", value_parser = units::cpus)]
    max_cpus: Option<u32>,

    /// Processes and threads that a sandbox may ask for
    #[arg(long, default_value_t = 4096, value_name = "N")]
    max_pids: u32,

    /// Disk space that a sandbox may ask for
    #[arg(long, default_value = "64GiB", value_name = "SIZE", value_parser = units::size)]
    max_disk: u64,

    /// Keep what sandboxes write in memory: quicker to make, and counted against their memory
    #[arg(long)]
    memory_disks: bool,

    /// Operations a second that one sandbox may do on a disk, reads and writes each; less where disks
    /// are slow and sandboxes get in each other's way
    #[arg(long, default_value_t = DiskRate::default().operations, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    disk_iops: u64,

    /// Bytes a second that one sandbox may read from a disk, and write to it, as 100MiB; less where
    /// disks are slow and sandboxes get in each other's way
    #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = disk_bandwidth)]
    disk_bandwidth: u64,

    /// How long a session lives that does not say
    #[arg(long, default_value = "never", value_name = "TIME", value_parser = units::span)]
    default_ttl: Span,

    /// How long a session lives unused that does not say
    #[arg(long, default_value = "1h", value_name = "TIME", value_parser = units::span)]
    default_idle_timeout: Span,

    /// How long a run may take that does not say
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = finite)]
    run_timeout: Duration,

    /// Sessions that may be alive at once
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_sessions: u32,

    /// Sessions that one owner may have alive at once [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_sessions_per_owner: Option<u32>,

    /// Sessions that one tenant may have alive at once, whoever owns them [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_sessions_per_tenant: Option<u32>,

    /// Background runs that may be under way at once in a session; those that are over do not count
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=50))]
    max_background_runs: u32,

    /// Sandboxes that are kept ready for sessions to come, for each runtime [default: 2]
    #[arg(long, value_name = "N")]
    pool_min: Option<u32>,

    /// Sandboxes that are kept ready when many are asked for; 0 keeps none
    #[arg(long, default_value_t = 16, value_name = "N")]
    pool_max: u32,

    /// What to log, as in `info` or `k8e_engine=debug`
    #[arg(
        long,
        default_value = "info,rustls=error",
        env = "K8E_LOG",
        value_name = "FILTER"
    )]
    pub(super) log: String,

    /// Leave the terminal of whoever started us
    #[arg(long, hide = true)]
    pub(super) detached: bool,

    #[command(flatten)]
    egress: EgressArgs,
}

/// What the parts are built from.
pub(super) struct Config {
    pub(super) memory_disks: bool,
    pub(super) disk_rate: DiskRate,
    pub(super) default_runtime: Option<RuntimeKind>,
    pub(super) gvisor_platform: Platform,
    pub(super) metrics_listen: Option<SocketAddr>,
    pub(super) engine: k8e_engine::Config,
    pub(super) gateway: k8e_gateway::Config,
    pub(super) egress: Egress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listen {
    None,
    On(SocketAddr),
}

/// None for an empty variable, which is how people unset one.
#[derive(Clone, Debug)]
struct Base(Option<BaseUrl>);

// === impl ServerArgs ===

impl ServerArgs {
    pub(super) fn config(self, globals: &Globals) -> Result<Config, Error> {
        let limits = Limits {
            memory_bytes: self.default_memory,
            cpu_millis: self.default_cpus,
            pids: self.default_pids,
            disk_bytes: self.default_disk,
        };
        limits.check().map_err(Error::Limits)?;
        let limits_max = self.limits_max();
        let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        let pool_min = self.pool_min.unwrap_or(POOL_MIN_DEFAULT.min(self.pool_max));
        let pool = PoolSize::new(count(pool_min), count(self.pool_max)).map_err(Error::Pool)?;
        let ttl = self.default_ttl.into_option();
        let idle = self.default_idle_timeout.into_option();
        let tcp = |address, required| Tcp {
            address,
            required,
            trust_loopback: self.trust_loopback,
        };
        let egress = self.egress.config(self.hardened)?;
        let host_template = !self.hardened || self.allow_host_template;
        if !host_template {
            tracing::warn!(
                "--hardened without --allow-host-template: this version has no template but `host`, so no session can be made"
            );
        }
        let tcp = match self.listen {
            None => Some(tcp(LISTEN_DEFAULT, false)),
            Some(Listen::On(address)) => Some(tcp(address, true)),
            Some(Listen::None) => None,
        };
        let expose = |address, required| Expose {
            address,
            required,
            base_url: self.expose_base_url.clone().and_then(|base| base.0),
        };
        let expose = match self.expose_listen {
            None => Some(expose(EXPOSE_LISTEN_DEFAULT, false)),
            Some(Listen::On(address)) => Some(expose(address, true)),
            Some(Listen::None) => None,
        };
        Ok(Config {
            memory_disks: self.memory_disks,
            disk_rate: DiskRate {
                operations: self.disk_iops,
                bytes: self.disk_bandwidth,
            },
            default_runtime: self.default_runtime,
            gvisor_platform: self.gvisor_platform,
            metrics_listen: self.metrics_listen,
            engine: k8e_engine::Config {
                limits,
                lifetime: Lifetime { ttl, idle },
                limits_max,
                host_template,
                pool,
                sessions_max: count(self.max_sessions),
                sessions_per_owner_max: count(
                    self.max_sessions_per_owner.unwrap_or(self.max_sessions),
                ),
                sessions_per_tenant_max: count(
                    self.max_sessions_per_tenant.unwrap_or(self.max_sessions),
                ),
                background_runs_per_session_max: count(self.max_background_runs),
                run_timeout: self.run_timeout,
                egress_default: egress.allowed.clone(),
                gvisor_fallback: self.gvisor_fallback,
                ..Default::default()
            },
            gateway: k8e_gateway::Config {
                socket: self
                    .socket
                    .unwrap_or_else(|| globals.data_dir.join("k8e.sock")),
                socket_group: SOCKET_GROUP.to_owned(),
                tcp,
                tls_dir: globals.data_dir.join(TLS),
                tls_links_dir: Some(globals.data_dir.join(TLS_LINKS)),
                tls_names: names(self.advertise_hostname),
                tls_check_every: TLS_CHECK_EVERY,
                rate_limits: RateLimits {
                    reads: rate(self.max_reads_per_second),
                    writes: rate(self.max_writes_per_second),
                },
                admin: None,
                expose,
            },
            egress,
        })
    }
}

impl ServerArgs {
    /// What any sandbox may ask for. A default above it raises it: an operator meant that too.
    fn limits_max(&self) -> Limits {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let cpus = u32::try_from(cpus * 1000).unwrap_or(u32::MAX);
        Limits {
            memory_bytes: self
                .max_memory
                .unwrap_or_else(process::machine_memory_bytes)
                .max(self.default_memory),
            cpu_millis: self.max_cpus.unwrap_or(cpus).max(self.default_cpus),
            pids: self.max_pids.max(self.default_pids),
            disk_bytes: self.max_disk.max(self.default_disk),
        }
    }
}

/// An empty variable is how people unset one.
fn names(given: Vec<String>) -> Vec<String> {
    given.into_iter().filter(|name| !name.is_empty()).collect()
}

fn rate(per_second: u32) -> Rate {
    Rate {
        per_second,
        burst: per_second.saturating_mul(2),
    }
}

pub(super) fn socket_group() -> Option<u32> {
    k8e_gateway::group_id(SOCKET_GROUP)
}

fn listen(text: &str) -> Result<Listen, String> {
    match text {
        "none" => Ok(Listen::None),
        text => text.parse().map(Listen::On).map_err(|_| {
            format!("{text:?} is not an address: write 127.0.0.1:50051, [::]:50051 or none")
        }),
    }
}

fn base_url(text: &str) -> Result<Base, String> {
    if text.is_empty() {
        return Ok(Base(None));
    }
    let url: Result<BaseUrl, k8e_model::Error> = text.parse();
    url.map(|url| Base(Some(url)))
        .map_err(|error| error.message)
}

fn metrics_listen(text: &str) -> Result<SocketAddr, String> {
    let wrong = |_| format!("{text:?} is not an address: write 127.0.0.1:9464 or [::1]:9464");
    text.parse().map_err(wrong)
}

fn finite(text: &str) -> Result<Duration, String> {
    let missing =
        || "a run must end some time: write 30s or 10m; a single run may ask for none".to_owned();
    units::span(text)?.into_option().ok_or_else(missing)
}

/// Below a page a second nothing would ever come back.
fn disk_bandwidth(text: &str) -> Result<u64, String> {
    match units::size(text)? {
        0..4096 => Err("a sandbox needs at least 4KiB a second".to_owned()),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(listen("none"), Ok(Listen::None));
        assert_eq!(
            listen("127.0.0.1:1"),
            Ok(Listen::On("127.0.0.1:1".parse().unwrap()))
        );
        assert!(listen("localhost").is_err());
        assert!(metrics_listen("[::1]:9464").is_ok());
        assert!(metrics_listen("9464").is_err());
        assert!(base_url("https://preview.example.com").is_ok());
        assert!(base_url("https://*.sandboxes.example").is_ok());
        assert!(base_url("preview.example.com").is_err());
        assert!(finite("never").is_err());
        assert_eq!(finite("2m"), Ok(Duration::from_secs(120)));
    }
}
