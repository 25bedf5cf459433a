//! The doors: who may come in, and what they say turned into calls of the engine.
//!
//! Two doors lead to one service: a Unix socket, where the kernel says who is there, and TLS over
//! TCP, where certificates and API keys do. A third, if somebody asks for it, shows how the server is, and
//! a fourth leads visitors to services that sessions expose. A door
//! parses and renders; it never talks to a driver, a guest or the store.

mod admin;
mod auth;
mod broken_off;
mod catch_panic;
mod compat;
mod connection_limit;
mod deadline;
mod error;
mod expose;
mod grpc;
mod limit;
mod listen;
mod listeners;
mod metrics;
mod rotate;
mod secure;
mod socket;
mod source;

/// For the crate `fuzz`: decoders that are nobody else's business.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::auth::fuzzing::*;
}

pub use admin::Admin;
pub use auth::peer::group_id;
pub use error::Error;
pub use expose::{BaseUrl, Expose};
pub use limit::{Rate, RateLimits};
pub use listeners::Listeners;
pub use metrics::Metrics;

use admin::AdminDoor;
use auth::Doorkeeper;
use auth::admit::AdmitLayer;
use auth::tls::Tls;
use expose::ExposeDoor;
use k8e_engine::Sessions;
use listen::Bounded;
use metrics::CountLayer;
use rotate::Names;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tonic::transport::Server;
use tower::util::MapRequestLayer;

/// Connections of the Unix socket. Each costs a descriptor and some buffers; further ones wait in the
/// kernel's queue, so that ten thousand clients at once are slow and not an outage.
const UNIX_CONNECTIONS_MAX: usize = 4096;

/// Calls under way on one connection; further ones wait at the client.
///
/// A call holds at most one message that is being put together, of 64 MiB (K8E's clients write files
/// in one), so a connection that means harm costs 8 GiB, and a door that times its connections. That is more
/// than a machine has: it bounds one client's mistakes, not all clients' malice. Who gets this far
/// has been let in, by the kernel, a certificate of ours or an API key; strangers never reach the
/// decoder.
const STREAMS_PER_CONNECTION_MAX: u32 = 128;

/// A peer that is silent for this long is asked for a sign of life, then dropped: its commands end.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Enough that a large file is not held up by round trips.
const STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// What calls under way get when the server stops.
const DRAIN_WITHIN: Duration = Duration::from_secs(5);

/// Where the doors are.
#[derive(Clone, Debug)]
pub struct Config {
    /// The Unix socket.
    pub socket: PathBuf,
    /// Whose members may use the socket, besides root.
    pub socket_group: String,
    /// The TLS door; none leaves only the socket.
    pub tcp: Option<Tcp>,
    /// Where our certificate authority, the server's certificate and the admin's are kept.
    pub tls_dir: PathBuf,
    /// Where `sandbox.v1` clients on this machine look for the authority: it gets links to ours,
    /// beside whatever else is there.
    pub tls_links_dir: Option<PathBuf>,
    /// Names of this server that the machine does not know: those that others have for it.
    pub tls_names: Vec<String>,
    /// How often to look whether the server's certificate must be made again.
    pub tls_check_every: Duration,
    /// How often one principal may call.
    pub rate_limits: RateLimits,
    /// The door for those who watch the server, if there shall be one.
    pub admin: Option<Admin>,
    /// The door for visitors of exposed services; without it nothing can be exposed.
    pub expose: Option<Expose>,
}

/// How often [`Config::tls_check_every`] is, unless somebody has a reason.
pub const TLS_CHECK_EVERY: Duration = Duration::from_secs(60);

/// The TLS door.
#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether the server may not start without it. An address that nobody asked for may be taken.
    pub required: bool,
    /// Whether a client on loopback without key and certificate is believed to be the user that the kernel says owns its
    /// socket, and let in if that is root or a member of the group.
    pub trust_loopback: bool,
}

/// The doors, open but not served yet.
pub struct Gateway {
    sessions: Sessions,
    group: String,
    rate_limits: RateLimits,
    unix: UnixListener,
    tcp: Option<TcpDoor>,
    admin: Option<AdminDoor>,
    expose: Option<ExposeDoor>,
}

