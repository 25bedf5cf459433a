//! The Rust client: the generated stubs over a channel that is set up right.

#[cfg(unix)]
mod unix;

use crate::v1::approvals_client::ApprovalsClient;
use crate::v1::identity_client::IdentityClient;
use crate::v1::sandboxes_client::SandboxesClient;
use crate::v1::secrets_client::SecretsClient;
use crate::v1::snapshots_client::SnapshotsClient;
use crate::v1::templates_client::TemplatesClient;
use crate::{REQUEST_BYTES_MAX, RESPONSE_BYTES_MAX, SESSION_HEADER};
use k8e_model::ApiKey;
use std::error::Error as _;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;
pub use tonic::Streaming;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Identity};

/// A server that has not accepted the connection by then is unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// HTTP/2 keepalive, so that a dead server is noticed during a long run.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Without a network in between, a server that does not reply to a ping hangs.
#[cfg(unix)]
const LOCAL_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
#[cfg(unix)]
const LOCAL_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// HTTP/2 flow-control windows: enough that a large file does not wait for round trips.
const STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// Where a server listens, and how client and server authenticate.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// The Unix socket of a server on this machine; the kernel tells it who we are.
    Unix(PathBuf),
    /// TLS over TCP, both sides by certificate.
    Tls(TlsEndpoint),
}

/// A server reached over TCP.
#[derive(Clone)]
pub struct TlsEndpoint {
    /// `host:port`.
    pub authority: String,
    /// The certificate that signed the server's.
    pub ca_pem: Vec<u8>,
    /// Our own certificate and key, if we have them.
    pub identity: Option<ClientIdentity>,
    /// API key, sent with every call: for clients without a certificate, and to log in.
    pub api_key: Option<ApiKey>,
}

/// A client certificate and its key.
#[derive(Clone)]
pub struct ClientIdentity {
    /// The certificate.
    pub cert_pem: Vec<u8>,
    /// Its key.
    pub key_pem: Vec<u8>,
}

/// The server's calls, as the generated stubs name them. It is the stub of `Sandboxes`, and has
/// those of the other services.
#[derive(Clone, Debug)]
pub struct Client {
    sandboxes: SandboxesClient<Calls>,
    /// API keys, certificates and the audit log.
    pub identity: IdentityClient<Calls>,
    /// Secrets.
    pub secrets: SecretsClient<Calls>,
    /// Approvals: requests to people.
    pub approvals: ApprovalsClient<Calls>,
    /// The registry of snapshots.
    pub snapshots: SnapshotsClient<Calls>,
    /// Images for sessions.
    pub templates: TemplatesClient<Calls>,
}

/// What the stubs call through.
pub type Calls = InterceptedService<Channel, Bearer>;

/// Puts an API key into every call, if there is one.
#[derive(Clone)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The endpoint makes no sense.
    #[error("endpoint {endpoint} cannot be used")]
    Endpoint {
        /// As it was given.
        endpoint: String,
        /// What is wrong with it.
        #[source]
        source: tonic::transport::Error,
    },
    /// Nobody answers, or it is not a server of ours.
    #[error("no k8e server answers at {endpoint}")]
    Unreachable {
        /// As it was given.
        endpoint: String,
        /// What the transport says.
        #[source]
        source: tonic::transport::Error,
    },
    /// Somebody answers, and cannot show that it is the server that was meant.
    #[error("{}", .fault.message(.endpoint))]
    Untrusted {
        /// As it was given.
        endpoint: String,
        /// What is wrong with its certificate.
        fault: CertificateFault,
        /// What the transport says.
        #[source]
        source: tonic::transport::Error,
    },
    /// This platform has no Unix sockets.
    #[error("{endpoint}: Unix sockets work on Unix only, use host:port")]
    NoUnixSockets {
        /// As it was given.
        endpoint: String,
    },
}

