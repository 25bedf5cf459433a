//! Connects to the server: endpoint, certificates, API key, auto-start.
//!
//! A configured endpoint is used and nothing else is tried. Without one it is the Unix socket of this machine's server,
//! which is auto-started where that is possible and allowed.

#[cfg(target_os = "linux")]
mod autostart;
#[cfg(target_os = "linux")]
pub use autostart::start_server;

use crate::Globals;
use crate::failure::Failure;
use k8e_api::client::{Client, ClientIdentity, ConnectError, Endpoint, TlsEndpoint};
use k8e_model::ApiKey;
use std::io;
use std::path::{Path, PathBuf};

/// Default TCP port of the API, as in the Go K8E.
const PORT_DEFAULT: u16 = 50051;

/// Connects to the server that flags or environment name, or else to that of this machine.
pub(crate) async fn connect(globals: &Globals) -> Result<Client, Failure> {
    match address(globals)? {
        Some(address) => Ok(Client::connect(&endpoint(address, globals)?).await?),
        None => local(globals).await,
    }
}

/// A parsed endpoint.
#[derive(Debug, PartialEq, Eq)]
enum Address {
    Unix(PathBuf),
    /// `host:port`.
    Tcp(String),
}

fn address(globals: &Globals) -> Result<Option<Address>, Failure> {
    // An empty environment variable counts as unset.
    match globals.endpoint.as_deref() {
        None | Some("") => Ok(None),
        Some(text) => parse_address(text).map(Some).ok_or_else(|| {
            Failure::request(
                format!("endpoint {text:?} is not valid: use unix:///path, host:port or https://host:port"),
                "invalid",
            )
        }),
    }
}

fn parse_address(text: &str) -> Option<Address> {
    if let Some(path) = text
        .strip_prefix("unix://")
        .or_else(|| text.strip_prefix("unix:"))
    {
        return path.starts_with('/').then(|| Address::Unix(path.into()));
    }
    let authority = text
        .strip_prefix("https://")
        .unwrap_or(text)
        .trim_end_matches('/');
    if authority.is_empty() || authority.contains(['/', ' ', '@', '?', '#']) {
        return None;
    }
    let bare_ipv6 = authority.parse::<std::net::Ipv6Addr>().is_ok();
    let authority = if bare_ipv6 {
        format!("[{authority}]")
    } else {
        authority.to_owned()
    };
    let host_end = authority.rfind(']').map_or(0, |end| end + 1);
    match authority[host_end..].split_once(':') {
        Some((_, port)) => port
            .parse::<u16>()
            .is_ok()
            .then_some(Address::Tcp(authority)),
        None => Some(Address::Tcp(format!("{authority}:{PORT_DEFAULT}"))),
    }
}

fn endpoint(address: Address, globals: &Globals) -> Result<Endpoint, Failure> {
    let authority = match address {
        Address::Unix(path) => return Ok(Endpoint::Unix(path)),
        Address::Tcp(authority) => authority,
    };
    let dir = cert_dir(globals);
    let read = |name: &str| {
        let path = dir.join(name);
        std::fs::read(&path).map_err(|e| {
            Failure::unreachable(
                format!(
                    "cannot read {}: a server on TCP needs ca.crt there (from <data-dir>/tls on the server), and \
                     an API key (--apikey) or a certificate (`k8e login`); --cert-dir names another directory",
                    path.display()
                ),
                e.to_string(),
            )
        })
    };
    let ca_pem = match ca_cert(globals) {
        Some(path) => std::fs::read(path).map_err(|e| {
            let what = "the server's authority (--ca-cert, K8E_SANDBOX_CERT)";
            Failure::unreachable(
                format!("cannot read {}: {what}", path.display()),
                e.to_string(),
            )
        })?,
        None => read("ca.crt")?,
    };
    let api_key = api_key(globals);
    // An API key is enough without a certificate, and on loopback a server with --trust-loopback needs neither. The error
    // of one without it says what to do.
    let optional = api_key.is_some() || is_loopback(&authority);
    let identity = if optional && !dir.join("client.crt").exists() {
        None
    } else {
        Some(ClientIdentity {
            cert_pem: read("client.crt")?,
            key_pem: read("client.key")?,
        })
    };
    Ok(Endpoint::Tls(TlsEndpoint {
        authority,
        ca_pem,
        identity,
        api_key,
    }))
}

