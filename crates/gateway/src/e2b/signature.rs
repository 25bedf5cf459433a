//! Signed URLs of files: E2B's clients make them from a sandbox's access token, for programs that have no token.

use super::error::Failure;
use super::query::Query;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use ring::digest::{SHA256, digest};
use std::time::{SystemTime, UNIX_EPOCH};

const PREFIX: &str = "v1_";

/// What a signature is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Read,
    Write,
}

/// A signed request.
pub(super) struct Signed<'a> {
    given: &'a str,
    /// What is hashed before the token, and after it.
    before: String,
    after: String,
    expires: Option<u64>,
}

// === impl Signed ===

impl<'a> Signed<'a> {
    pub(super) fn of(query: &'a Query, operation: Operation) -> Result<Self, Failure> {
        let given = query.get("signature");
        let given =
            given.ok_or_else(|| Failure::unauthenticated("missing signature query parameter"))?;
        let expires = match query.get("signature_expiration") {
            None => None,
            Some(text) => Some(text.parse::<u64>().map_err(|_| invalid())?),
        };
        let operation = match operation {
            Operation::Read => "read",
            Operation::Write => "write",
        };
        let text = |name| query.get(name).unwrap_or_default();
        Ok(Self {
            given,
            before: format!("{}:{operation}:{}:", text("path"), text("username")),
            after: expires.map_or_else(String::new, |at| format!(":{at}")),
            expires,
        })
    }

    /// Whether it was made with this token. The comparison is of hashes: its time says nothing about the token.
    pub(super) fn is_by(&self, token: &str) -> bool {
        let signed = format!("{}{token}{}", self.before, self.after);
        let hash = digest(&SHA256, signed.as_bytes());
        let right = format!("{PREFIX}{}", STANDARD_NO_PAD.encode(hash));
        let differs = right.bytes().zip(self.given.bytes());
        let differs = differs.fold(0, |all, (a, b)| all | std::hint::black_box(a ^ b));
        right.len() == self.given.len() && differs == 0
    }

    /// Checked after the signature.
    pub(super) fn check_expiry(&self) -> Result<(), Failure> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        match self.expires {
            Some(at) if at < now.as_secs() => {
                Err(Failure::unauthenticated("signature is already expired"))
            }
            _ => Ok(()),
        }
    }
}

pub(super) fn invalid() -> Failure {
    Failure::unauthenticated("invalid signature")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_name_path_operation_and_user() {
        let hash = digest(&SHA256, b"/a b:read:root:secret:4000000000");
        let signature = format!("v1_{}", STANDARD_NO_PAD.encode(hash));
        let encoded = signature.replace('+', "%2B").replace('/', "%2F");
        let uri = |path: &str| -> hyper::Uri {
            format!("/files?username=root&path={path}&signature={encoded}&signature_expiration=4000000000")
                .parse()
                .unwrap()
        };
        let is_right = |path: &str, operation, token: &str| {
            let query = Query::of(&uri(path));
            Signed::of(&query, operation).unwrap().is_by(token)
        };
        assert!(is_right("/a+b", Operation::Read, "secret"));
        assert!(is_right("/a%20b", Operation::Read, "secret"));
        assert!(!is_right("/a+b", Operation::Write, "secret"));
        assert!(!is_right("/a+c", Operation::Read, "secret"));
        assert!(!is_right("/a+b", Operation::Read, "secreT"));
        let query = Query::of(&"/files?path=/a".parse().unwrap());
        assert!(Signed::of(&query, Operation::Read).is_err());
    }
}
