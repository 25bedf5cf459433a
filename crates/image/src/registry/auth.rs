//! How a registry wants to be told who asks: Basic, or a token of its token service.

use super::Credentials;
use crate::error::ImageError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::header::HeaderValue;
use serde::Deserialize;

/// Of one header.
const CHALLENGE_BYTES_MAX: usize = 4096;

/// What a registry asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// What goes into the header of a request.
pub(super) struct Authorization(HeaderValue);

#[derive(Deserialize)]
struct WireToken {
    #[serde(default)]
    token: String,
    #[serde(default)]
    access_token: String,
}

// === impl Challenge ===

impl Challenge {
    /// The first that we can answer.
    pub(super) fn parse<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Self> {
        headers
            .filter(|text| text.len() <= CHALLENGE_BYTES_MAX)
            .find_map(Self::parse_one)
    }

    fn parse_one(text: &str) -> Option<Self> {
        let (scheme, rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        let mut rest = rest.trim();
        while !rest.is_empty() {
            let (key, after) = rest.split_once('=')?;
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_at(after.find(',').unwrap_or(after.len())),
            };
            match key.trim() {
                "realm" => realm = Some(value.to_owned()),
                "service" => service = Some(value.to_owned()),
                "scope" => scope = Some(value.to_owned()),
                _ => {}
            }
            rest = after.trim_start_matches([',', ' ']);
        }
        let realm = realm?;
        Some(Self::Bearer {
            realm,
            service,
            scope,
        })
    }
}

// === impl Authorization ===

impl Authorization {
    pub(super) fn basic(credentials: &Credentials) -> Self {
        let pair = format!("{}:{}", credentials.username, credentials.password);
        Self::new(&format!("Basic {}", STANDARD.encode(pair)))
            .unwrap_or_else(|| unreachable!("base64 stands in a header"))
    }

    pub(super) fn token(answer: &[u8]) -> Result<Self, ImageError> {
        let bad = || ImageError::invalid("the registry's token service sent no token");
        let token: WireToken = serde_json::from_slice(answer).map_err(|_| bad())?;
        let token = match token.token.as_str() {
            "" => token.access_token,
            _ => token.token,
        };
        match token.is_empty() {
            true => Err(bad()),
            false => Self::new(&format!("Bearer {token}")).ok_or_else(bad),
        }
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.0.clone()
    }

    fn new(text: &str) -> Option<Self> {
        let mut value = HeaderValue::from_str(text).ok()?;
        value.set_sensitive(true);
        Some(Self(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/python:pull,push""#;
        let read = Challenge::parse([hub].into_iter());
        let want = Challenge::Bearer {
            realm: "https://auth.docker.io/token".to_owned(),
            service: Some("registry.docker.io".to_owned()),
            scope: Some("repository:library/python:pull,push".to_owned()),
        };
        assert_eq!(read, Some(want));
        let both = ["Negotiate", "Basic realm=x"];
        assert_eq!(Challenge::parse(both.into_iter()), Some(Challenge::Basic));
        for bad in [
            "",
            "Bearer",
            "Bearer realm=\"x",
            "Bearer realm",
            "Digest realm=x",
            "Bearer service=\"a\"",
        ] {
            assert_eq!(Challenge::parse([bad].into_iter()), None, "{bad}");
        }
    }

    #[test]
    fn tokens_stand_in_a_header_or_are_refused() {
        for (answer, good) in [
            (r#"{"token":"abc"}"#, true),
            (r#"{"access_token":"abc"}"#, true),
            (r#"{"token":""}"#, false),
            (r#"{"token":"a\nb"}"#, false),
            ("[]", false),
        ] {
            assert_eq!(
                Authorization::token(answer.as_bytes()).is_ok(),
                good,
                "{answer}"
            );
        }
    }
}
