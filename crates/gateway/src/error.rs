//! Errors of starting and serving the gateway.

use k8e_model::Code;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why the gateway could not be started or served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The Unix socket could not be created.
    #[error("cannot {operation} the socket {}", path.display())]
    Socket {
        /// The operation that failed.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A listening socket could not be registered with the event loop.
    #[error("cannot register a listening socket with the event loop")]
    Reactor(#[source] io::Error),
    /// The address of the TLS listener cannot be bound.
    #[error("cannot listen on {address}: choose another address with --listen, or --listen none")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The address of the admin HTTP server cannot be bound.
    #[error("cannot listen on {address} for metrics: choose another address with --metrics-listen")]
    MetricsListen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The address for exposed services cannot be bound.
    #[error(
        "cannot listen on {address} for exposed services: choose another address with --expose-listen, or --expose-listen none"
    )]
    ExposeListen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The address of the E2B API cannot be bound.
    #[error(
        "cannot listen on {address} for the E2B API: choose another address with --e2b-listen, or --e2b-listen none"
    )]
    E2bListen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The metrics recorder could not be installed.
    #[error("cannot install the metrics recorder")]
    Metrics(#[source] metrics_exporter_prometheus::BuildError),
    /// A certificate file could not be read or written.
    #[error("cannot {operation} {}", path.display())]
    CertificateFile {
        /// The operation that failed.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A certificate could not be issued or read.
    #[error("cannot {operation} in {}: {cause}; move the directory away to start with a new authority", dir.display())]
    Certificate {
        /// The operation that failed.
        operation: &'static str,
        /// The directory of the certificates.
        dir: PathBuf,
        /// The cause.
        cause: String,
    },
    /// A name that no certificate can have.
    #[error("{0:?} cannot be in a certificate: use a host name or an address")]
    Name(String),
    /// The descriptors for gRPC reflection are broken.
    #[error("cannot serve gRPC reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// Serving failed.
    #[error("cannot serve")]
    Serve(#[source] tonic::transport::Error),
}

// === impl Error ===

impl Error {
    /// The error code for the process that starts the server.
    pub fn code(&self) -> Code {
        match self {
            Self::Listen { .. }
            | Self::MetricsListen { .. }
            | Self::ExposeListen { .. }
            | Self::E2bListen { .. } => Code::Precondition,
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
