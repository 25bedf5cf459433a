//! The listening sockets of the gateway, bound before the privilege drop: ports below 1024 and the directory of the Unix
//! socket can need root, serving needs none.

use crate::{Config, Error, unix_socket};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;

/// Backlog: connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Bound and listening: clients can connect, and wait to be served.
#[derive(Debug)]
pub struct Listeners {
    pub(crate) unix: UnixListener,
    pub(crate) tcp: Option<TcpListener>,
    pub(crate) admin: Option<TcpListener>,
    pub(crate) expose: Option<TcpListener>,
    pub(crate) e2b: Option<TcpListener>,
}

// === impl Listeners ===

impl Listeners {
    /// Binds all that `config` names. A default address that is in use is skipped with a warning.
    pub fn bind(config: &Config) -> Result<Self, Error> {
        let tcp = match &config.tcp {
            Some(tcp) => match listen(tcp.address) {
                Err(source) if tcp.required => {
                    let address = tcp.address;
                    return Err(Error::Listen { address, source });
                }
                Err(source) => {
                    tracing::warn!(
                        "cannot listen on {}: {source}; going on with the socket only. Choose an address with --listen",
                        tcp.address
                    );
                    None
                }
                Ok(listener) => Some(listener),
            },
            None => None,
        };
        let admin = match &config.admin {
            Some(admin) => {
                let address = admin.address;
                let failed = |source| Error::MetricsListen { address, source };
                Some(listen(address).map_err(failed)?)
            }
            None => None,
        };
        let expose = match &config.expose {
            Some(expose) => match listen(expose.address) {
                Err(source) if expose.required => {
                    let address = expose.address;
                    return Err(Error::ExposeListen { address, source });
                }
                Err(source) => {
                    tracing::warn!(
                        "cannot listen on {}: {source}; services cannot be exposed. Choose an address with --expose-listen",
                        expose.address
                    );
                    None
                }
                Ok(listener) => Some(listener),
            },
            None => None,
        };
        let e2b = match &config.e2b {
            Some(e2b) => match listen(e2b.address) {
                Err(source) if e2b.required => {
                    let address = e2b.address;
                    return Err(Error::E2bListen { address, source });
                }
                Err(source) => {
                    tracing::warn!(
                        "cannot listen on {}: {source}; the E2B API is not served. Choose an address with --e2b-listen",
                        e2b.address
                    );
                    None
                }
                Ok(listener) => Some(listener),
            },
            None => None,
        };
        let unix = unix_socket::bind(&config.socket, &config.socket_group)?;
        Ok(Self {
            unix,
            tcp,
            admin,
            expose,
            e2b,
        })
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // The standard library's backlog is shorter.
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
