//! Flags of `k8e router`: names and defaults of the agent-sandbox router, except for defaults that were not secure.

use super::Error;
use crate::units::{Bind, duration};
use clap::{ArgAction, Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Authorization mode (`--authz-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AuthzMode {
    /// A bearer token of the cluster whose user has `create` on `sandboxes/proxy` of the sandbox.
    Tokenreview,
    /// A token for one sandbox, created with `k8e router token`.
    ScopedToken,
    /// No authorization: every client reaches every sandbox. Only for networks that no one else can reach.
    AllowAll,
}

/// Subcommands of `k8e router`.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Print a token for one sandbox (for --authz-mode scoped-token).
    Token(TokenOptions),
}

/// Flags of `k8e router token`.
#[derive(Clone, Debug, Args)]
pub struct TokenOptions {
    /// Namespace of the sandbox.
    #[arg(long, default_value = "default")]
    pub namespace: String,
    /// Name of the sandbox.
    #[arg(long)]
    pub name: String,
    /// Time until the token expires: 1h, 90s, or a number of seconds.
    #[arg(long, default_value = "1h", value_parser = duration)]
    pub ttl: Duration,
    /// File with the secret, the same as of the router.
    #[arg(long, value_name = "FILE", env = "AUTHZ_SCOPED_TOKEN_SECRET_FILE")]
    pub authz_scoped_token_secret_file: PathBuf,
}

/// Reverse proxy in front of the sandboxes of a Kubernetes cluster.
///
/// The headers of a request name the sandbox: X-Sandbox-ID, and optionally X-Sandbox-Namespace and X-Sandbox-Port.
/// It needs list and watch on pods, so a service account or --kubeconfig.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Options {
    /// Subcommand; without one, the router serves.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Bind address for HTTP requests, as :8080 or 10.0.0.1:8080; empty or 0 is off.
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    pub http_bind_address: Bind,
    /// Bind address for HTTPS requests; empty or 0 is off.
    #[arg(long, value_name = "ADDRESS", default_value = "")]
    pub https_bind_address: Bind,
    /// Bind address of /metrics (Prometheus); empty or 0 is off.
    #[arg(long, value_name = "ADDRESS", default_value = ":9090")]
    pub metrics_bind_address: Bind,
    /// Bind address of the probes /healthz and /readyz; empty or 0 is off.
    #[arg(long, value_name = "ADDRESS", default_value = ":8081")]
    pub health_probe_bind_address: Bind,
    /// Certificate chain (PEM) for --https-bind-address. Reloaded when the file changes.
    #[arg(long, value_name = "FILE", requires = "tls_key_file")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key (PEM) of that certificate.
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub tls_key_file: Option<PathBuf>,

    /// How requests are authorized.
    #[arg(long, value_enum, default_value = "tokenreview")]
    pub authz_mode: AuthzMode,
    /// Cache TTL of TokenReviews and SubjectAccessReviews: a revoked token is accepted for this long at most.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub authz_tokenreview_ttl: Duration,
    /// Number of cached reviews.
    #[arg(long, value_name = "COUNT", default_value_t = 2048)]
    pub authz_tokenreview_cache_size: usize,
    /// Audiences of which a token must have at least one; none for the audience of the API server.
    #[arg(long, value_name = "AUDIENCE", value_delimiter = ',')]
    pub authz_tokenreview_audiences: Vec<String>,
    /// File with the secret of scoped tokens, at least 32 bytes.
    #[arg(long, value_name = "FILE", env = "AUTHZ_SCOPED_TOKEN_SECRET_FILE")]
    pub authz_scoped_token_secret_file: Option<PathBuf>,

    /// DNS domain of the cluster; used only with --dns-fallback.
    #[arg(long, default_value = "cluster.local", env = "CLUSTER_DOMAIN")]
    pub cluster_domain: String,
    /// Resolve sandboxes without a known ready pod by the DNS name of their Service. Off by default: who can create
    /// a Service in a namespace can choose the address that the router dials.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub dns_fallback: bool,
    /// How long a request waits for a ready pod of its sandbox. A client may learn of its sandbox before the router.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub resolve_timeout: Duration,
    /// Serve the sandboxes of this namespace only. Default: all namespaces.
    #[arg(long, value_name = "NAMESPACE")]
    pub cache_namespace: Option<String>,
    /// Also route the path PREFIX/NAMESPACE/SANDBOX/PORT/…, for clients that cannot send headers.
    #[arg(long, value_name = "PREFIX")]
    pub path_routing_prefix: Option<String>,
    /// Allow pod addresses on loopback: for a router in the pod of its sandbox, and for tests.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub allow_loopback_pod_ip: bool,

    /// Timeout of a request, from its head to the end of the response. X-Sandbox-Timeout can shorten it. Does not apply
    /// to WebSockets.
    #[arg(long, value_name = "TIME", default_value = "180s", env = "PROXY_TIMEOUT_SECONDS", value_parser = duration)]
    pub proxy_timeout: Duration,
    /// Timeout until the head of a sandbox's response; 0 is the same as --proxy-timeout.
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration)]
    pub response_header_timeout: Duration,
    /// Timeout of one attempt to connect to a sandbox.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub upstream_connect_timeout: Duration,
    /// Retries of a failed connection attempt. A request that was sent is never retried.
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=10))]
    pub upstream_max_retries: u32,
    /// Back-off before the first retry; it doubles with each.
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = duration)]
    pub upstream_retry_initial_delay: Duration,
    /// Longest back-off between two retries.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub upstream_retry_max_delay: Duration,
    /// Largest request body in bytes; 0 is no limit.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub max_request_body_bytes: u64,
    /// Connection limit, for clients and for sandboxes each; further connections wait.
    #[arg(long, value_name = "COUNT", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_connections: u32,
    /// Closes a connection without a request after this time.
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = duration)]
    pub idle_timeout: Duration,
    /// Closes a WebSocket without traffic after this time.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub websocket_idle_timeout: Duration,
    /// After SIGTERM, keep accepting requests for this long while the readiness probe fails: load balancers need a
    /// while to stop sending.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub shutdown_delay: Duration,
    /// Drain timeout: after that, how long requests in flight may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub shutdown_timeout: Duration,

    /// Kubeconfig file of the cluster. Default: $KUBECONFIG, ~/.kube/config, or the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Log a line for each request.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub access_log: bool,
    /// Accepted for compatibility: pods are always cached.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub cache_enabled: Option<bool>,
}

// === impl Options ===

impl Options {
    /// Checks combinations of flags.
    pub(super) fn check(&self) -> Result<(), Error> {
        let scoped = self.authz_mode == AuthzMode::ScopedToken;
        let wrong = if scoped && self.authz_scoped_token_secret_file.is_none() {
            "--authz-mode scoped-token needs --authz-scoped-token-secret-file, a file with at least 32 random bytes"
        } else if self.https_bind_address != Bind::Off && self.tls_cert_file.is_none() {
            "--https-bind-address needs --tls-cert-file and --tls-key-file"
        } else if self.https_bind_address == Bind::Off && self.http_bind_address == Bind::Off {
            "both --http-bind-address and --https-bind-address are off: set one of them"
        } else if self.proxy_timeout.is_zero() {
            "--proxy-timeout must be more than 0"
        } else if self.cache_enabled == Some(false) {
            "--cache-enabled=false is not supported: only pods in the cache are dialled; leave it out"
        } else if self
            .path_routing_prefix
            .as_deref()
            .is_some_and(|prefix| !is_prefix(prefix))
        {
            "--path-routing-prefix must begin with / and not end with it, as in /sandboxes"
        } else {
            return Ok(());
        };
        Err(Error::Flags(wrong))
    }

    /// Timeout until the head of a response.
    pub(super) fn answer_within(&self) -> Duration {
        if self.response_header_timeout.is_zero() {
            return self.proxy_timeout;
        }
        self.response_header_timeout.min(self.proxy_timeout)
    }
}

fn is_prefix(prefix: &str) -> bool {
    prefix.len() > 1 && prefix.starts_with('/') && !prefix.ends_with('/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn parse(flags: &[&str]) -> Result<Options, clap::Error> {
        let all = ["router"].iter().chain(flags);
        Cli::try_parse_from(all).map(|cli| cli.options)
    }

    #[test]
    fn flags_of_agent_sandbox_manifests_are_accepted() {
        let flags = [
            "--cache-enabled=true",
            "--proxy-timeout=3m",
            "--authz-mode=allow-all",
            "--access-log",
            "--dns-fallback=false",
            "--http-bind-address=:80",
            "--metrics-bind-address=0",
            "--authz-tokenreview-audiences=a,b",
        ];
        let options = parse(&flags).unwrap();
        options.check().unwrap();
        assert_eq!(options.proxy_timeout, Duration::from_secs(180));
        assert_eq!(options.metrics_bind_address, Bind::Off);
        assert_eq!(options.authz_tokenreview_audiences, ["a", "b"]);
        assert!(options.access_log && !options.dns_fallback);
    }

    #[test]
    fn contradicting_flags_are_refused() {
        let wrong: [&[&str]; 6] = [
            &["--authz-mode=scoped-token"],
            &["--https-bind-address=:8443"],
            &["--http-bind-address="],
            &["--proxy-timeout=0"],
            &["--cache-enabled=false"],
            &["--path-routing-prefix=x/"],
        ];
        for flags in wrong {
            assert!(parse(flags).unwrap().check().is_err(), "{flags:?}");
        }
        assert!(parse(&["--tls-cert-file=x"]).is_err());
        assert!(parse(&["--upstream-max-retries=1000"]).is_err());
    }

    #[test]
    fn a_token_is_created_with_the_secret_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        std::fs::write(&file, "0123456789abcdef0123456789abcdef\n").unwrap();
        let file = file.to_str().unwrap();
        let flags = [
            "token",
            "--name",
            "sb",
            "--ttl",
            "5m",
            "--authz-scoped-token-secret-file",
            file,
        ];
        let Some(Command::Token(options)) = parse(&flags).unwrap().command else {
            panic!("no token was asked for");
        };
        assert!(
            crate::router::token(&options)
                .unwrap()
                .starts_with("v1.eyJucyI6ImRlZmF1bHQiLCJuYW1lIjoic2IiLCJleHAiOj")
        );
        std::fs::write(file, "short").unwrap();
        let said = crate::router::token(&options).unwrap_err().to_string();
        assert!(said.contains("openssl rand"), "{said}");
    }
}
