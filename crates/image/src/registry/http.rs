//! HTTP as far as registries need it: one GET for each connection, to an address that was checked.

use super::policy::{RegistryPolicy, own_name};
use crate::error::ImageError;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT, AUTHORIZATION, HOST, HeaderValue, LOCATION, USER_AGENT, WWW_AUTHENTICATE,
};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use k8e_model::Code;
use rustls::pki_types::ServerName;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 4;

/// A registry that does not take a connection by then is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// For the front of an answer, and for each next part: what says nothing for so long stalls.
const STALL_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });

/// Of a URL that a registry sends us to: signed ones are long.
const URL_BYTES_MAX: usize = 8 * 1024;

/// Of the head of an answer.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// Finds the addresses of a host.
pub trait Resolve: Send + Sync {
    /// At least one, or an error.
    fn resolve<'a>(
        &'a self,
        host: &'a str,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;
}

/// An absolute URL of `http` or `https`, without a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    tls: bool,
    host: String,
    port: u16,
    /// With its query.
    path: String,
}

/// Makes connections that the policy allows.
pub(super) struct Http {
    policy: RegistryPolicy,
    resolve: Arc<dyn Resolve>,
}

/// An answer whose body is read as it comes.
pub(super) struct Answer(Response<Incoming>);

trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

// === impl Url ===

impl Url {
    pub(super) fn parse(text: &str) -> Result<Self, ImageError> {
        let bad = || {
            let shown: String = text.chars().take(80).collect();
            ImageError::invalid(format!(
                "the registry names a URL that cannot be used: {shown:?}"
            ))
        };
        if text.len() > URL_BYTES_MAX {
            return Err(bad());
        }
        let uri: Uri = text.parse().map_err(|_| bad())?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(bad()),
        };
        let authority = uri.authority().ok_or_else(bad)?;
        let host = authority.host();
        // IPv6 in brackets is refused by the policy anyway.
        if host.is_empty() || authority.as_str().contains('@') {
            return Err(bad());
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self {
            tls,
            host: host.trim_matches(['[', ']']).to_ascii_lowercase(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            path: path.to_owned(),
        })
    }

    /// Another one on the same host, or wherever an absolute one leads.
    pub(super) fn join(&self, target: &str) -> Result<Self, ImageError> {
        if !target.starts_with('/') || target.starts_with("//") {
            return Self::parse(target);
        }
        let scheme = if self.tls { "https" } else { "http" };
        Self::parse(&format!("{scheme}://{}{target}", self.authority()))
    }

