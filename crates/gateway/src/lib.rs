//! The listeners ("doors") of the server: authentication, rate limiting, and gRPC turned into calls of the engine.
//!
//! Two listeners serve the same gRPC services: a Unix socket, where the kernel says who the client is, and TLS over TCP,
//! where certificates and API keys do. Three more are optional: the admin HTTP server for metrics and probes, the
//! reverse proxy to services that sessions expose, and the E2B API. This crate parses and renders; it never talks to a driver, a guest or
//! the store.

mod admin;
mod auth;
mod cancellation;
mod catch_panic;
mod certificate_rotation;
mod connection;
mod connection_limit;
mod deadline;
mod e2b;
mod error;
mod expose;
mod k8e_v1;
mod listeners;
mod metrics;
mod rate_limit;
mod sandbox_v1;
mod source;
mod text;
mod tls_listener;
mod unix_socket;

/// For the crate `fuzz`: decoders that are private otherwise.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::auth::fuzzing::*;
    pub use crate::e2b::fuzzing::*;
}

pub use admin::Admin;
pub use auth::peer::group_id;
pub use e2b::E2b;
pub use error::Error;
pub use expose::{BaseUrl, Expose};
pub use k8e_net::token_bucket::Rate;
pub use listeners::Listeners;
pub use metrics::Metrics;
pub use rate_limit::RateLimits;

use admin::AdminServer;
use auth::Authenticator;
use auth::middleware::AuthLayer;
use auth::tls::Tls;
use certificate_rotation::Names;
use connection::Connection;
use e2b::E2bServer;
use expose::ExposeServer;
use futures::StreamExt as _;
use k8e_engine::Sessions;
use k8e_net::accept::ConnectionLimit;
use metrics::CountLayer;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tonic::transport::Server;
use tower::util::{MapFutureLayer, MapRequestLayer};

/// Connection limit of the Unix socket. Each costs a descriptor and some buffers; further ones wait in the
/// kernel's queue (backpressure), so that ten thousand clients at once are slow and not an outage.
const UNIX_CONNECTIONS_MAX: usize = 4096;

/// Calls under way on one connection; further ones wait at the client.
///
/// A call holds at most one message that is being decoded, of 64 MiB (`sandbox.v1` clients write files in one), so a
/// hostile connection costs 8 GiB, times the connection limit. That is more than a machine has: it bounds one client's
/// mistakes, not all clients' malice. Clients that get this far are authenticated, by the kernel, a certificate of ours
/// or an API key; an unauthenticated client never reaches the decoder.
const STREAMS_PER_CONNECTION_MAX: u32 = 128;

/// HTTP/2 keepalive: a peer that is silent for this long is sent a ping; without a reply it is dropped and its commands end.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// HTTP/2 flow-control windows: enough that a large file does not wait for round trips.
const STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// Drain timeout: how long calls under way have to end when the server stops.
const DRAIN_WITHIN: Duration = Duration::from_secs(5);

/// Where the server listens, and its limits.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// The group whose members may use the Unix socket, besides root.
    pub socket_group: String,
    /// The TLS listener; none leaves only the Unix socket.
    pub tcp: Option<Tcp>,
    /// Where our certificate authority, the server's certificate and the admin's are kept.
    pub tls_dir: PathBuf,
    /// Where `sandbox.v1` clients on this machine look for the authority: it gets links to ours,
    /// beside whatever else is there.
    pub tls_links_dir: Option<PathBuf>,
    /// Further names for the server's certificate: those that clients use and this machine does not know.
    pub tls_names: Vec<String>,
    /// Between checks whether the server's certificate must be renewed.
    pub tls_check_every: Duration,
    /// Rate limits of each principal.
    pub rate_limits: RateLimits,
    /// The admin HTTP server for metrics and probes; none serves neither.
    pub admin: Option<Admin>,
    /// The reverse proxy to exposed services; without it nothing can be exposed.
    pub expose: Option<Expose>,
    /// The E2B API; none does not serve it.
    pub e2b: Option<E2b>,
}

