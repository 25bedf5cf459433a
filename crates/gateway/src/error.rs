//! Why the doors could not be opened or served.

use k8e_model::Code;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why the doors could not be opened or served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The socket could not be made.
    #[error("cannot {operation} the socket {}", path.display())]
    Socket {
        /// What was done.
        operation: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A listening socket could not be watched.
    #[error("cannot watch a listening socket")]
    Reactor(#[source] io::Error),
    /// The address that was asked for is not to be had.
    #[error("cannot listen on {address}: choose another address with --listen, or --listen none")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The address for metrics is not to be had.
    #[error("cannot listen on {address} for metrics: choose another address with --metrics-listen")]
    MetricsListen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The address for exposed services is not to be had.
    #[error(
        "cannot listen on {address} for exposed services: choose another address with --expose-listen, or --expose-listen none"
    )]
    ExposeListen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Measuring cannot begin.
    #[error("cannot start to measure")]
    Metrics(#[source] metrics_exporter_prometheus::BuildError),
    /// A certificate file could not be read or written.
    #[error("cannot {operation} {}", path.display())]
    CertificateFile {
        /// What was done.
        operation: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A certificate could not be made or read.
    #[error("cannot {operation} in {}: {cause}; move the directory away to start with a new authority", dir.display())]
    Certificate {
        /// What was done.
        operation: &'static str,
        /// Where.
        dir: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// A name that no certificate can have.
    #[error("{0:?} cannot stand in a certificate: use a host name or an address")]
    Name(String),
    /// Our own description of the service is broken.
    #[error("cannot describe the service")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// Serving failed.
    #[error("cannot serve")]
    Serve(#[source] tonic::transport::Error),
}

// === impl Error ===

impl Error {
    /// What it means to whoever starts the server.
    pub fn code(&self) -> Code {
        match self {
            Self::Listen { .. } | Self::MetricsListen { .. } | Self::ExposeListen { .. } => {
                Code::Precondition
            }
            Self::Name(_) => Code::Invalid,
            Self::Socket { .. }
            | Self::CertificateFile { .. }
            | Self::Certificate { .. }
            | Self::Reactor(_)
            | Self::Reflection(_)
            | Self::Serve(_)
            | Self::Metrics(_) => Code::Internal,
        }
    }
}
