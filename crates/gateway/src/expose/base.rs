//! How visitors get to the door: directly, or through a proxy of the operator's.

use hyper::Uri;
use k8e_model::Error;
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// Of a URL that somebody typed.
const BYTES_MAX: usize = 1024;

/// What exposed services' URLs begin with, as in `https://preview.example.com`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl {
    https: bool,
    authority: String,
    /// Empty, or begins with a slash and does not end with one.
    path: String,
}

// === impl BaseUrl ===

impl BaseUrl {
    /// Of a door that nobody said anything about. Everybody's address is no name for a URL.
    pub(super) fn of(address: SocketAddr, name: Option<&str>) -> Self {
        let authority = match name {
            Some(name) => format!("{name}:{}", address.port()),
            None if address.ip().is_unspecified() => format!("localhost:{}", address.port()),
            None => address.to_string(),
        };
        Self {
            https: false,
            authority,
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
}

impl FromStr for BaseUrl {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::invalid(format!(
                "{text:?} is not a base URL: write https://preview.example.com, with a path if there is one and nothing behind it"
            ))
        };
        let uri: Uri = text.parse().map_err(|_| wrong())?;
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
        {
            return Err(wrong());
        }
        Ok(Self {
            https,
            authority: authority.to_string(),
            path: path.to_owned(),
        })
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme(), self.authority, self.path)
    }
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
        ] {
            assert!(text.parse::<BaseUrl>().is_err(), "{text}");
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