    /// With more in its query.
    pub(super) fn with_query(mut self, pairs: &[(&str, Option<&str>)]) -> Result<Self, ImageError> {
        for (key, value) in pairs {
            let Some(value) = value else { continue };
            self.path
                .push(if self.path.contains('?') { '&' } else { '?' });
            self.path.push_str(key);
            self.path.push('=');
            for byte in value.bytes() {
                match byte {
                    b'A'..=b'Z'
                    | b'a'..=b'z'
                    | b'0'..=b'9'
                    | b'-'
                    | b'_'
                    | b'.'
                    | b'~'
                    | b'/'
                    | b':' => {
                        self.path.push(char::from(byte));
                    }
                    byte => self.path.push_str(&format!("%{byte:02X}")),
                }
            }
        }
        match self.path.len() > URL_BYTES_MAX {
            true => Err(ImageError::invalid(
                "the registry's token service has too long a URL",
            )),
            false => Ok(self),
        }
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn authority(&self) -> String {
        match self.has_default_port() {
            true => self.host.clone(),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    pub(super) fn has_default_port(&self) -> bool {
        self.port == if self.tls { 443 } else { 80 }
    }

    pub(super) fn is_tls(&self) -> bool {
        self.tls
    }

    pub(super) fn same_host(&self, other: &Self) -> bool {
        (self.tls, &self.host, self.port) == (other.tls, &other.host, other.port)
    }
}

// === impl Http ===

impl Http {
    pub(super) fn new(policy: RegistryPolicy, resolve: Arc<dyn Resolve>) -> Self {
        Self { policy, resolve }
    }

    pub(super) async fn get(
        &self,
        url: &Url,
        accept: &str,
        authorization: Option<&HeaderValue>,
    ) -> Result<Answer, ImageError> {
        self.policy.check_url(url)?;
        let request = Request::get(&url.path)
            .header(HOST, url.authority())
            .header(USER_AGENT, concat!("k8e/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, accept);
        let request = match authorization {
            Some(value) => request.header(AUTHORIZATION, value),
            None => request,
        };
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|error| ImageError::invalid(error.to_string()))?;
        let connection = self.connect(url).await?;
        let asked = async {
            let mut builder = hyper::client::conn::http1::Builder::new();
            builder.max_buf_size(HEAD_BYTES_MAX);
            let (mut sender, driver) = builder.handshake(TokioIo::new(connection)).await?;
            // Ends with the answer's body.
            tokio::spawn(driver);
            sender.send_request(request).await
        };
        match timeout(STALL_TIMEOUT, asked).await {
            Ok(Ok(answer)) => Ok(Answer(answer)),
            Ok(Err(error)) => Err(failed(url, &error.to_string())),
            Err(_) => Err(stalled(url)),
        }
    }

    async fn connect(&self, url: &Url) -> Result<Box<dyn Connection>, ImageError> {
        let addresses = match (url.host.parse::<IpAddr>(), own_name(&url.host)) {
            (Ok(address), _) | (Err(_), Some(address)) => vec![address],
            (Err(_), None) => {
                let found = self.resolve.resolve(&url.host).await;
                found.map_err(|error| failed(url, &format!("its name has no address: {error}")))?
            }
        };
        let mut last = failed(url, "its name has no address");
        for address in addresses.into_iter().take(ADDRESSES_MAX) {
            self.policy.check_address(url, address)?;
            let target = SocketAddr::new(address.to_canonical(), url.port);
            match timeout(CONNECT_TIMEOUT, self.open(url, target)).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(error)) => last = failed(url, &error.to_string()),
                Err(_) => last = failed(url, "no answer"),
            }
        }
        Err(last)
    }

    async fn open(&self, url: &Url, target: SocketAddr) -> io::Result<Box<dyn Connection>> {
        let tcp = TcpStream::connect(target).await?;
        tcp.set_nodelay(true)?;
        if !url.tls {
            return Ok(Box::new(tcp));
        }
        let name = ServerName::try_from(url.host.clone()).map_err(io::Error::other)?;
        let tls = TlsConnector::from(tls_config()?).connect(name, tcp).await?;
        Ok(Box::new(tls))
    }
}

// === impl Answer ===

impl Answer {
    pub(super) fn status(&self) -> StatusCode {
        self.0.status()
    }

    pub(super) fn challenges(&self) -> impl Iterator<Item = &str> {
        let all = self.0.headers().get_all(WWW_AUTHENTICATE).iter();
        all.filter_map(|value| value.to_str().ok())
    }

    /// Where it redirects to, if it does.
    pub(super) fn location(&self, url: &Url) -> Result<Option<Url>, ImageError> {
        if !self.status().is_redirection() {
            return Ok(None);
        }
        let target = self
            .0
            .headers()
            .get(LOCATION)
            .and_then(|value| value.to_str().ok());
        let target = target.ok_or_else(|| failed(url, "it redirects to nowhere"))?;
        url.join(target).map(Some)
    }

    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ImageError> {
        loop {
            let frame = timeout(STALL_TIMEOUT, self.0.frame()).await;
            let frame = frame.map_err(|_| {
                ImageError::Registry(
                    format!("the registry stalled: nothing came for {STALL_TIMEOUT:?}"),
                    Code::Timeout,
                )
            })?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => {
                    return Err(ImageError::Registry(
                        format!("the connection to the registry broke: {error}"),
                        Code::Unavailable,
                    ));
                }
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// The whole body, of at most `max` bytes.
    pub(super) async fn all(
        mut self,
        max: usize,
        what: &'static str,
    ) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        while let Some(more) = self.next().await? {
            if bytes.len() + more.len() > max {
                return Err(ImageError::too_large(what, format!("{max} bytes")));
            }
            bytes.extend_from_slice(&more);
        }
        Ok(bytes)
    }

    /// The front of the body, as far as it comes.
    pub(super) async fn front(mut self, max: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < max
            && let Ok(Some(more)) = self.next().await
        {
            bytes.extend_from_slice(&more[..more.len().min(max - bytes.len())]);
        }
        bytes
    }
}

/// Trusts whom this machine trusts.
fn tls_config() -> io::Result<Arc<rustls::ClientConfig>> {
    static CONFIG: OnceLock<Arc<rustls::ClientConfig>> = OnceLock::new();
    if let Some(config) = CONFIG.get() {
        return Ok(Arc::clone(config));
    }
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(io::Error::other(
            "this machine trusts no certificate authority: install ca-certificates",
        ));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::clone(CONFIG.get_or_init(|| Arc::new(config))))
}

fn failed(url: &Url, why: &str) -> ImageError {
    let why: String = why.chars().filter(|c| !c.is_control()).collect();
    ImageError::Registry(
        format!("cannot reach {}: {why}", url.authority()),
        Code::Unavailable,
    )
}

fn stalled(url: &Url) -> ImageError {
    let why = format!("{} did not answer for {STALL_TIMEOUT:?}", url.authority());
    ImageError::Registry(why, Code::Timeout)
}
