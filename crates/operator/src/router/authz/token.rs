//! Scoped tokens, version 1: a sandbox and an expiry, authenticated with a secret that router and minter share.
//!
//! `v1.<payload>.<mac>`, both base64url without padding; the MAC is HMAC-SHA256 over a context and the encoded payload.

use super::Denied;
use crate::router::target::{Target, is_label};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Shortest secret, in bytes. A shorter one could be found offline from a token, by brute force.
pub const SECRET_BYTES_MIN: usize = 32;

const VERSION: &str = "v1";
/// Domain separation: a MAC made with the same secret for another purpose is not a token.
const CONTEXT: &str = "agent-sandbox/scoped-token/v1.";

/// Why a token cannot be created.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The secret is shorter than [`SECRET_BYTES_MIN`]; its length in bytes.
    #[error(
        "the secret for scoped tokens has {0} bytes, but needs {SECRET_BYTES_MIN}; make one with `openssl rand -hex 32`"
    )]
    SecretTooShort(usize),
    /// The namespace or name is not a DNS label.
    #[error(
        "{0:?} is not the name of a namespace or a sandbox: lower case letters, digits and `-`, at most 63"
    )]
    Name(String),
    /// The TTL is less than a second, which is the unit of expiry times.
    #[error("a token must be valid for at least a second; set --ttl")]
    TooShort,
    /// The system clock is before 1970, or the expiry time does not fit into 64 bits.
    #[error("cannot compute the expiry of the token; is the system clock right?")]
    Clock,
}

/// HMAC key that tokens are signed and verified with.
pub(in crate::router) struct Secret(hmac::Key);

#[derive(Debug, Serialize, Deserialize)]
struct Claims {
    ns: String,
    name: String,
    /// Expiry in Unix seconds; from then on the token is not valid.
    exp: i64,
}

// === impl Secret ===

