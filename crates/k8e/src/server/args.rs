//! Command-line flags of `k8e server`, and the configuration of engine, gateway and egress made from them.

use super::control::ServerCommand;
use super::egress::{Egress, EgressArgs};
use super::error::Error;
use super::process;
use clap::Args;
use k8e_cli::Globals;
use k8e_cli::units::{self, Span};
use k8e_driver::{DiskRate, Platform};
use k8e_gateway::{BaseUrl, E2b, Expose, Rate, RateLimits, TLS_CHECK_EVERY, Tcp};
use k8e_image::RegistryPolicy;
use k8e_model::{Lifetime, Limits, PoolSize, RuntimeKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Default of --listen: the port of `sandbox.v1`, on loopback only.
const LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 50051);

/// Default of --expose-listen: HTTP clients of exposed services, on loopback only.
const EXPOSE_LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 50052);

/// Default of --e2b-listen: E2B's clients on this machine.
const E2B_LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 3676);

/// Default of --pool-min: two creates in a row are served without a launch. A lower --pool-max lowers it.
const POOL_MIN_DEFAULT: u32 = 2;

/// Subdirectory of the data directory with the certificate authority, the server's certificate and their keys.
pub(super) const TLS: &str = "tls";

/// Subdirectory of the data directory where `sandbox.v1` clients on this machine look for the CA certificate.
pub(super) const TLS_LINKS: &str = "server/tls";

/// Unix group whose members may connect to the socket.
const SOCKET_GROUP: &str = "k8e";

/// What `k8e server --help` begins with.
pub(crate) const LONG_ABOUT: &str = "\
Serve sandboxes on this machine. Needs root.

Root and members of the group `k8e` connect to the Unix socket in the data directory. Clients over
TLS, on this machine too, authenticate with an API key (`k8e apikey create`) or with a client
certificate that `k8e login` gets for one. --metrics-listen serves /metrics, /healthz and /readyz
without authentication; they contain no data of clients. Sandboxes keep running when the server
stops; the next server adopts them.";

/// Arguments of `k8e server`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e server
  k8e server --listen 0.0.0.0:50051 --default-memory 1GiB --max-sessions 200
  k8e server --data-dir /srv/k8e --listen none
  k8e server --allowed-hosts @python,@github --denied-hosts '*.internal.example'
  k8e server --hardened --allow-host-template
  k8e server status
  k8e server restart                  # with the same flags; sessions keep running")]
pub(crate) struct ServerArgs {
    #[command(subcommand)]
    command: Option<ServerCommand>,

    /// Path of the Unix socket that clients on this machine connect to [default: k8e.sock in --data-dir]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Use the strictest defaults, for servers whose clients do not trust each other: no egress unless a session
    /// asks for it (as with --allowed-hosts none), no --trust-loopback, and no sandboxes from the template `host`.
    /// Sessions then need a template of an image (`k8e template create`), or --allow-host-template
    #[arg(long)]
    hardened: bool,

    /// With --hardened, allow sandboxes from the template `host`: everything under this machine's /usr and /opt
    /// can be read in them, so set it only where those hold no secrets
    #[arg(long, requires = "hardened")]
    allow_host_template: bool,

    /// TCP address of the gRPC API (TLS), or none; 0.0.0.0:50051 lets other machines connect [default: 127.0.0.1:50051]
    #[arg(long, value_name = "ADDRESS", value_parser = listen)]
    listen: Option<Listen>,

    /// Authenticate TLS clients on loopback by the uid of their socket: root and members of the group k8e need no API
    /// key or certificate. Only for clients that can use neither those nor the Unix socket: a proxy that one of these
    /// users runs lets everybody in that can connect to it [default: off]
    #[arg(long, conflicts_with = "hardened")]
    trust_loopback: bool,

    /// Address of the admin HTTP server (metrics, health and readiness probes; no authentication) [default: none]
    #[arg(long, value_name = "ADDRESS", value_parser = metrics_listen)]
    metrics_listen: Option<SocketAddr>,

    /// Address of the HTTP server that forwards to services of `k8e sandbox expose`, or none [default: 127.0.0.1:50052]
    #[arg(long, value_name = "ADDRESS", value_parser = listen)]
    expose_listen: Option<Listen>,

    /// Base URL of exposed services, when a reverse proxy is in front of --expose-listen; with a wildcard as in
    /// https://*.sandboxes.example each service gets its own host name, and so its own browser origin [default: http://
    /// and the address of --expose-listen]
    #[arg(long, env = "K8E_SANDBOX_EXPOSE_BASE_URL", value_name = "URL", value_parser = base_url)]
    expose_base_url: Option<Base>,

    /// Address of the E2B API for E2B's clients (plain HTTP, authenticated by API key), or none; docs/e2b.md has their
    /// settings [default: 127.0.0.1:3676]
    #[arg(long, value_name = "ADDRESS", value_parser = listen)]
    e2b_listen: Option<Listen>,

