//! The doors: who may come in, and what they say turned into calls of the engine.
//!
//! Two doors lead to one service: a Unix socket, where the kernel says who is there, and TLS over
//! TCP, where certificates do. A third, if somebody asks for it, shows how the server is. A door
//! parses and renders; it never talks to a driver, a guest or the store.

mod admin;
mod auth;
mod broken_off;
mod catch_panic;
mod error;
mod grpc;
mod listen;
mod metrics;
mod socket;

pub use admin::Admin;
pub use auth::peer::group_id;
pub use error::Error;
pub use metrics::Metrics;

use admin::AdminDoor;
use auth::tls;
use k8e_engine::Sessions;
use listen::Bounded;
use metrics::CountLayer;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tonic::service::InterceptorLayer;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tower::util::MapRequestLayer;

/// Connections of one door. Each costs a descriptor and some buffers; further ones wait in the
/// kernel's queue, so that ten thousand clients at once are slow and not an outage.
const UNIX_CONNECTIONS_MAX: usize = 4096;
const TCP_CONNECTIONS_MAX: usize = 1024;

/// Calls under way on one connection; further ones wait at the client.
///
/// A call holds at most one message that is being put together, of `REQUEST_BYTES_MAX` (20 MiB), so
/// a connection that means harm costs 2.5 GiB, and a door that times its connections. That is more
/// than a machine has: it bounds one client's mistakes, not all clients' malice. Who gets this far
/// has been let in, by the kernel or by a certificate of ours; strangers never reach the decoder.
const STREAMS_PER_CONNECTION_MAX: u32 = 128;

/// A peer that is silent for this long is asked for a sign of life, then dropped: its commands end.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// A stranger may hold a connection for this long before he must have proved who he is.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

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
    /// The door for those who watch the server, if there shall be one.
    pub admin: Option<Admin>,
}

/// The TLS door.
#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether the server may not start without it. An address that nobody asked for may be taken.
    pub required: bool,
}

/// The doors, open but not served yet.
pub struct Gateway {
    sessions: Sessions,
    socket: PathBuf,
    group: String,
    unix: UnixListener,
    tcp: Option<TcpDoor>,
    admin: Option<AdminDoor>,
}

struct TcpDoor {
    listener: TcpListener,
    address: SocketAddr,
    tls: ServerTlsConfig,
}

// === impl Gateway ===

impl Gateway {
    /// Opens the doors. From here on clients can connect, and wait for [`Gateway::serve`].
    pub async fn bind(config: Config, sessions: Sessions) -> Result<Self, Error> {
        let tcp = match config.tcp {
            Some(tcp) => bind_tcp(tcp, &config).await?,
            None => None,
        };
        let admin = match config.admin {
            Some(admin) => Some(AdminDoor::bind(admin).await?),
            None => None,
        };
        let unix = socket::bind(&config.socket, &config.socket_group)?;
        Ok(Self {
            sessions,
            socket: config.socket,
            group: config.socket_group,
            unix,
            tcp,
            admin,
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

    /// Serves until `shutdown`, then takes no more calls and gives those under way five seconds.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let (stop, stopped) = watch::channel(false);
        let service = grpc::services(self.sessions.clone(), stopped.clone()).await?;
        let count = CountLayer::new();
        let unix = serve_unix(
            self.unix,
            self.group,
            service.clone(),
            count.clone(),
            signal(&stopped),
        );
        let tcp = async {
            match self.tcp {
                Some(door) => serve_tcp(door, service, count, signal(&stopped)).await,
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
        // Whoever watches sees the others drain.
        let result = tokio::select! {
            result = drained(doors, shutdown, &stop) => result,
            () = admin => Ok(()),
        };
        // We hold the data directory: nobody else has put a socket here meanwhile.
        let _ = std::fs::remove_file(&self.socket);
        result
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

async fn bind_tcp(tcp: Tcp, config: &Config) -> Result<Option<TcpDoor>, Error> {
    let listener = match TcpListener::bind(tcp.address).await {
        Ok(listener) => listener,
        Err(source) if tcp.required => {
            return Err(Error::Listen {
                address: tcp.address,
                source,
            });
        }
        Err(source) => {
            tracing::warn!(
                "cannot listen on {}: {source}; going on with the socket only. Choose an address with --listen",
                tcp.address
            );
            return Ok(None);
        }
    };
    let address = listener.local_addr().unwrap_or(tcp.address);
    let files = tls::ensure(&config.tls_dir, &tls::names::of_this_machine())?;
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(
            files.server_cert_pem,
            files.server_key_pem,
        ))
        .client_ca_root(Certificate::from_pem(files.ca_cert_pem))
        .timeout(TLS_HANDSHAKE_TIMEOUT);
    Ok(Some(TcpDoor {
        listener,
        address,
        tls,
    }))
}

async fn serve_unix(
    listener: UnixListener,
    group: String,
    services: grpc::Services,
    count: CountLayer,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    tuned(Server::builder())
        .layer(count)
        .layer(InterceptorLayer::new(move |request| {
            auth::by_peer(request, &group)
        }))
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
    count: CountLayer,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let incoming = Bounded::new(door.listener, TCP_CONNECTIONS_MAX).stream();
    tuned(Server::builder())
        .tls_config(door.tls)
        .map_err(Error::Tls)?
        .layer(count)
        .layer(InterceptorLayer::new(auth::by_certificate))
        .layer(MapRequestLayer::new(broken_off::told))
        .layer(catch_panic::CatchPanicLayer)
        .add_routes(services)
        .serve_with_incoming_shutdown(incoming, stop)
        .await
        .map_err(Error::Serve)
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
