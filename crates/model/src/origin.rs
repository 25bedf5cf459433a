//! Origin of a session: the kind of call that created it, and the kind of client.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What made a session. A run that names no session uses only [`SessionOrigin::Run`] ones again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionOrigin {
    /// A call that creates sessions.
    Create,
    /// A run, background run or terminal that named no session: the next one may use it again.
    Run,
    /// A run that asked for a session of its own, which ends with it.
    FreshRun,
    /// A call that creates sub-agents.
    SubAgent,
}

/// The kind of client a session was made for, as the client says: a word such as `cli`. It keeps
/// programs of one principal apart; it is not a permission.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClientKind(String);

/// Longer than any name of a program or library that should be told apart.
const CLIENT_KIND_BYTES_MAX: usize = 32;

// === impl SessionOrigin ===

impl SessionOrigin {
    /// As it is written in answers and in the store.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Run => "run",
            Self::FreshRun => "fresh_run",
            Self::SubAgent => "sub_agent",
        }
    }
}

impl FromStr for SessionOrigin {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        [Self::Create, Self::Run, Self::FreshRun, Self::SubAgent]
            .into_iter()
            .find(|origin| origin.as_str() == text)
            .ok_or_else(|| {
                Error::invalid("session origin must be create, run, fresh_run or sub_agent")
            })
    }
}

// === impl ClientKind ===

impl ClientKind {
    /// Clients of the `sandbox.v1` API (the Go K8E).
    pub fn sandbox_v1() -> Self {
        Self("sandbox-v1".to_owned())
    }

    /// Clients of the E2B API.
    pub fn e2b() -> Self {
        Self("e2b".to_owned())
    }

    /// As it is written in requests, answers and the store.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The client kind of a request that names none.
impl Default for ClientKind {
    fn default() -> Self {
        Self("api".to_owned())
    }
}

impl fmt::Display for ClientKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ClientKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::try_from(text.to_owned())
    }
}

impl TryFrom<String> for ClientKind {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        let word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if (1..=CLIENT_KIND_BYTES_MAX).contains(&text.len()) && text.bytes().all(word) {
            return Ok(Self(text));
        }
        Err(Error::invalid(format!(
            "client kind must be 1 to {CLIENT_KIND_BYTES_MAX} characters of a-z, 0-9 and -, as in cli"
        )))
    }
}

impl From<ClientKind> for String {
    fn from(kind: ClientKind) -> Self {
        kind.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_read_as_they_are_written() {
        for origin in ["create", "run", "fresh_run", "sub_agent"] {
            assert_eq!(origin.parse::<SessionOrigin>().unwrap().as_str(), origin);
        }
        assert!("".parse::<SessionOrigin>().is_err());
    }

    #[test]
    fn a_client_kind_is_a_short_word() {
        assert_eq!("cli".parse::<ClientKind>().unwrap().as_str(), "cli");
        let kinds = [ClientKind::default(), ClientKind::sandbox_v1()];
        for kind in kinds {
            assert_eq!(kind.as_str().parse::<ClientKind>().unwrap(), kind);
        }
        for bad in ["", "CLI", "a b", "é", &"a".repeat(33)] {
            assert!(bad.parse::<ClientKind>().is_err(), "{bad:?}");
        }
    }
}