    /// Domain below which ports of sandboxes have host names for E2B's clients, as PORT-SANDBOX.DOMAIN, with a port
    /// if it is not that of the scheme [default: localhost and the port of --e2b-listen]
    #[arg(long, value_name = "DOMAIN")]
    e2b_domain: Option<String>,

    /// DNS name or IP address to add to the server's certificate, for clients that connect by it; may be repeated
    #[arg(
        long,
        env = "K8E_SANDBOX_ADVERTISED_HOSTNAME",
        value_name = "NAME",
        value_delimiter = ','
    )]
    advertise_hostname: Vec<String>,

    /// Rate limit for calls that change something: calls per second and principal (API key or certificate), with a burst
    /// of twice as many; more is answered with RESOURCE_EXHAUSTED
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_writes_per_second: u32,

    /// Rate limit for read-only calls: calls per second and principal, with a burst of twice as many
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_reads_per_second: u32,

    /// Default runtime (when the request sets none): gvisor or native [default: gvisor where runsc is installed, else native]
    #[arg(long, value_name = "NAME")]
    default_runtime: Option<RuntimeKind>,

    /// Platform of gVisor, which intercepts system calls: systrap, kvm (faster where /dev/kvm works) or ptrace (old kernels)
    #[arg(long, default_value = "systrap", value_name = "NAME")]
    gvisor_platform: Platform,

    /// The runsc program for gVisor sandboxes [default: the first of /usr/local/lib/k8e, /usr/lib/k8e, /usr/local/sbin,
    /// /usr/local/bin, /usr/sbin, /usr/bin]. Set it to use a newer one: saving paused sessions to disk needs one of 2025 or
    /// later, see `k8e check-config`
    #[arg(long, value_name = "PATH")]
    runsc: Option<PathBuf>,

    /// Where gVisor does not work, give `sandbox.v1` clients that request it the default runtime instead of an error, for
    /// clients that always request gvisor. Weaker isolation: their sandboxes then share this machine's kernel
    #[arg(long)]
    gvisor_fallback: bool,

    /// A registry, as HOST or HOST:PORT, that images are fetched from by plain HTTP, also at an address of this machine or of a
    /// private network; may be repeated
    #[arg(
        long,
        value_name = "HOST",
        value_delimiter = ',',
        help_heading = "Images"
    )]
    registry_insecure: Vec<String>,

    /// A registry, as HOST or HOST:PORT, that may be at an address of this machine or of a private network; others must be at public
    /// ones. May be repeated
    #[arg(
        long,
        value_name = "HOST",
        value_delimiter = ',',
        help_heading = "Images"
    )]
    registry_private: Vec<String>,

    /// A mirror of Docker Hub, as HOST or HOST:PORT, that is asked before it; may be repeated
    #[arg(
        long,
        value_name = "HOST",
        value_delimiter = ',',
        help_heading = "Images"
    )]
    registry_mirror: Vec<String>,

    /// Disk space that the images of all templates may take
    #[arg(long, default_value = "64GiB", value_name = "SIZE", value_parser = units::size, help_heading = "Images")]
    templates_disk: u64,

    /// Limit for snapshots of one owner
    #[arg(
        long,
        default_value_t = 1000,
        value_name = "N",
        help_heading = "Snapshots"
    )]
    max_snapshots_per_owner: u32,

    /// Disk space that the snapshots of one owner may take; what they share counts once
    #[arg(long, default_value = "32GiB", value_name = "SIZE", value_parser = units::size, help_heading = "Snapshots")]
    snapshot_disk_per_owner: u64,

    /// Disk space that the snapshots of one tenant may take, each counted as if it shared nothing [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = units::size, help_heading = "Snapshots")]
    snapshot_disk_per_tenant: Option<u64>,

    /// Default memory limit of a sandbox (when the request sets none), in bytes or as 512MiB
    #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = units::size)]
    default_memory: u64,

    /// Default CPU limit of a sandbox (when the request sets none), as 0.5 or 2
    #[arg(long, default_value = "1", value_name = "N", value_parser = units::cpus)]
    default_cpus: u32,

    /// Default limit for processes and threads in a sandbox (when the request sets none)
    #[arg(long, default_value_t = 256, value_name = "N")]
    default_pids: u32,

    /// Default disk limit of a sandbox (when the request sets none), in bytes or as 4GiB
    #[arg(long, default_value = "4GiB", value_name = "SIZE", value_parser = units::size)]
    default_disk: u64,

    /// Largest memory limit that a request may set, in bytes or as 8GiB [default: this machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    max_memory: Option<u64>,

    /// Largest CPU limit that a request may set [default: the number of this machine's CPUs]
    #[arg(long, value_name = "N", value_parser = units::cpus)]
    max_cpus: Option<u32>,

    /// Largest limit for processes and threads that a request may set
    #[arg(long, default_value_t = 4096, value_name = "N")]
    max_pids: u32,

    /// Largest disk limit that a request may set, in bytes or as 64GiB
    #[arg(long, default_value = "64GiB", value_name = "SIZE", value_parser = units::size)]
    max_disk: u64,

    /// Keep the writable layers of sandboxes in memory instead of disk images: faster to create, but counted against their
    /// memory limit
    #[arg(long)]
    memory_disks: bool,

    /// Disk I/O limit of each sandbox in operations per second, for reads and for writes; lower it where sandboxes slow
    /// each other down
    #[arg(long, default_value_t = DiskRate::default().operations, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    disk_iops: u64,

    /// Disk I/O limit of each sandbox in bytes per second (100MiB), for reads and for writes; lower it where sandboxes
    /// slow each other down
    #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = disk_bandwidth)]
    disk_bandwidth: u64,

    /// Default TTL of a session (when the request sets none), as 2h, or never
    #[arg(long, default_value = "never", value_name = "TIME", value_parser = units::span)]
    default_ttl: Span,

    /// Default idle timeout (when the request sets none): a session that is not used for so long is destroyed; 10m, or never
    #[arg(long, default_value = "1h", value_name = "TIME", value_parser = units::span)]
    default_idle_timeout: Span,

    /// Default timeout of a run (when the request sets none), as 30s or 10m; the command is killed then
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = finite)]
    run_timeout: Duration,

    /// Limit for live sessions on this server
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_sessions: u32,

    /// Limit for live sessions of one owner (principal) [default: --max-sessions]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_sessions_per_owner: Option<u32>,

    /// Limit for live sessions of one tenant, of all its owners together [default: --max-sessions]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_sessions_per_tenant: Option<u32>,

    /// Limit for background runs in progress in one session; ended ones do not count
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=50))]
    max_background_runs: u32,

    /// Warm pool: sandboxes kept ready for each runtime, so that creating a session needs no launch [default: 2]
    #[arg(long, value_name = "N")]
    pool_min: Option<u32>,

    /// Warm pool: largest size for each runtime when many sessions are created; 0 turns the pool off
    #[arg(long, default_value_t = 16, value_name = "N")]
    pool_max: u32,

    /// Log filter (tracing's EnvFilter): a level as info or debug, or levels for modules as in k8e_engine=debug
    #[arg(
        long,
        default_value = "info,rustls=error",
        env = "K8E_LOG",
        value_name = "FILTER"
    )]
    pub(super) log: String,

    /// Start a new process session, without the terminal of the client that auto-started this server
    #[arg(long, hide = true)]
    pub(super) detached: bool,

    #[command(flatten)]
    egress: EgressArgs,
}

