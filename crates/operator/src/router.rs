//! The way to sandboxes: one Service in front of all of them. Headers of a request say which sandbox it is for.
//!
//! It speaks what clients of `sandbox-router-svc` speak, and never dials an address that is not a pod's of the
//! sandbox that was asked for. Which pods those are it knows from a watch, not from its callers.

mod answer;
mod authz;
mod body;
mod index;
mod metrics;
mod options;
mod proxy;
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
use proxy::Proxy;
use serve::Doors;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch as latest;

/// How long the API server may say nothing on a connection. A watch ends before that.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// Why there is no router.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither a kubeconfig nor a service account.
    #[error(
        "cannot tell which cluster to watch; set --kubeconfig, or run in a pod with a service account: {0}"
    )]
    Cluster(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A port that somebody else has, most likely.
    #[error(transparent)]
    Listen(#[from] NoListener),
    /// A file that was named by a flag.
    #[error("cannot read {path} ({flag}): {source}")]
    Read {
        /// Which flag.
        flag: &'static str,
        /// What it says.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A certificate and its key, which do not go together or are none.
    #[error("cannot use the certificate in {cert} with the key in {key}: {why}")]
    Certificate {
        /// --tls-cert-file
        cert: PathBuf,
        /// --tls-key-file
        key: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Flags that contradict each other.
    #[error("{0}")]
    Flags(&'static str),
    /// A token could not be made, or none could be checked.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The recorder of metrics.
    #[error("cannot measure: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// Signals.
    #[error("cannot wait for signals: {0}")]
    Signals(#[source] std::io::Error),
}

/// Serves until a signal asks it to stop. Installs the recorder of metrics, so: once in a process.
pub async fn run(options: Options) -> Result<(), Error> {
    options.check()?;
    let handle = metrics::install()?;
    let doors = Doors::open(&options).await?;
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
    let side = serve::Side::new(handle, Arc::clone(&index), stopping);
    let (delay, patience) = (options.shutdown_delay, options.shutdown_timeout);
    let proxy = Arc::new(Proxy::new(options, index, authorizer));
    let served = tokio::spawn(doors.serve(proxy, side, closing));
    signalled().await?;
    // First those who send requests hear of it, and only then is nobody there.
    let _ = stop.send(true);
    tokio::time::sleep(delay).await;
    tracing::info!("stopping: answering what is under way, for {patience:?} at most");
    let _ = close.send(true);
    let _ = tokio::time::timeout(patience, served).await;
    watching.abort();
    Ok(())
}

/// A token that opens one sandbox, for `--authz-mode scoped-token`.
pub fn token(options: &TokenOptions) -> Result<String, Error> {
    let path = &options.authz_scoped_token_secret_file;
    let secret = read_file("--authz-scoped-token-secret-file", path)?;
    let token = mint(&secret, &options.namespace, &options.name, options.ttl)?;
    Ok(token)
}

/// A token that opens the sandbox `name` in `namespace` until `ttl` is over.
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
    // From the request on: a connection that was idle before has all of that time too.
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

async fn signalled() -> Result<(), Error> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Signals)?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
