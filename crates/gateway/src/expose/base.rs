//! Base URL of exposed services: the listener itself, or a proxy in front of it; one host name for all services, or one
//! for each (wildcard).

use hyper::Uri;
use k8e_engine::ExposeBase;
use k8e_model::{Error, ServiceLabel};
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// Bytes of a base URL.
const BYTES_MAX: usize = 1024;

/// Bytes of a name in DNS, less a label for the service.
const DOMAIN_BYTES_MAX: usize = 253 - LABEL_BYTES_MAX - 1;
const LABEL_BYTES_MAX: usize = 63;

/// What exposed services' URLs begin with: `https://preview.example.com` for all, or `https://*.sandboxes.example`, with the
/// star for each one's own label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl {
    https: bool,
    /// Host and port; of a wildcard what comes after the star's dot.
    authority: String,
    /// Whether each service has a host name of its own below it.
    wildcard: bool,
    /// Empty, or begins with a slash and does not end with one.
    path: String,
}

// === impl BaseUrl ===

impl BaseUrl {
    /// The default: the listener's address. An unspecified one (`0.0.0.0`) cannot be in a URL.
    pub(super) fn of(address: SocketAddr, name: Option<&str>) -> Self {
        let authority = match name {
            Some(name) => format!("{name}:{}", address.port()),
            None if address.ip().is_unspecified() => format!("localhost:{}", address.port()),
            None => address.to_string(),
        };
        Self {
            https: false,
            authority,
            wildcard: false,
            path: String::new(),
        }
    }

    pub(super) fn is_https(&self) -> bool {
        self.https
    }

    pub(super) fn scheme(&self) -> &'static str {
        if self.https { "https" } else { "http" }
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Whether each service has a host name, and so an origin, of its own.
    pub(super) fn is_wildcard(&self) -> bool {
        self.wildcard
    }

    /// The service that a `host` header names, where each has a host name of its own. The port is ignored: a proxy in front may have another.
    pub(super) fn service(&self, host: &str) -> Option<ServiceLabel> {
        let host = without_port(host).to_ascii_lowercase();
        let label = host.strip_suffix(without_port(&self.authority))?;
        label.strip_suffix('.')?.parse().ok()
    }

    pub(super) fn for_engine(&self) -> ExposeBase {
        if self.wildcard {
            ExposeBase::Host {
                scheme: self.scheme(),
                domain: self.authority.clone(),
            }
        } else {
            ExposeBase::Path(self.to_string())
        }
    }
}

impl FromStr for BaseUrl {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::invalid(format!(
                "{text:?} is not a base URL: write https://preview.example.com, with a path if there is one and nothing behind it, or https://*.sandboxes.example for a host name for each service"
            ))
        };
        let wildcard = text.contains("://*.");
        let uri: Uri = text
            .replacen("://*.", "://", 1)
            .parse()
            .map_err(|_| wrong())?;
        let https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong()),
        };
        let authority = uri.authority().ok_or_else(wrong)?;
        let path = uri.path().trim_end_matches('/');
        // It becomes the path of a cookie and a header.
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
        if text.len() > BYTES_MAX
            || uri.query().is_some()
            || text.contains('#')
            || authority.as_str().contains('@')
            || !path.bytes().all(plain)
            || text.replacen("://*.", "", 1).contains('*')
            || (wildcard && !(path.is_empty() && is_domain(authority.host())))
        {
            return Err(wrong());
        }
        Ok(Self {
            https,
            authority: authority.as_str().to_ascii_lowercase(),
            wildcard,
            path: path.to_owned(),
        })
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let star = if self.wildcard { "*." } else { "" };
        let (scheme, authority, path) = (self.scheme(), &self.authority, &self.path);
        write!(f, "{scheme}://{star}{authority}{path}")
    }
}

fn without_port(authority: &str) -> &str {
    let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit());
    if is_port { host } else { authority }
}

/// Whether it is a domain name. An IP address has no names below it.
fn is_domain(host: &str) -> bool {
    let is_label = |label: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        (1..=LABEL_BYTES_MAX).contains(&label.len())
            && label.bytes().all(plain)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = host.rsplit('.').next().unwrap_or_default();
    host.len() <= DOMAIN_BYTES_MAX
        && host.split('.').all(is_label)
        && !last.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_that_can_be_begun_with() {
        for (text, shown) in [
            ("https://p.example.com", "https://p.example.com"),
            ("http://p.example.com:8080/", "http://p.example.com:8080"),
            ("https://example.com/a/b/", "https://example.com/a/b"),
            ("https://*.Sandboxes.example", "https://*.sandboxes.example"),
            ("http://*.localhost:80/", "http://*.localhost:80"),
        ] {
            assert_eq!(text.parse::<BaseUrl>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "example.com",
            "/a",
            "ftp://example.com",
            "https://me@example.com",
            "https://example.com/?a",
            "https://example.com/#a",
            "https://example.com/a;b",
            "https://*",
            "https://*.",
            "https://*example.com",
            "https://a.*.example.com",
            "https://*.*.example.com",
            "https://*.example.com/a",
            "https://*.example..com",
            "https://*.-a.example",
            "https://*.127.0.0.1",
            "https://*.[::1]",
            "https://me@*.example.com",
            "https://*.me@example.com",
            &format!("https://*.{}example", "a.".repeat(100)),
        ] {
            assert!(text.parse::<BaseUrl>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_host_names_a_service() {
        let base: BaseUrl = "https://*.sandboxes.example:8443".parse().unwrap();
        let service = |host: &str| base.service(host).map(|label| label.to_string());
        for host in ["80-s1.sandboxes.example", "80-S1.Sandboxes.Example:1"] {
            assert_eq!(service(host).as_deref(), Some("80-s1"), "{host}");
        }
        for host in [
            "",
            "sandboxes.example",
            ".sandboxes.example",
            "80-s1.example",
            "80-s1sandboxes.example",
            "x.80-s1.sandboxes.example",
            "080-s1.sandboxes.example",
            "80-s1.sandboxes.example.",
            "80-s1.sandboxes.example.evil",
            "80-s1.sandboxes.example:8443:1",
            "80-s1.sandboxes.example:a",
        ] {
            assert_eq!(service(host), None, "{host}");
        }
    }

    #[test]
    fn without_one_it_is_the_address() {
        let shown = |address: &str, name| BaseUrl::of(address.parse().unwrap(), name).to_string();
        assert_eq!(shown("127.0.0.1:5", None), "http://127.0.0.1:5");
        assert_eq!(shown("[::]:5", None), "http://localhost:5");
        assert_eq!(shown("0.0.0.0:5", Some("box")), "http://box:5");
    }
}