/// What is wrong with a server's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateFault {
    /// Another authority signed it than the one that is trusted.
    OtherAuthority,
    /// It is for other host names than the one that was called.
    OtherName,
    /// It has expired, or is not valid yet.
    OutOfDate,
}

/// A call that says for which session its caller works; an empty one is none.
pub fn working_for<T>(session: &str, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    // What cannot stand in a header is no session's name.
    if !session.is_empty()
        && let Ok(session) = session.parse()
    {
        request.metadata_mut().insert(SESSION_HEADER, session);
    }
    request
}

// === impl Client ===

impl Client {
    /// Connects, and fails when nobody answers.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        let (channel, bearer) = match endpoint {
            Endpoint::Unix(path) => (connect_unix(endpoint, path).await?, Bearer(None)),
            Endpoint::Tls(tls) => {
                let bearer = Bearer::new(tls.api_key.as_ref());
                (connect_tls(endpoint, tls).await?, bearer)
            }
        };
        let calls = InterceptedService::new(channel, bearer);
        let sandboxes = SandboxesClient::new(calls.clone())
            .max_decoding_message_size(RESPONSE_BYTES_MAX)
            .max_encoding_message_size(REQUEST_BYTES_MAX);
        Ok(Self {
            sandboxes,
            identity: IdentityClient::new(calls.clone())
                .max_decoding_message_size(RESPONSE_BYTES_MAX),
            secrets: SecretsClient::new(calls.clone()),
            approvals: ApprovalsClient::new(calls.clone())
                .max_decoding_message_size(RESPONSE_BYTES_MAX),
            snapshots: SnapshotsClient::new(calls.clone()),
            templates: TemplatesClient::new(calls)
                .max_decoding_message_size(RESPONSE_BYTES_MAX)
                .max_encoding_message_size(REQUEST_BYTES_MAX),
        })
    }
}

impl Deref for Client {
    type Target = SandboxesClient<Calls>;
    fn deref(&self) -> &Self::Target {
        &self.sandboxes
    }
}

impl DerefMut for Client {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.sandboxes
    }
}

// === impl Bearer ===

impl Bearer {
    fn new(key: Option<&ApiKey>) -> Self {
        let value = key.and_then(|key| format!("Bearer {}", key.reveal()).parse().ok());
        Self(value.map(|mut value: MetadataValue<Ascii>| {
            // So that no log prints it, and no table of headers keeps it.
            value.set_sensitive(true);
            value
        }))
    }
}

impl Interceptor for Bearer {
    fn call(
        &mut self,
        mut request: tonic::Request<()>,
    ) -> Result<tonic::Request<()>, tonic::Status> {
        if let Some(key) = &self.0 {
            request.metadata_mut().insert("authorization", key.clone());
        }
        Ok(request)
    }
}

/// Without the key.
impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() {
            "Bearer(…)"
        } else {
            "Bearer(none)"
        })
    }
}

// === impl Endpoint ===

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tls(tls) => write!(f, "https://{}", tls.authority),
        }
    }
}

// === impl TlsEndpoint ===

/// Without the key.
impl std::fmt::Debug for TlsEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsEndpoint")
            .field("authority", &self.authority)
            .finish_non_exhaustive()
    }
}

// === impl CertificateFault ===

