//! What whoever runs the router decides. Flags have the names and defaults of the router that this one replaces,
//! except where a default was a hole.

use super::Error;
use crate::units::{Bind, duration};
use clap::{ArgAction, Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Who may reach which sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AuthzMode {
    /// A bearer token that the cluster knows, of somebody who may `create` `sandboxes/proxy` of that sandbox.
    Tokenreview,
    /// A token made for that one sandbox with `k8e router token`.
    ScopedToken,
    /// Everybody who can connect reaches every sandbox: only where nobody else can connect.
    AllowAll,
}

/// What to do instead of serving.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Print a token that opens one sandbox (--authz-mode scoped-token).
    Token(TokenOptions),
}

/// Of `k8e router token`.
#[derive(Clone, Debug, Args)]
pub struct TokenOptions {
    /// Namespace of the sandbox.
    #[arg(long, default_value = "default")]
    pub namespace: String,
    /// Name of the sandbox.
    #[arg(long)]
    pub name: String,
    /// How long the token is good for: 1h, 90s, or seconds.
    #[arg(long, default_value = "1h", value_parser = duration)]
    pub ttl: Duration,
    /// The secret that the router has too.
    #[arg(long, value_name = "FILE", env = "AUTHZ_SCOPED_TOKEN_SECRET_FILE")]
    pub authz_scoped_token_secret_file: PathBuf,
}

/// Passes requests on to sandboxes in Kubernetes.
///
/// The headers of a request say which sandbox: X-Sandbox-ID, and if need be X-Sandbox-Namespace and X-Sandbox-Port.
/// It watches the pods of sandboxes (list and watch on pods), so it needs a service account or --kubeconfig.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Options {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Where requests come in; empty for nowhere.
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    pub http_bind_address: Bind,
    /// Where requests come in over TLS; empty for nowhere.
    #[arg(long, value_name = "ADDRESS", default_value = "")]
    pub https_bind_address: Bind,
    /// Where /metrics is; empty for nowhere.
    #[arg(long, value_name = "ADDRESS", default_value = ":9090")]
    pub metrics_bind_address: Bind,
    /// Where /healthz and /readyz are; empty for nowhere.
    #[arg(long, value_name = "ADDRESS", default_value = ":8081")]
    pub health_probe_bind_address: Bind,
    /// Certificate chain (PEM) for --https-bind-address. Read again when it changes.
    #[arg(long, value_name = "FILE", requires = "tls_key_file")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key (PEM) of that certificate.
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub tls_key_file: Option<PathBuf>,

    /// Who may reach which sandbox.
    #[arg(long, value_enum, default_value = "tokenreview")]
    pub authz_mode: AuthzMode,
    /// How long the cluster's word about a token, and about what it may reach, is believed.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub authz_tokenreview_ttl: Duration,
    /// How many such words are kept.
    #[arg(long, value_name = "COUNT", default_value_t = 2048)]
    pub authz_tokenreview_cache_size: usize,
    /// Audiences of which a token must have one; none for the API server's own.
    #[arg(long, value_name = "AUDIENCE", value_delimiter = ',')]
    pub authz_tokenreview_audiences: Vec<String>,
    /// Secret of at least 32 bytes that scoped tokens are made with.
    #[arg(long, value_name = "FILE", env = "AUTHZ_SCOPED_TOKEN_SECRET_FILE")]
    pub authz_scoped_token_secret_file: Option<PathBuf>,

    /// What names of Services end in; only for --dns-fallback.
    #[arg(long, default_value = "cluster.local", env = "CLUSTER_DOMAIN")]
    pub cluster_domain: String,
    /// Ask DNS for sandboxes of which no ready pod is known. Off: whoever may make a Service in a namespace
    /// decides what its name stands for, and so what the router dials.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub dns_fallback: bool,
    /// How long a request waits for the pod of its sandbox to become known: news of a claim may overtake it.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub resolve_timeout: Duration,
    /// Sandboxes of this namespace only; unset for all.
    #[arg(long, value_name = "NAMESPACE")]
    pub cache_namespace: Option<String>,
    /// Also take PREFIX/NAMESPACE/SANDBOX/PORT/… as an address, for clients that cannot send headers.
    #[arg(long, value_name = "PREFIX")]
    pub path_routing_prefix: Option<String>,
    /// Let a pod's address be 127.0.0.1: for a router beside its sandbox, and for tests.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub allow_loopback_pod_ip: bool,

    /// What a request may take from end to end; X-Sandbox-Timeout may ask for less. Not for WebSockets.
    #[arg(long, value_name = "TIME", default_value = "180s", env = "PROXY_TIMEOUT_SECONDS", value_parser = duration)]
    pub proxy_timeout: Duration,
    /// How long a sandbox may think before it answers; 0 for as long as --proxy-timeout.
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration)]
    pub response_header_timeout: Duration,
    /// How long one connection to a sandbox may take to be made.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub upstream_connect_timeout: Duration,
    /// How often a connection that was not made is tried again. A request that was sent never is.
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=10))]
    pub upstream_max_retries: u32,
    /// What passes before the first of those; doubles with each.
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = duration)]
    pub upstream_retry_initial_delay: Duration,
    /// What passes between two at most.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub upstream_retry_max_delay: Duration,
    /// Largest body of a request in bytes; 0 for any.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub max_request_body_bytes: u64,
    /// Connections at once; further ones wait.
    #[arg(long, value_name = "COUNT", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_connections: u32,
    /// When a connection on which nothing is asked is closed.
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = duration)]
    pub idle_timeout: Duration,
    /// When a WebSocket on which nothing is said is closed.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    pub websocket_idle_timeout: Duration,
    /// How long requests are still taken when the router is stopped: it takes a while until nobody sends any.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub shutdown_delay: Duration,
    /// What requests under way may take after that.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub shutdown_timeout: Duration,

    /// Which cluster; unset for the one this runs in, or kubectl's.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Log a line for each request.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub access_log: bool,
    /// Accepted for manifests of other routers: the index of pods is always there.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub cache_enabled: Option<bool>,
}

// === impl Options ===

impl Options {
    /// Whether they make sense together.
    pub(super) fn check(&self) -> Result<(), Error> {
        let scoped = self.authz_mode == AuthzMode::ScopedToken;
        let wrong = if scoped && self.authz_scoped_token_secret_file.is_none() {
            "--authz-mode scoped-token needs --authz-scoped-token-secret-file, a file with at least 32 random bytes"
        } else if self.https_bind_address != Bind::Off && self.tls_cert_file.is_none() {
            "--https-bind-address needs --tls-cert-file and --tls-key-file"
        } else if self.https_bind_address == Bind::Off && self.http_bind_address == Bind::Off {
            "neither --http-bind-address nor --https-bind-address says where to listen"
        } else if self.proxy_timeout.is_zero() {
            "--proxy-timeout must be more than 0"
        } else if self.cache_enabled == Some(false) {
            "--cache-enabled=false is not possible here: only pods that are known are dialled; leave it out"
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

    /// How long to wait for the head of an answer.
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
    fn flags_are_taken_as_manifests_write_them() {
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
    fn what_contradicts_itself_is_said() {
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
    fn a_token_is_made_from_a_file() {
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
