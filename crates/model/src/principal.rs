//! Principals: authenticated callers, and their rights.

use crate::{Error, KeyId, Tenants};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Longest name: a common name in a certificate has at most 64 characters.
const NAME_BYTES_MAX: usize = 63;

/// An authenticated caller; the owner of what it creates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    name: String,
    role: Role,
    tenants: Tenants,
    key: Option<KeyId>,
    source: String,
}

/// Name of the principal of an API key; several keys may have the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PrincipalName(String);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Role {
    /// Sees its own objects.
    User,
    /// Sees objects of all owners.
    Operator,
    /// Administrator: manages API keys and certificates too.
    Administrator,
}

// === impl Principal ===

impl Principal {
    /// Root or a member of the socket's group on the Unix socket: an administrator.
    pub fn local() -> Self {
        Self {
            name: "local".to_owned(),
            role: Role::Administrator,
            tenants: Tenants::any(),
            key: None,
            source: String::new(),
        }
    }

    /// The same people over TCP on this machine. A program of theirs that passes on what others
    /// send must not let those make keys: that takes the socket.
    pub fn loopback() -> Self {
        Self {
            name: "local".to_owned(),
            role: Role::Operator,
            tenants: Tenants::any(),
            key: None,
            source: String::new(),
        }
    }

    /// The holder of an API key, or of a certificate that was given for one: sees its own, and
    /// makes sessions for the key's tenants.
    pub fn user(name: &PrincipalName, key: KeyId, tenants: Tenants) -> Self {
        Self {
            name: Self::owner_of(name),
            role: Role::User,
            tenants,
            key: Some(key),
            source: String::new(),
        }
    }

    /// The holder of a certificate that the server made by itself, for whoever runs it: sees its
    /// own, and makes sessions for any tenant.
    pub fn certificate(common_name: &str) -> Self {
        Self {
            name: format!("cert:{common_name}"),
            role: Role::User,
            tenants: Tenants::any(),
            key: None,
            source: String::new(),
        }
    }

    /// The holder of a session's access token, which acts for the session's owner: nothing but a call about that
    /// session is made with it.
    pub fn token_holder(owner: &str) -> Self {
        Self {
            name: owner.to_owned(),
            role: Role::User,
            tenants: Tenants::any(),
            key: None,
            source: String::new(),
        }
    }

    /// The owner that is stored for what the holder of an API key makes.
    pub fn owner_of(name: &PrincipalName) -> String {
        format!("user:{name}")
    }

    /// The same principal, calling from an address or a user of this machine: for the audit.
    #[must_use]
    pub fn calling_from(self, source: String) -> Self {
        Self { source, ..self }
    }

    /// The owner name that is stored with objects that it creates.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether this principal may use objects of `owner`.
    pub fn may_use(&self, owner: &str) -> bool {
        self.is_operator() || self.name == owner
    }

    /// The API key that it called with, by itself or by a certificate that was given for it.
    pub fn key(&self) -> Option<&KeyId> {
        self.key.as_ref()
    }

    /// From where it calls: an IP address, or `uid:N` at the Unix socket; empty where nobody knows.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Tenants that it may create sessions for.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Whether it sees objects of all owners.
    pub fn is_operator(&self) -> bool {
        matches!(self.role, Role::Operator | Role::Administrator)
    }

    /// Whether it is an administrator: manages keys and certificates, and reads the audit log.
    pub fn is_administrator(&self) -> bool {
        self.role == Role::Administrator
    }
}

// === impl PrincipalName ===

impl PrincipalName {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PrincipalName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        text.to_owned().try_into()
    }
}

impl TryFrom<String> for PrincipalName {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        check_name(&text, "name").map(|()| Self(text))
    }
}

impl From<PrincipalName> for String {
    fn from(name: PrincipalName) -> Self {
        name.0
    }
}

impl fmt::Display for PrincipalName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Names as people give them to keys, their holders and secrets.
pub(crate) fn check_name(text: &str, noun: &str) -> Result<(), Error> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'@');
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    if text.len() <= NAME_BYTES_MAX && edge(text.as_bytes().first()) && text.bytes().all(plain) {
        return Ok(());
    }
    let shown: String = text.chars().take(NAME_BYTES_MAX).collect();
    Err(Error::invalid(format!(
        "{noun} {shown:?} is not valid: use 1 to {NAME_BYTES_MAX} letters, digits and -_.@, a letter or digit first"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_cannot_name_itself_local() {
        let posing = Principal::certificate("local");
        assert!(!posing.may_use(Principal::local().name()));
        assert!(Principal::local().may_use(posing.name()));
        assert!(!posing.may_use(Principal::certificate("other").name()));
    }

    #[test]
    fn a_name_is_nobody_elses() {
        let admin: PrincipalName = "admin".parse().unwrap();
        let user = Principal::user(&admin, KeyId::random(), Tenants::any());
        assert!(!user.may_use(Principal::certificate("admin").name()));
        assert!(!user.may_use("local") && !user.is_operator());
    }

    #[test]
    fn only_the_socket_administers() {
        assert!(Principal::local().is_administrator());
        assert!(Principal::loopback().is_operator());
        assert!(!Principal::loopback().is_administrator());
    }

    #[test]
    fn names_are_checked() {
        for good in ["a", "ann@example.com", "CI_1.2", &"a".repeat(63)] {
            assert!(good.parse::<PrincipalName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a b", "a:b", "é", "a\n", "../x", &"a".repeat(64)] {
            assert!(bad.parse::<PrincipalName>().is_err(), "{bad}");
        }
    }
}
