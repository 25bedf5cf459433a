//! Admin HTTP server: `/metrics`, `/healthz` and `/readyz` over plain HTTP.
//!
//! It authenticates nobody and shows nothing of a client's, so it is off unless it is asked for (`--metrics-listen`).
//! Its connections are few, and fewer from one source: a flood costs the server no more than this, and a Prometheus
//! elsewhere does not notice.

use crate::connection_limit::{self, ConnectionLimits};
use crate::{Error, Metrics};
use futures::StreamExt as _;
use k8e_engine::Sessions;
use k8e_net::admin_http::{self, AdminHttp};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;

/// Nobody authenticates here; one source may have half.
const LIMITS: ConnectionLimits = ConnectionLimits {
    listener: "metrics",
    unauthenticated_max: admin_http::CONNECTIONS_MAX,
    unauthenticated_per_source_max: admin_http::CONNECTIONS_MAX / 2,
    authenticated_max: 0,
    authenticate_within: admin_http::CONNECTION_WITHIN,
};

/// A store that needs longer than this does not answer.
const READY_WITHIN: Duration = Duration::from_secs(2);

/// Where the admin HTTP server listens, and what it shows.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it shows.
    pub metrics: Metrics,
}

/// The server, listening but not served yet.
pub(crate) struct AdminServer {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
    metrics: Metrics,
}

// === impl AdminServer ===

impl AdminServer {
    pub(crate) fn open(admin: Admin, listener: std::net::TcpListener) -> Result<Self, Error> {
        let Admin { address, metrics } = admin;
        let listener = TcpListener::from_std(listener).map_err(Error::Reactor)?;
        Ok(Self {
            address: listener.local_addr().unwrap_or(address),
            listener,
            metrics,
        })
    }

    /// Serves until it is dropped.
    pub(crate) async fn serve(self, sessions: Sessions, stopping: watch::Receiver<bool>) {
        let (metrics, counted) = (self.metrics.clone(), sessions.clone());
        let server = AdminHttp::default()
            .metrics(move || metrics.render(&counted))
            .probes(move || ready(sessions.clone(), *stopping.borrow()));
        let incoming = connection_limit::accept(self.listener, LIMITS);
        tokio::select! {
            () = server.serve(incoming.map(|stream| (stream, ()))) => {}
            () = self.metrics.upkeep() => {}
        }
    }
}

/// Whether sessions can be made, or why not.
async fn ready(sessions: Sessions, stopping: bool) -> Result<(), String> {
    if stopping {
        return Err("the server is stopping".to_owned());
    }
    match timeout(READY_WITHIN, sessions.ready()).await {
        Ok(ready) => ready.map_err(|error| error.to_string()),
        Err(_) => Err(format!("the store did not answer within {READY_WITHIN:?}")),
    }
}
