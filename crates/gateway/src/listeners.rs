//! The listening sockets of every server of the gateway, bound by a process that may still do so:
//! ports below 1024 and the directory of the Unix socket can need root, serving needs none.

use crate::{Config, Error, socket};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Bound and listening: clients can connect, and wait to be served.
#[derive(Debug)]
pub struct Listeners {
    pub(crate) unix: UnixListener,
    pub(crate) tcp: Option<TcpListener>,
    pub(crate) admin: Option<TcpListener>,
    pub(crate) expose: Option<TcpListener>,
}

// === impl Listeners ===

impl Listeners {
    /// Binds all that `config` names. An address that nobody asked for may be taken.
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
        let unix = socket::bind(&config.socket, &config.socket_group)?;
        Ok(Self {
            unix,
            tcp,
            admin,
            expose,
        })
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // The standard library's queue is shorter.
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
