//! Exposed services: port, address in the sandbox, and the token in the URL.

use crate::{Error, SessionId, UnixMillis};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

const TOKEN_BYTES: usize = 32;

/// Longest loopback address, with room to spare.
const HOST_BYTES_MAX: usize = 64;

/// A label of DNS has 63 bytes; a port and a dash take up to six.
const LABEL_SESSION_BYTES_MAX: usize = 57;

/// A port that something can listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(u16);

/// Loopback address that a service listens on in the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceHost(String);

/// Secret token of a service's URL: 256 random bits. Debug does not print it.
#[derive(Clone)]
pub struct ServiceToken([u8; TOKEN_BYTES]);

/// An exposed service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposure {
    /// Its session.
    pub session: SessionId,
    /// Its port.
    pub port: Port,
    /// Its address in the sandbox.
    pub host: ServiceHost,
    /// Its token.
    pub token: ServiceToken,
    /// Time of exposure.
    pub started_at: UnixMillis,
}

/// The first label of a service's own host name: port and session, as in `8000-sess-xa3pvctig6z62cuz37lw`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceLabel {
    /// Its session.
    pub session: SessionId,
    /// Its port.
    pub port: Port,
}

// === impl Port ===

impl Port {
    /// 1 to 65535.
    pub fn new(port: i64) -> Result<Self, Error> {
        u16::try_from(port)
            .ok()
            .filter(|port| *port > 0)
            .map(Self)
            // K8E's words, which its clients know.
            .ok_or_else(|| Error::invalid("port must be in [1, 65535]"))
    }

    /// The number.
    pub fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl ServiceLabel ===

impl ServiceLabel {
    /// An error when the session's id is too long to share a label of DNS with a port.
    pub fn new(session: SessionId, port: Port) -> Result<Self, Error> {
        if session.as_str().len() > LABEL_SESSION_BYTES_MAX {
            return Err(Error::invalid(format!(
                "session {session} cannot have a host name for its services: this server gives each its own, for which a session id has at most {LABEL_SESSION_BYTES_MAX} characters"
            )));
        }
        Ok(Self { session, port })
    }
}

impl fmt::Display for ServiceLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.port, self.session)
    }
}

/// In one spelling only: lower case, no zeros before the port.
impl FromStr for ServiceLabel {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::invalid("not the host name of a service");
        let (number, session) = text.split_once('-').ok_or_else(wrong)?;
        let port = number.parse::<u16>().map_err(|_| wrong())?;
        let label = Self::new(session.parse()?, Port::new(port.into())?)?;
        if label.to_string() == text {
            Ok(label)
        } else {
            Err(wrong())
        }
    }
}

// === impl ServiceHost ===

impl ServiceHost {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for ServiceHost {
    fn default() -> Self {
        Self("127.0.0.1".to_owned())
    }
}

/// Unspecified addresses are accepted too: a service that listens on all addresses listens on loopback.
impl FromStr for ServiceHost {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let inside = |address: IpAddr| address.is_loopback() || address.is_unspecified();
        let known =
            text.len() <= HOST_BYTES_MAX && (text == "localhost" || text.parse().is_ok_and(inside));
        if !known {
            return Err(Error::invalid(
                "host must be loopback inside the sandbox: 127.0.0.1, ::1 or localhost",
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ServiceHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl ServiceToken ===

impl ServiceToken {
    /// A token that is never given out, to compare with where no service exists (constant time).
    pub const NOBODYS: Self = Self([0; TOKEN_BYTES]);

    /// A new one.
    pub fn random() -> Self {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes).expect("the kernel always has random bytes after boot");
        Self(bytes)
    }

    /// From its stored bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(bytes.try_into().ok()?))
    }

    /// As a client sends it: 64 hexadecimal digits. `None` for anything else.
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.len() != 2 * TOKEN_BYTES {
            return None;
        }
        let mut bytes = [0; TOKEN_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16);
            *byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
        }
        Some(Self(bytes))
    }

    /// Bytes to store, encrypted.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// As text, for the client that exposed the service.
    pub fn reveal(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Constant-time comparison.
impl PartialEq for ServiceToken {
    fn eq(&self, other: &Self) -> bool {
        let differs = self.0.iter().zip(&other.0);
        differs.fold(0, |all, (a, b)| all | (a ^ b)) == 0
    }
}

impl Eq for ServiceToken {}

/// Without the token.
impl fmt::Debug for ServiceToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServiceToken(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_those_that_exist() {
        assert_eq!(Port::new(8080).unwrap().get(), 8080);
        for bad in [0, -1, 65536, i64::MAX] {
            let error = Port::new(bad).unwrap_err();
            assert_eq!(error.message, "port must be in [1, 65535]");
        }
    }

    #[test]
    fn hosts_are_inside() {
        assert_eq!("".parse::<ServiceHost>().unwrap().as_str(), "127.0.0.1");
        for good in ["127.0.0.1", "127.9.9.9", "::1", "localhost", "0.0.0.0"] {
            assert_eq!(good.parse::<ServiceHost>().unwrap().as_str(), good);
        }
        for bad in [
            "192.0.2.1",
            "example.com",
            "127.0.0.1 ",
            "localhost.",
            "fe80::1",
        ] {
            assert!(bad.parse::<ServiceHost>().is_err(), "{bad}");
        }
    }

    #[test]
    fn tokens_come_back_and_are_not_printed() {
        let token = ServiceToken::random();
        let text = token.reveal();
        assert_eq!(ServiceToken::parse(text.as_bytes()), Some(token.clone()));
        assert_eq!(
            ServiceToken::from_bytes(token.as_bytes()),
            Some(token.clone())
        );
        assert_ne!(ServiceToken::random(), token);
        assert_eq!(format!("{token:?}"), "ServiceToken(…)");
        let almost = format!("{}g", &text[1..]);
        for bad in ["", &text[1..], &almost] {
            assert_eq!(ServiceToken::parse(bad.as_bytes()), None);
        }
    }

    #[test]
    fn labels_have_one_spelling_and_fit_into_dns() {
        let label: ServiceLabel = "8000-sess-ab".parse().unwrap();
        assert_eq!(
            (label.session.as_str(), label.port.get()),
            ("sess-ab", 8000)
        );
        assert_eq!(label.to_string(), "8000-sess-ab");
        let long = "s".repeat(LABEL_SESSION_BYTES_MAX);
        let label = format!("65535-{long}");
        assert_eq!(label.len(), 63);
        assert_eq!(label.parse::<ServiceLabel>().unwrap().to_string(), label);
        for bad in [
            "",
            "8000",
            "8000-",
            "-s1",
            "0-s1",
            "080-s1",
            "+80-s1",
            "65536-s1",
            "80-S1",
            "80--s1",
            "80-s1-",
            "80-s1.x",
            "80_s1",
            "*",
            &format!("80-{long}s"),
        ] {
            assert!(bad.parse::<ServiceLabel>().is_err(), "{bad}");
        }
        let id: SessionId = format!("{long}s").parse().unwrap();
        let refused = ServiceLabel::new(id, Port::new(80).unwrap()).unwrap_err();
        assert!(refused.message.contains("at most 57"), "{refused:?}");
    }
}