impl Secret {
    /// Leading and trailing whitespace is ignored: files end with a newline.
    pub(in crate::router) fn new(bytes: &[u8]) -> Result<Self, TokenError> {
        let bytes = bytes.trim_ascii();
        if bytes.len() < SECRET_BYTES_MIN {
            return Err(TokenError::SecretTooShort(bytes.len()));
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, bytes)))
    }

    pub(in crate::router) fn mint(
        &self,
        namespace: &str,
        name: &str,
        ttl: Duration,
        now: SystemTime,
    ) -> Result<String, TokenError> {
        if let Some(wrong) = [namespace, name].into_iter().find(|name| !is_label(name)) {
            return Err(TokenError::Name(wrong.to_owned()));
        }
        if ttl < Duration::from_secs(1) {
            return Err(TokenError::TooShort);
        }
        let until = now.checked_add(ttl).ok_or(TokenError::Clock)?;
        let claims = Claims {
            ns: namespace.to_owned(),
            name: name.to_owned(),
            exp: unix(until).ok_or(TokenError::Clock)?,
        };
        let claims = serde_json::to_vec(&claims).expect("claims are plain data");
        let payload = URL_SAFE_NO_PAD.encode(claims);
        let mac = hmac::sign(&self.0, signed(&payload).as_bytes());
        Ok(format!(
            "{VERSION}.{payload}.{}",
            URL_SAFE_NO_PAD.encode(mac)
        ))
    }

    /// Checks the MAC, the expiry and the sandbox of a token.
    pub(super) fn authorize(
        &self,
        token: &str,
        target: &Target,
        now: SystemTime,
    ) -> Result<(), Denied> {
        let claims = self.claims(token).ok_or(Denied::Unauthenticated)?;
        if unix(now).is_none_or(|now| now >= claims.exp) {
            return Err(Denied::Unauthenticated);
        }
        let same = claims.ns == target.namespace && claims.name == target.name;
        if same { Ok(()) } else { Err(Denied::Forbidden) }
    }

    /// The claims of a token with a valid MAC. It is compared in constant time, before the payload is parsed.
    fn claims(&self, token: &str) -> Option<Claims> {
        let rest = token.strip_prefix(VERSION)?.strip_prefix('.')?;
        let (payload, mac) = rest.split_once('.')?;
        let mac = URL_SAFE_NO_PAD.decode(mac).ok()?;
        hmac::verify(&self.0, signed(payload).as_bytes(), &mac).ok()?;
        let claims = URL_SAFE_NO_PAD.decode(payload).ok()?;
        serde_json::from_slice(&claims).ok()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

fn signed(payload: &str) -> String {
    format!("{CONTEXT}{payload}")
}

fn unix(time: SystemTime) -> Option<i64> {
    let since = time.duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef\n";

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn target(namespace: &str, name: &str) -> Target {
        Target {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            port: 80,
            pod_ip: None,
            uid: None,
            timeout: None,
        }
    }

    #[test]
    fn the_token_format_is_that_of_agent_sandbox() {
        let secret = Secret::new(SECRET).unwrap();
        let token = secret
            .mint("ns", "sb", Duration::from_secs(60), at(1_700_000_000))
            .unwrap();
        // Computed with Python's hmac and base64 over the same claims.
        let payload = "eyJucyI6Im5zIiwibmFtZSI6InNiIiwiZXhwIjoxNzAwMDAwMDYwfQ";
        assert_eq!(
            token,
            format!("v1.{payload}.K8UVa3riPcrdlIMTjtV98r-v1bLalDPiPdtQdtdC2JI")
        );
    }

    #[test]
    fn a_token_is_valid_for_one_sandbox_until_it_expires() {
        let secret = Secret::new(SECRET).unwrap();
        let token = secret
            .mint("ns", "sb", Duration::from_secs(60), at(1000))
            .unwrap();
        let check =
            |namespace, name, now| secret.authorize(&token, &target(namespace, name), at(now));
        assert_eq!(check("ns", "sb", 1059), Ok(()));
        assert_eq!(check("ns", "sb", 1060), Err(Denied::Unauthenticated));
        assert_eq!(check("ns", "other", 1000), Err(Denied::Forbidden));
        assert_eq!(check("other", "sb", 1000), Err(Denied::Forbidden));
    }

    #[test]
    fn a_modified_token_is_not_valid() {
        let secret = Secret::new(SECRET).unwrap();
        let token = secret
            .mint("ns", "sb", Duration::from_secs(60), at(1000))
            .unwrap();
        for position in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[position] = if changed[position] == b'A' {
                b'B'
            } else {
                b'A'
            };
            let changed = String::from_utf8(changed).unwrap();
            let checked = secret.authorize(&changed, &target("ns", "sb"), at(1000));
            assert_eq!(checked, Err(Denied::Unauthenticated), "{changed}");
        }
        let other = Secret::new(&[7; 32]).unwrap();
        let checked = other.authorize(&token, &target("ns", "sb"), at(1000));
        assert_eq!(checked, Err(Denied::Unauthenticated));
        for wrong in ["", "v1", "v1.", "v1..", "v2.a.b", &token[3..]] {
            let checked = secret.authorize(wrong, &target("ns", "sb"), at(1000));
            assert_eq!(checked, Err(Denied::Unauthenticated), "{wrong}");
        }
    }

    #[test]
    fn invalid_names_ttls_and_secrets_are_refused() {
        let secret = Secret::new(SECRET).unwrap();
        let minute = Duration::from_secs(60);
        assert_eq!(
            Secret::new(b"short  ").unwrap_err(),
            TokenError::SecretTooShort(5)
        );
        assert!(secret.mint("ns", "A", minute, at(0)).is_err());
        assert!(secret.mint("", "a", minute, at(0)).is_err());
        assert!(
            secret
                .mint("ns", "a", Duration::from_millis(999), at(0))
                .is_err()
        );
    }
}