impl CertificateFault {
    /// The fault that a connection failed of, if it was one.
    fn of(error: &tonic::transport::Error) -> Option<Self> {
        let mut next = error.source();
        while let Some(cause) = next {
            // An I/O error shows the cause of what it carries, not what it carries.
            let carried = cause
                .downcast_ref::<io::Error>()
                .and_then(io::Error::get_ref);
            let tls = match carried {
                Some(carried) => carried.downcast_ref::<rustls::Error>(),
                None => cause.downcast_ref::<rustls::Error>(),
            };
            if let Some(rustls::Error::InvalidCertificate(fault)) = tls {
                return Self::of_certificate(fault);
            }
            next = cause.source();
        }
        None
    }

    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "the rest is for experts, and so is what rustls says of it"
    )]
    fn of_certificate(fault: &rustls::CertificateError) -> Option<Self> {
        use rustls::CertificateError as E;
        match fault {
            E::UnknownIssuer | E::BadSignature => Some(Self::OtherAuthority),
            E::NotValidForName | E::NotValidForNameContext { .. } => Some(Self::OtherName),
            E::Expired | E::ExpiredContext { .. } => Some(Self::OutOfDate),
            E::NotValidYet | E::NotValidYetContext { .. } => Some(Self::OutOfDate),
            _ => None,
        }
    }

    fn message(self, endpoint: &str) -> String {
        let fault = match self {
            Self::OtherAuthority => {
                "was not signed by the authority in ca.crt: it is another server, or it was set up anew; copy \
                 <data-dir>/tls/sandbox-ca.crt from that server to ca.crt in your certificate directory (--cert-dir, \
                 else ~/.k8e/sandbox), in a way that you trust"
            }
            Self::OtherName => {
                "is for other host names: use one that it has, or restart the server with --advertise-hostname NAME"
            }
            Self::OutOfDate => {
                "is not valid at this time: check the clocks of both machines (a running server renews its certificate)"
            }
        };
        format!("the certificate of the server at {endpoint} {fault}")
    }
}

// === impl ConnectError ===

impl ConnectError {
    /// What the system said, when it was the system that refused.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        let mut next = self.source();
        while let Some(error) = next {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return Some(io.kind());
            }
            next = error.source();
        }
        None
    }

    /// The deepest cause, in words.
    pub fn cause(&self) -> String {
        let mut last: &dyn std::error::Error = self;
        while let Some(next) = last.source() {
            last = next;
        }
        last.to_string()
    }
}

#[cfg(unix)]
async fn connect_unix(
    endpoint: &Endpoint,
    path: &std::path::Path,
) -> Result<Channel, ConnectError> {
    // The authority is only a name here: the socket is the address.
    let channel = tuned(tonic::transport::Endpoint::from_static("http://localhost"))
        .http2_keep_alive_interval(LOCAL_KEEPALIVE_INTERVAL)
        .keep_alive_timeout(LOCAL_KEEPALIVE_TIMEOUT);
    let connector = unix::connector(path.to_owned());
    channel
        .connect_with_connector(connector)
        .await
        .map_err(unreachable(endpoint))
}

#[cfg(not(unix))]
async fn connect_unix(
    endpoint: &Endpoint,
    _path: &std::path::Path,
) -> Result<Channel, ConnectError> {
    Err(ConnectError::NoUnixSockets {
        endpoint: endpoint.to_string(),
    })
}

async fn connect_tls(endpoint: &Endpoint, tls: &TlsEndpoint) -> Result<Channel, ConnectError> {
    let unusable = |source| ConnectError::Endpoint {
        endpoint: endpoint.to_string(),
        source,
    };
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&tls.ca_pem));
    if let Some(identity) = &tls.identity {
        config = config.identity(Identity::from_pem(&identity.cert_pem, &identity.key_pem));
    }
    let channel = tonic::transport::Endpoint::from_shared(endpoint.to_string())
        .and_then(|channel| channel.tls_config(config.timeout(CONNECT_TIMEOUT)))
        .map_err(unusable)?;
    tuned(channel)
        .connect()
        .await
        .map_err(unreachable(endpoint))
}

fn tuned(channel: tonic::transport::Endpoint) -> tonic::transport::Endpoint {
    channel
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .tcp_nodelay(true)
}

fn unreachable(endpoint: &Endpoint) -> impl FnOnce(tonic::transport::Error) -> ConnectError {
    let endpoint = endpoint.to_string();
    move |source| match CertificateFault::of(&source) {
        Some(fault) => ConnectError::Untrusted {
            endpoint,
            fault,
            source,
        },
        None => ConnectError::Unreachable { endpoint, source },
    }
}