/// Endpoint of `k8e login`: no client certificate is needed, and the CA may be that of a server on this machine.
pub(crate) fn login_endpoint(globals: &Globals) -> Result<Endpoint, Failure> {
    let authority = match address(globals)? {
        Some(Address::Tcp(authority)) => authority,
        Some(Address::Unix(path)) => return Ok(Endpoint::Unix(path)),
        None => {
            return Err(Failure::request(
                "name the server to log in to with --endpoint or K8E_SANDBOX_ENDPOINT",
                "invalid",
            ));
        }
    };
    let dir = own_cert_dir(globals);
    let own = dir.join("ca.crt");
    let ca = if let Some(named) = ca_cert(globals) {
        named.to_owned()
    } else if own.exists() {
        own.clone()
    } else {
        globals.data_dir.join("tls/sandbox-ca.crt")
    };
    let ca_pem = std::fs::read(ca).map_err(|e| {
        Failure::request(
            format!(
                "cannot read {}, which the server is verified with: copy <data-dir>/tls/sandbox-ca.crt from the server to it",
                own.display()
            ),
            e.to_string(),
        )
    })?;
    // An existing certificate can be renewed without the API key.
    let read = |name: &str| std::fs::read(dir.join(name)).ok();
    let pair = read("client.crt").zip(read("client.key"));
    let api_key = api_key(globals);
    Ok(Endpoint::Tls(TlsEndpoint {
        authority,
        ca_pem,
        identity: pair
            .filter(|_| api_key.is_none())
            .map(|(cert_pem, key_pem)| ClientIdentity { cert_pem, key_pem }),
        api_key,
    }))
}

/// Path of --ca-cert; an empty environment variable counts as unset.
fn ca_cert(globals: &Globals) -> Option<&Path> {
    let named = globals.ca_cert.as_deref();
    named.filter(|path| !path.as_os_str().is_empty())
}

fn api_key(globals: &Globals) -> Option<ApiKey> {
    globals.apikey.as_ref().and_then(|key| key.0.clone())
}

fn is_loopback(authority: &str) -> bool {
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    let ip = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
}

/// --cert-dir, or ~/.k8e/sandbox.
pub(crate) fn own_cert_dir(globals: &Globals) -> PathBuf {
    globals.cert_dir.clone().unwrap_or_else(|| {
        std::env::home_dir()
            .unwrap_or_default()
            .join(".k8e/sandbox")
    })
}

/// --cert-dir; else ~/.k8e/sandbox; else, for root on the server itself, the server's own certificates.
fn cert_dir(globals: &Globals) -> PathBuf {
    let own = own_cert_dir(globals);
    if globals.cert_dir.is_some() {
        return own;
    }
    let servers = globals.data_dir.join("tls/admin");
    let has_certs = |dir: &Path| dir.join("ca.crt").exists();
    if !has_certs(&own) && has_certs(&servers) {
        servers
    } else {
        own
    }
}

/// Whether the server takes the caller for an operator, which sees the sessions of all owners: on the Unix socket, and over
/// TLS without credentials of its own (--trust-loopback).
pub(crate) fn is_operator(globals: &Globals) -> Result<bool, Failure> {
    Ok(match address(globals)? {
        None | Some(Address::Unix(_)) => true,
        Some(Address::Tcp(_)) => {
            api_key(globals).is_none() && !cert_dir(globals).join("client.crt").exists()
        }
    })
}

/// The endpoint as it is shown, and whether it is this machine's own server.
pub(crate) fn describe(globals: &Globals) -> Result<(String, bool), Failure> {
    Ok(match address(globals)? {
        Some(Address::Unix(path)) => (format!("unix://{}", path.display()), false),
        Some(Address::Tcp(authority)) => (format!("https://{authority}"), false),
        None => {
            let socket = socket(globals);
            (format!("unix://{} (this machine)", socket.display()), true)
        }
    })
}