/// Configuration of the server's parts.
pub(super) struct Config {
    pub(super) memory_disks: bool,
    pub(super) disk_rate: DiskRate,
    pub(super) default_runtime: Option<RuntimeKind>,
    pub(super) gvisor_platform: Platform,
    pub(super) runsc: Option<PathBuf>,
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

/// A base URL; `None` for an empty environment variable, which counts as unset.
#[derive(Clone, Debug)]
struct Base(Option<BaseUrl>);

// === impl ServerArgs ===

impl ServerArgs {
    /// The command for a running server; without one, a server is started.
    pub(crate) fn command(&self) -> Option<&ServerCommand> {
        self.command.as_ref()
    }

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
        let registries = RegistryPolicy::new(
            names(self.registry_insecure),
            names(self.registry_private),
            names(self.registry_mirror),
        );
        let registries = registries.map_err(Error::Registries)?;
        let host_template = !self.hardened || self.allow_host_template;
        if !host_template {
            tracing::warn!(
                "--hardened without --allow-host-template: sessions need a template of an image (`k8e template create`)"
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
        let e2b = |address, required| E2b {
            address,
            required,
            domain: self.e2b_domain.clone(),
        };
        let e2b = match self.e2b_listen {
            None => Some(e2b(E2B_LISTEN_DEFAULT, false)),
            Some(Listen::On(address)) => Some(e2b(address, true)),
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
            runsc: self.runsc,
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
                registries,
                templates_bytes_max: self.templates_disk,
                snapshots_per_owner_max: count(self.max_snapshots_per_owner),
                snapshot_bytes_per_owner_max: self.snapshot_disk_per_owner,
                snapshot_bytes_per_tenant_max: self.snapshot_disk_per_tenant.unwrap_or(u64::MAX),
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
                e2b,
            },
            egress,
        })
    }
}

impl ServerArgs {
    /// Largest limits that a request may set. A default limit above it raises it.
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

/// Without empty names: an empty environment variable counts as unset.
fn names(given: Vec<String>) -> Vec<String> {
    given.into_iter().filter(|name| !name.is_empty()).collect()
}

fn rate(per_second: u32) -> Rate {
    let per_second = u64::from(per_second);
    Rate {
        per_second,
        burst: 2 * per_second,
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
    let missing = || {
        "the default timeout of runs cannot be never: write 30s or 10m; a single run may set no timeout".to_owned()
    };
    units::span(text)?.into_option().ok_or_else(missing)
}

/// Below a page per second no read would ever complete.
fn disk_bandwidth(text: &str) -> Result<u64, String> {
    match units::size(text)? {
        0..4096 => {
            Err("the disk bandwidth of a sandbox must be at least 4KiB per second".to_owned())
        }
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
