//! `k8e router`: a reverse proxy in front of all sandboxes. Headers of a request name the sandbox.
//!
//! It is compatible with the clients of `sandbox-router-svc`. It dials only addresses of the pods of the named sandbox,
//! which it knows from an informer (a watch on pods), never from a client.

mod authz;
mod body;
mod index;
mod metrics;
mod options;
mod proxy;
mod refusal;
mod serve;
mod target;
mod tls;
mod watch;

#[cfg(test)]
mod tests;

pub use authz::token::{SECRET_BYTES_MIN, TokenError};
pub use options::{AuthzMode, Command, Options, TokenOptions};

use crate::units::NoListener;
use authz::Authorizer;
use index::Index;
use k8e_net::shutdown;
use proxy::Proxy;
use serve::Listeners;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch as latest;

/// Read timeout of connections to the API server. A watch ends before that (see `watch::WATCH_SECONDS`).
const READ_WITHIN: Duration = Duration::from_secs(30);

/// An error that keeps the router from starting.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is neither a valid kubeconfig nor a service account.
    #[error(
        "no Kubernetes cluster to connect to; set --kubeconfig, or run in a pod with a service account: {0}"
    )]
    Cluster(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A bind address could not be bound.
    #[error(transparent)]
    Listen(#[from] NoListener),
    /// A file that a flag names could not be read.
    #[error("cannot read {path} ({flag}): {source}")]
    Read {
        /// Name of the flag, with dashes.
        flag: &'static str,
        /// Path that the flag gives.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Certificate and key are not valid PEM, or do not match.
    #[error("cannot use the certificate in {cert} with the key in {key}: {why}")]
    Certificate {
        /// Path of `--tls-cert-file`.
        cert: PathBuf,
        /// Path of `--tls-key-file`.
        key: PathBuf,
        /// What is wrong with them.
        why: String,
    },
    /// Flags contradict each other, or a flag is missing; the text names them.
    #[error("{0}")]
    Flags(&'static str),
    /// A scoped token could not be created, or the secret for them is not valid.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The metrics recorder could not be installed.
    #[error("cannot install the metrics recorder: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// The handlers of SIGTERM and SIGINT could not be installed.
    #[error("cannot install signal handlers: {0}")]
    Signals(#[source] std::io::Error),
}

/// Serves until SIGTERM or SIGINT. Installs the global metrics recorder, so it can be called once per process.
pub async fn run(options: Options) -> Result<(), Error> {
    options.check()?;
    let handle = metrics::install()?;
    let listeners = Listeners::open(&options).await?;
    let client = client(&options).await?;
    let index = Arc::new(Index::new(options.allow_loopback_pod_ip));
    let authorizer = Authorizer::new(&options, &client)?;
    let watching = tokio::spawn(watch::follow(
        client,
        options.cache_namespace.clone(),
        Arc::clone(&index),
    ));
    let (stop, stopping) = latest::channel(false);
    let (close, closing) = latest::channel(false);
    let admin = serve::AdminState::new(handle, Arc::clone(&index), stopping);
    let (delay, drain_timeout) = (options.shutdown_delay, options.shutdown_timeout);
    let proxy = Arc::new(Proxy::new(options, index, authorizer));
    let served = tokio::spawn(listeners.serve(proxy, admin, closing));
    shutdown::signals().map_err(Error::Signals)?.await;
    // First the readiness probe fails, so that no more requests are sent here; listeners close after the delay.
    let _ = stop.send(true);
    tokio::time::sleep(delay).await;
    tracing::info!("shutting down: draining requests in flight, for {drain_timeout:?} at most");
    let _ = close.send(true);
    let _ = tokio::time::timeout(drain_timeout, served).await;
    watching.abort();
    Ok(())
}

/// Mints a token for one sandbox (`k8e router token`), for `--authz-mode scoped-token`.
pub fn token(options: &TokenOptions) -> Result<String, Error> {
    let path = &options.authz_scoped_token_secret_file;
    let secret = read_file("--authz-scoped-token-secret-file", path)?;
    let token = mint(&secret, &options.namespace, &options.name, options.ttl)?;
    Ok(token)
}

/// Mints a scoped token for the sandbox `name` in `namespace` that expires after `ttl`.
pub fn mint(
    secret: &[u8],
    namespace: &str,
    name: &str,
    ttl: Duration,
) -> Result<String, TokenError> {
    let secret = authz::token::Secret::new(secret)?;
    secret.mint(namespace, name, ttl, SystemTime::now())
}

async fn client(options: &Options) -> Result<kube::Client, Error> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| Error::Cluster(error);
    let mut config = match &options.kubeconfig {
        Some(path) => {
            let read = kube::config::Kubeconfig::read_from(path);
            let read = read.map_err(|error| failed(error.into()))?;
            let chosen = kube::config::KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(read, &chosen).await;
            config.map_err(|error| failed(error.into()))?
        }
        None => {
            let config = kube::Config::infer().await;
            config.map_err(|error| failed(error.into()))?
        }
    };
    config.read_timeout = Some(READ_WITHIN);
    // The read timeout starts with each request, not when the connection became idle.
    config.reset_reader_on_write = true;
    kube::Client::try_from(config).map_err(|error| failed(error.into()))
}

fn read_file(flag: &'static str, path: &std::path::Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::Read {
        flag,
        path: path.to_owned(),
        source,
    })
}