/// Default of [`Config::tls_check_every`].
pub const TLS_CHECK_EVERY: Duration = Duration::from_secs(60);

/// The TLS listener.
#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether failing to bind is an error. A default address may be in use by another program.
    pub required: bool,
    /// Whether a client on loopback without key and certificate is authenticated as the user that the kernel says owns
    /// its socket, and admitted if that is root or a member of the group.
    pub trust_loopback: bool,
}

/// The listeners, bound but not served yet.
pub struct Gateway {
    sessions: Sessions,
    group: String,
    rate_limits: RateLimits,
    unix: UnixListener,
    tcp: Option<TlsServer>,
    admin: Option<AdminServer>,
    expose: Option<ExposeServer>,
    e2b: Option<E2bServer>,
}

struct TlsServer {
    listener: TcpListener,
    address: SocketAddr,
    trust_loopback: bool,
    tls: Arc<Tls>,
    names: Names,
    check_every: Duration,
}

// === impl Gateway ===

impl Gateway {
    /// Makes ready to serve on `listeners`, which were bound with the same configuration.
    pub fn open(config: Config, listeners: Listeners, sessions: Sessions) -> Result<Self, Error> {
        let tcp = match (config.tcp, listeners.tcp) {
            (Some(tcp), Some(listener)) => Some(open_tcp(tcp, listener, &config)?),
            _ => None,
        };
        let admin = match (config.admin, listeners.admin) {
            (Some(admin), Some(listener)) => Some(AdminServer::open(admin, listener)?),
            _ => None,
        };
        let expose = match (&config.expose, listeners.expose) {
            (Some(expose), Some(listener)) => {
                let name = config.tls_names.first().map(String::as_str);
                Some(ExposeServer::open(expose, listener, name)?)
            }
            _ => None,
        };
        let e2b = match (&config.e2b, listeners.e2b) {
            (Some(e2b), Some(listener)) => Some(E2bServer::open(e2b, listener)?),
            _ => None,
        };
        if let Some(server) = &expose {
            sessions.serve_exposed_at(server.base());
        }
        let unix = UnixListener::from_std(listeners.unix).map_err(Error::Reactor)?;
        Ok(Self {
            sessions,
            group: config.socket_group,
            rate_limits: config.rate_limits,
            unix,
            tcp,
            admin,
            expose,
            e2b,
        })
    }

    /// The address of the TLS listener, if there is one.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().map(|server| server.address)
    }

    /// The address of the admin HTTP server, if there is one.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(|server| server.address)
    }

    /// The address of the reverse proxy to exposed services, if there is one.
    pub fn expose_address(&self) -> Option<SocketAddr> {
        self.expose.as_ref().map(|server| server.address)
    }

    /// The address of the E2B API, if it is served.
    pub fn e2b_address(&self) -> Option<SocketAddr> {
        self.e2b.as_ref().map(|server| server.address)
    }

    /// Serves until `shutdown`, then takes no more calls and gives those under way five seconds.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let (stop, stopped) = watch::channel(false);
        let exposing = self.sessions.clone();
        let tls = self.tcp.as_ref().map(|server| Arc::clone(&server.tls));
        let service = k8e_v1::services(self.sessions.clone(), tls, stopped.clone()).await?;
        let authenticator = Authenticator::new(self.sessions.clone(), self.group, self.rate_limits);
        let e2b_authenticator = authenticator.clone();
        let layers = (CountLayer::new(), AuthLayer(authenticator));
        let unix = serve_unix(self.unix, service.clone(), layers.clone(), signal(&stopped));
        let tcp = async {
            match self.tcp {
                Some(server) => serve_tcp(server, service, layers, signal(&stopped)).await,
                None => Ok(()),
            }
        };
        // Boxed: two servers make a large future.
        let servers = Box::pin(async { tokio::try_join!(unix, tcp).map(drop) });
        let admin = async {
            match self.admin {
                Some(server) => server.serve(self.sessions, stopped.clone()).await,
                None => std::future::pending().await,
            }
        };
        let expose = async {
            match self.expose {
                Some(server) => server.serve(exposing).await,
                None => std::future::pending().await,
            }
        };
        let e2b = async {
            match self.e2b {
                Some(server) => server.serve(e2b_authenticator).await,
                None => std::future::pending().await,
            }
        };
        // Metrics, probes, the E2B API and exposed services are served until the calls have drained.
        tokio::select! {
            result = drained(servers, shutdown, &stop) => result,
            () = admin => Ok(()),
            () = expose => Ok(()),
            () = e2b => Ok(()),
        }
    }
}