/// Whether a command would start a server: none runs, and this client may start one.
#[cfg(target_os = "linux")]
pub(crate) fn would_start(globals: &Globals) -> bool {
    use std::os::unix::net::UnixStream;
    let kind = UnixStream::connect(socket(globals)).map_err(|error| error.kind());
    let runs_none = matches!(
        kind,
        Err(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    );
    runs_none && !globals.no_autostart && rustix::process::geteuid().is_root()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn would_start(_globals: &Globals) -> bool {
    false
}

/// Whether a server runs on this machine and its socket is not for this user.
#[cfg(unix)]
pub(crate) fn is_denied(globals: &Globals) -> bool {
    use std::os::unix::net::UnixStream;
    let connected = UnixStream::connect(socket(globals));
    connected.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

#[cfg(not(unix))]
pub(crate) fn is_denied(_globals: &Globals) -> bool {
    false
}

/// Socket of this machine's server.
fn socket(globals: &Globals) -> PathBuf {
    globals.data_dir.join("k8e.sock")
}

async fn local(globals: &Globals) -> Result<Client, Failure> {
    let socket = socket(globals);
    let endpoint = Endpoint::Unix(socket.clone());
    let error = match Client::connect(&endpoint).await {
        Ok(client) => return Ok(client),
        Err(error) => error,
    };
    match error.io_kind() {
        Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            start(globals, &endpoint, error).await
        }
        Some(io::ErrorKind::PermissionDenied) => Err(Failure::unreachable(
            format!(
                "{} is for root and the group k8e: use sudo, add yourself to the group (`usermod -aG k8e $USER`), \
                 or name a server with --endpoint",
                socket.display()
            ),
            error.cause(),
        )),
        _ => Err(error.into()),
    }
}

#[cfg(target_os = "linux")]
async fn start(
    globals: &Globals,
    endpoint: &Endpoint,
    error: ConnectError,
) -> Result<Client, Failure> {
    if globals.no_autostart {
        return Err(Failure::unreachable(
            format!("{error}: start one with `k8e server`, or leave out --no-autostart"),
            error.cause(),
        ));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::unreachable(
            format!(
                "{error}, and only root can start one: run `sudo k8e server`, or name a server with --endpoint"
            ),
            error.cause(),
        ));
    }
    autostart::start(globals, endpoint).await
}

#[cfg(not(target_os = "linux"))]
async fn start(
    _globals: &Globals,
    _endpoint: &Endpoint,
    error: ConnectError,
) -> Result<Client, Failure> {
    Err(Failure::unreachable(
        "sandboxes run on Linux: name a server with --endpoint or K8E_SANDBOX_ENDPOINT",
        error.cause(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopbacks() {
        for local in ["localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1"] {
            assert!(is_loopback(local), "{local}");
        }
        for other in ["localhost.example:1", "10.0.0.1:1", "[2001:db8::1]:1"] {
            assert!(!is_loopback(other), "{other}");
        }
    }

    #[test]
    fn addresses() {
        let check = |text: &str, want: &str| {
            assert_eq!(
                parse_address(text),
                Some(Address::Tcp(want.into())),
                "{text}"
            );
        };
        check("10.0.0.1:50051", "10.0.0.1:50051");
        check("https://k8e.example.com:443/", "k8e.example.com:443");
        check("localhost", "localhost:50051");
        check("[::1]:7", "[::1]:7");
        check("[::1]", "[::1]:50051");
        check("::1", "[::1]:50051");
        assert_eq!(
            parse_address("unix:///run/k8e.sock"),
            Some(Address::Unix("/run/k8e.sock".into()))
        );
        assert_eq!(
            parse_address("unix:/run/k8e.sock"),
            Some(Address::Unix("/run/k8e.sock".into()))
        );
        for bad in [
            "unix://",
            "unix:relative",
            "http://x:1",
            "https://",
            "a b:1",
            "host:port",
            "u@h:1",
        ] {
            assert_eq!(parse_address(bad), None, "{bad}");
        }
    }
}
