//! Ids of sessions, sandboxes, tenants, runs and terminals: valid DNS labels, random unless chosen by a client.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// DNS allows 63; ids also become directory, cgroup and Kubernetes object names.
const LABEL_BYTES_MAX: usize = 63;

/// 20 characters of 5 bits: 100 random bits, not to be guessed.
const RANDOM_CHARS: usize = 20;

macro_rules! label {
    ($(#[$doc:meta])* $name:ident, $noun:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self, Error> {
                check_label(text, $noun).map(|()| Self(text.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self, Error> {
                check_label(&text, $noun).map(|()| Self(text))
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

label!(
    /// Names a session; chosen by its creator or random.
    SessionId,
    "session id"
);
label!(
    /// Names one sandbox of a driver; always random, never chosen by a user.
    SandboxId,
    "sandbox id"
);
label!(
    /// Groups sessions that share a deny list and a quota, and tells apart those of one principal.
    TenantId,
    "tenant"
);

label!(
    /// Names a background run; always random.
    RunId,
    "run id"
);
label!(
    /// Names a terminal; always random.
    TerminalId,
    "terminal id"
);
label!(
    /// Names an API key, which itself is never shown again.
    KeyId,
    "key id"
);
label!(
    /// Names a question to a person; always random.
    ApprovalId,
    "approval id"
);

impl ApprovalId {
    /// A new id that nobody can guess.
    pub fn random() -> Self {
        Self(format!("approval-{}", random_text()))
    }
}

impl KeyId {
    /// A new id that no other key has.
    pub fn random() -> Self {
        Self(format!("key-{}", random_text()))
    }
}

impl SessionId {
    /// A new id that nobody can guess.
    pub fn random() -> Self {
        Self(format!("sess-{}", random_text()))
    }

    /// The same in the form that E2B clients take: lower-case letters and digits only, which is also the first label of
    /// a host name, where `-` has a meaning.
    pub fn random_e2b() -> Self {
        Self(format!("i{}", random_text()))
    }

    /// A new one for a sub-agent, which nobody can guess. The parent's is cut where that is needed.
    pub fn of_sub_agent(parent: &Self) -> Self {
        const INFIX: &str = "-sub-";
        let kept = LABEL_BYTES_MAX - INFIX.len() - RANDOM_CHARS;
        let parent = &parent.0[..parent.0.len().min(kept)];
        Self(format!("{parent}{INFIX}{}", random_text()))
    }
}

impl SandboxId {
    /// A new id that nobody can guess.
    pub fn random() -> Self {
        Self(format!("sbx-{}", random_text()))
    }
}

impl RunId {
    /// A new id that nobody can guess.
    pub fn random() -> Self {
        Self(format!("run-{}", random_text()))
    }
}

impl TerminalId {
    /// A new id that nobody can guess.
    pub fn random() -> Self {
        Self(format!("term-{}", random_text()))
    }
}

/// The tenant that is called like an API key.
impl From<&KeyId> for TenantId {
    fn from(key: &KeyId) -> Self {
        Self(key.0.clone())
    }
}

impl Default for TenantId {
    fn default() -> Self {
        Self("default".to_owned())
    }
}

fn random_text() -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut bytes = [0u8; RANDOM_CHARS];
    getrandom::fill(&mut bytes).expect("the kernel always has random bytes after boot");
    bytes
        .iter()
        .map(|b| char::from(ALPHABET[usize::from(b % 32)]))
        .collect()
}

fn check_label(text: &str, noun: &str) -> Result<(), Error> {
    let bytes = text.as_bytes();
    let inner = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    let edge = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if bytes.len() <= LABEL_BYTES_MAX
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(inner)
    {
        return Ok(());
    }
    let shown: String = text.chars().take(LABEL_BYTES_MAX).collect();
    Err(Error::invalid(format!(
        "{noun} {shown:?} is not valid: use 1 to {LABEL_BYTES_MAX} lower-case letters, digits and inner dashes"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_checked() {
        for good in ["a", "sess-1", "0-9", &"a".repeat(63)] {
            assert_eq!(good.parse::<SessionId>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            "-a",
            "a-",
            "A",
            "a_b",
            "a/b",
            "..",
            "a\0",
            "é",
            &"a".repeat(64),
        ] {
            assert!(bad.parse::<SessionId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn random_ids_are_valid_and_differ() {
        let (a, b) = (SessionId::random(), SessionId::random());
        assert_ne!(a, b);
        assert_eq!(a.as_str().parse::<SessionId>().unwrap(), a);
    }

    #[test]
    fn a_sub_agent_is_named_after_its_parent() {
        for parent in ["a".to_owned(), "b".repeat(63)] {
            let child = SessionId::of_sub_agent(&parent.parse().unwrap());
            assert!(
                child
                    .as_str()
                    .starts_with(&format!("{}-sub-", &parent[..parent.len().min(38)]))
            );
            assert_eq!(child.as_str().parse::<SessionId>().unwrap(), child);
        }
    }

    #[test]
    fn serde_checks_too() {
        assert!(serde_json::from_str::<SessionId>("\"../x\"").is_err());
    }
}
