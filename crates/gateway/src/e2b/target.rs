//! Which sandbox and port a request is for: by header, or by host name.

use super::error::Failure;
use hyper::Request;
use hyper::header::HOST;
use k8e_model::SessionId;

const ID: &str = "e2b-sandbox-id";
const PORT: &str = "e2b-sandbox-port";

/// The port of `envd`, which this server answers itself.
pub(super) const ENVD: u16 = 49983;

/// The port of the code interpreter, which this server answers as well.
pub(super) const INTERPRETER: u16 = 49999;

/// A port of a sandbox.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) id: SessionId,
    pub(super) port: u16,
}

// === impl Target ===

impl Target {
    /// None for the control API.
    pub(super) fn of<B>(request: &Request<B>, domain: &str) -> Result<Option<Self>, Failure> {
        let headers = request.headers();
        let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or(""));
        match (text(ID), text(PORT)) {
            (Some(id), Some(port)) => Self::parse(id, port).map(Some),
            (Some(_), None) => Err(Failure::invalid(format!("missing header {PORT}"))),
            (None, Some(_)) => Err(Failure::invalid(format!("missing header {ID}"))),
            (None, None) => {
                let host = headers.get(HOST).and_then(|host| host.to_str().ok());
                let label = host.and_then(|host| host.strip_suffix(domain)?.strip_suffix('.'));
                let Some((port, id)) = label.and_then(|label| label.split_once('-')) else {
                    return Ok(None);
                };
                Self::parse(id, port).map(Some)
            }
        }
    }

    fn parse(id: &str, port: &str) -> Result<Self, Failure> {
        let wrong = || Failure::invalid("invalid sandbox id or port");
        let port = port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(wrong)?;
        let id = sandbox_id(id).ok_or_else(wrong)?;
        Ok(Self { id, port })
    }
}

/// A sandbox's id as clients write it: lower-case letters and digits. Old ones add `-` and another id.
pub(super) fn sandbox_id(text: &str) -> Option<SessionId> {
    let text = text.split('-').next()?;
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let id = text.bytes().all(plain).then(|| text.parse().ok())?;
    id.filter(|_| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(headers: &[(&str, &str)]) -> Result<Option<(String, u16)>, String> {
        let mut request = Request::builder();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let target = Target::of(&request.body(()).unwrap(), "localhost:3676");
        let target = target.map_err(|failure| failure.message)?;
        Ok(target.map(|target| (target.id.to_string(), target.port)))
    }

    #[test]
    fn targets_are_named_by_header_or_host() {
        let both = [(ID, "iabc1"), (PORT, "49983"), ("host", "x")];
        assert_eq!(target(&both), Ok(Some(("iabc1".to_owned(), 49983))));
        let host = [("host", "8000-iabc1.localhost:3676")];
        assert_eq!(target(&host), Ok(Some(("iabc1".to_owned(), 8000))));
        for other in [
            "localhost:3676",
            "127.0.0.1:3676",
            "8000-iabc1.example.com",
            "",
        ] {
            assert_eq!(target(&[("host", other)]), Ok(None), "{other}");
        }
        assert!(target(&[(ID, "iabc1")]).is_err());
        assert!(target(&[(PORT, "1")]).is_err());
        for (id, port) in [
            ("../x", "1"),
            ("A", "1"),
            ("", "1"),
            ("a", "0"),
            ("a", "65536"),
            ("a", "x"),
        ] {
            assert!(target(&[(ID, id), (PORT, port)]).is_err(), "{id} {port}");
        }
    }
}