/// Graceful shutdown: serves until `shutdown`, then until the calls under way have ended or [`DRAIN_WITHIN`] is over.
async fn drained(
    mut servers: impl Future<Output = Result<(), Error>> + Unpin,
    shutdown: impl Future<Output = ()>,
    stop: &watch::Sender<bool>,
) -> Result<(), Error> {
    tokio::select! {
        result = &mut servers => return result,
        () = shutdown => {}
    }
    stop.send_replace(true);
    match tokio::time::timeout(DRAIN_WITHIN, servers).await {
        Ok(result) => result,
        Err(_) => {
            tracing::warn!("calls were still under way after {DRAIN_WITHIN:?} and are cut off");
            Ok(())
        }
    }
}

fn open_tcp(
    tcp: Tcp,
    listener: std::net::TcpListener,
    config: &Config,
) -> Result<TlsServer, Error> {
    let listener = TcpListener::from_std(listener).map_err(Error::Reactor)?;
    let address = listener.local_addr().unwrap_or(tcp.address);
    if tcp.trust_loopback {
        tracing::warn!(
            "--trust-loopback: programs of root and of the group {} need neither key nor certificate on loopback; what they pass on for others is let in too",
            config.socket_group
        );
    }
    let names = Names::new(&config.tls_names)?;
    let tls = Arc::new(Tls::open(&config.tls_dir, &names.now())?);
    if let Some(dir) = &config.tls_links_dir {
        tls.link_authority(dir)?;
    }
    Ok(TlsServer {
        listener,
        address,
        trust_loopback: tcp.trust_loopback,
        tls,
        names,
        check_every: config.tls_check_every,
    })
}

async fn serve_unix(
    listener: UnixListener,
    services: k8e_v1::Services,
    (count, admit): (CountLayer, AuthLayer),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let incoming = ConnectionLimit::new(UNIX_CONNECTIONS_MAX).incoming(listener);
    let incoming =
        incoming.map(|(stream, attached)| Ok::<_, io::Error>(Connection { stream, attached }));
    tuned(Server::builder())
        .layer(count)
        .layer(deadline::DeadlineLayer)
        .layer(admit)
        .layer(MapRequestLayer::new(cancellation::fail_on_cancel))
        .layer(MapFutureLayer::new(catch_panic::catch_panic))
        .add_routes(services)
        .serve_with_incoming_shutdown(incoming, stop)
        .await
        .map_err(Error::Serve)
}

async fn serve_tcp(
    server: TlsServer,
    services: k8e_v1::Services,
    (count, admit): (CountLayer, AuthLayer),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let config = server.tls.server_config()?;
    let authenticator = admit.0.clone();
    let incoming = tls_listener::accept(
        server.listener,
        config,
        authenticator,
        server.trust_loopback,
    );
    let served = tuned(Server::builder())
        .layer(count)
        .layer(deadline::DeadlineLayer)
        .layer(admit)
        .layer(MapRequestLayer::new(cancellation::fail_on_cancel))
        .layer(MapFutureLayer::new(catch_panic::catch_panic))
        .add_routes(services)
        .serve_with_incoming_shutdown(incoming, stop);
    tokio::select! {
        served = served => served.map_err(Error::Serve),
        never = certificate_rotation::rotate(&server.tls, &server.names, server.check_every) => match never {},
    }
}

fn tuned(server: Server) -> Server {
    server
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
}

fn signal(stopped: &watch::Receiver<bool>) -> impl Future<Output = ()> + use<> {
    let mut stopped = stopped.clone();
    async move {
        // An error: the sender is dropped, and with it the server.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }
}