struct TcpDoor {
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
            (Some(admin), Some(listener)) => Some(AdminDoor::open(admin, listener)?),
            _ => None,
        };
        let expose = match (&config.expose, listeners.expose) {
            (Some(expose), Some(listener)) => {
                let name = config.tls_names.first().map(String::as_str);
                Some(ExposeDoor::open(expose, listener, name)?)
            }
            _ => None,
        };
        if let Some(door) = &expose {
            sessions.serve_exposed_at(door.base());
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
        })
    }

    /// The address of the TLS door, if there is one.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().map(|door| door.address)
    }

    /// The address of the door for those who watch, if there is one.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(|door| door.address)
    }

    /// The address of the door for visitors of exposed services, if there is one.
    pub fn expose_address(&self) -> Option<SocketAddr> {
        self.expose.as_ref().map(|door| door.address)
    }

    /// Serves until `shutdown`, then takes no more calls and gives those under way five seconds.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let (stop, stopped) = watch::channel(false);
        let visited = self.sessions.clone();
        let tls = self.tcp.as_ref().map(|door| Arc::clone(&door.tls));
        let service = grpc::services(self.sessions.clone(), tls, stopped.clone()).await?;
        let keeper = Doorkeeper::new(self.sessions.clone(), self.group, self.rate_limits);
        let layers = (CountLayer::new(), AdmitLayer(keeper));
        let unix = serve_unix(self.unix, service.clone(), layers.clone(), signal(&stopped));
        let tcp = async {
            match self.tcp {
                Some(door) => serve_tcp(door, service, layers, signal(&stopped)).await,
                None => Ok(()),
            }
        };
        // Boxed: two servers are a lot to carry around in a caller's future.
        let doors = Box::pin(async { tokio::try_join!(unix, tcp).map(drop) });
        let admin = async {
            match self.admin {
                Some(door) => door.serve(self.sessions, stopped.clone()).await,
                None => std::future::pending().await,
            }
        };
        let expose = async {
            match self.expose {
                Some(door) => door.serve(visited).await,
                None => std::future::pending().await,
            }
        };
        // Whoever watches sees the others drain, and visitors stay until they have.
        tokio::select! {
            result = drained(doors, shutdown, &stop) => result,
            () = admin => Ok(()),
            () = expose => Ok(()),
        }
    }
}

/// Runs the doors until they fail or `shutdown` is done and they are empty, or time is up.
async fn drained(
    mut doors: impl Future<Output = Result<(), Error>> + Unpin,
    shutdown: impl Future<Output = ()>,
    stop: &watch::Sender<bool>,
) -> Result<(), Error> {
    tokio::select! {
        result = &mut doors => return result,
        () = shutdown => {}
    }
    stop.send_replace(true);
    match tokio::time::timeout(DRAIN_WITHIN, doors).await {
        Ok(result) => result,
        Err(_) => {
            tracing::warn!("calls were still under way after {DRAIN_WITHIN:?} and are cut off");
            Ok(())
        }
    }
}

fn open_tcp(tcp: Tcp, listener: std::net::TcpListener, config: &Config) -> Result<TcpDoor, Error> {
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
    Ok(TcpDoor {
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
    services: grpc::Services,
    (count, admit): (CountLayer, AdmitLayer),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    tuned(Server::builder())
        .layer(count)
        .layer(deadline::DeadlineLayer)
        .layer(admit)
        .layer(MapRequestLayer::new(broken_off::told))
        .layer(catch_panic::CatchPanicLayer)
        .add_routes(services)
        .serve_with_incoming_shutdown(Bounded::new(listener, UNIX_CONNECTIONS_MAX).stream(), stop)
        .await
        .map_err(Error::Serve)
}

async fn serve_tcp(
    door: TcpDoor,
    services: grpc::Services,
    (count, admit): (CountLayer, AdmitLayer),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let config = door.tls.server_config()?;
    let keeper = admit.0.clone();
    let incoming = secure::accept(door.listener, config, keeper, door.trust_loopback);
    let served = tuned(Server::builder())
        .layer(count)
        .layer(deadline::DeadlineLayer)
        .layer(admit)
        .layer(MapRequestLayer::new(broken_off::told))
        .layer(catch_panic::CatchPanicLayer)
        .add_routes(services)
        .serve_with_incoming_shutdown(incoming, stop);
    tokio::select! {
        served = served => served.map_err(Error::Serve),
        never = rotate::rotate(&door.tls, &door.names, door.check_every) => match never {},
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
        // An error is a sender that is gone, and the server with it.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }
}
