//! What became of an attempt to reach somebody.

use crate::{Error, UnixMillis};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// One attempt, or several that were alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// When; of several, the last.
    pub at: UnixMillis,
    /// What was decided.
    pub verdict: FlowVerdict,
    /// How it was tried.
    pub protocol: FlowProtocol,
    /// The name asked for or shown. The sandbox chose it: it can be any text.
    pub name: Option<String>,
    /// The address it was for.
    pub address: Option<Ipv4Addr>,
    /// The port it was for.
    pub port: Option<u16>,
    /// The rule that allowed it, or the entry that denied it.
    pub rule: Option<String>,
    /// Why it was denied; none when it was allowed.
    pub reason: Option<DenyReason>,
    /// How many attempts this stands for, at least 1.
    pub count: u64,
}

/// What was decided about an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowVerdict {
    /// It went through.
    Allowed,
    /// It did not.
    Denied,
}

/// How somebody was tried to be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowProtocol {
    /// A question to the resolver.
    Dns,
    /// A connection.
    Tcp,
    /// A packet that was no question to the resolver.
    Udp,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $sentence:literal;)+) => {
        /// Why an attempt was denied.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum DenyReason {
            $($(#[$doc])* $name,)+
        }

        impl DenyReason {
            /// Every reason.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// As it is written in answers and metrics.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)+
                }
            }

            /// What happened, and the way out where there is one.
            pub fn sentence(self) -> &'static str {
                match self {
                    $(Self::$name => $sentence,)+
                }
            }
        }
    };
}

reasons! {
    /// No rule of the session is about it.
    NotAllowed = "not_allowed",
        "no rule of the session allows it";
    /// An entry of the server's or the tenant's deny list is about it.
    DenyList = "deny_list",
        "the server denies it to this session; no rule of a session can change that";
    /// A connection on a port where a name is wanted showed none.
    NoName = "no_name",
        "the connection shows no host name (SNI or Host), and the session's rules are about names";
    /// A TLS hello that hides the name it is for.
    EncryptedHello = "encrypted_hello",
        "the TLS hello is encrypted (ECH), so the host name in it cannot be checked";
    /// The name is allowed, but the address is not one of its.
    WrongAddress = "wrong_address",
        "the host name is allowed, but this address is not one it resolves to";
    /// An address that is not public, without a rule about it.
    PrivateAddress = "private_address",
        "the address is not a public one, and no rule names it as a network";
    /// An address of the machine the server runs on, of its links or of its cloud's services.
    ThisMachine = "this_machine",
        "the address is this machine's own, link-local, a cloud's metadata or platform service, or no unicast address; no rule opens those";
    /// The host is allowed, this port is not.
    PortClosed = "port_closed",
        "the host is allowed on other ports only; allow it as host:port";
    /// Something other than TCP, or than DNS to the resolver.
    Protocol = "protocol",
        "only TCP, and DNS to the sandbox's own resolver, can leave a sandbox";
    /// As many connections as a session may have are open.
    TooManyConnections = "too_many_connections",
        "the session has as many connections open as it may, or the server has too few left";
    /// More attempts in a short time than a session may make.
    RateLimited = "rate_limited",
        "the session tries more often than it may; it works again in a moment";
    /// Bytes that are not what the port is for.
    Malformed = "malformed",
        "what was sent is not valid for this port (TLS on 443, HTTP on 80, DNS on 53)";
    /// The name has no address now.
    Unresolved = "unresolved",
        "the host name is allowed, but no address was found for it";
    /// The address did not answer.
    Unreachable = "unreachable",
        "it is allowed, but the connection to it failed";
    /// Open when a change of the rules closed it.
    PolicyChanged = "policy_changed",
        "the connection was open when the session's rules changed, and is no longer allowed";
}

// === impl FlowVerdict ===

impl FlowVerdict {
    /// As it is written in answers and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
        }
    }
}

impl fmt::Display for FlowVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

// === impl FlowProtocol ===

impl FlowProtocol {
    /// As it is written in answers and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl fmt::Display for FlowProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

// === impl DenyReason ===

impl DenyReason {
    /// Whether a rule, or the lack of one, is why; the rest is about the network, or about load.
    pub fn is_by_rule(self) -> bool {
        match self {
            Self::NotAllowed
            | Self::DenyList
            | Self::NoName
            | Self::EncryptedHello
            | Self::WrongAddress
            | Self::PrivateAddress
            | Self::ThisMachine
            | Self::PortClosed => true,
            Self::Protocol
            | Self::TooManyConnections
            | Self::RateLimited
            | Self::Malformed
            | Self::Unresolved
            | Self::Unreachable
            | Self::PolicyChanged => false,
        }
    }
}

impl FromStr for DenyReason {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.iter().find(|reason| reason.as_str() == text);
        found.copied().ok_or_else(|| {
            Error::invalid(format!(
                "reason {:?} is not known here: client and server differ in version",
                super::shown(text)
            ))
        })
    }
}

impl fmt::Display for DenyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_same_everywhere() {
        for reason in DenyReason::ALL {
            let json = serde_json::to_string(reason).unwrap();
            assert_eq!(json, format!("{:?}", reason.as_str()));
            assert_eq!(reason.as_str().parse::<DenyReason>().unwrap(), *reason);
            let sentence = reason.sentence();
            assert!(
                !sentence.ends_with('.') && !sentence.is_empty(),
                "{sentence}"
            );
        }
        assert_eq!(DenyReason::ALL.len(), 15);
        assert!("nonsense".parse::<DenyReason>().is_err());
    }
}
