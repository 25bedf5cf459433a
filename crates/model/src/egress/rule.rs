//! One rule: who may be reached, and on which port.

use super::{HostName, HostPattern, Ipv4Net, shown};
use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// The ports a rule opens that names none: HTTP and HTTPS, where the name is checked on every
/// connection.
const WEB_PORTS: [u16; 2] = [80, 443];

/// What stands for a whole policy. A host of that name, however it is spelled, would be shown as the
/// word and read as it.
const WORDS: [&str; 2] = ["none", "all"];

/// Who a rule is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Hosts by name.
    Host(HostPattern),
    /// Addresses, whoever is there.
    Net(Ipv4Net),
}

/// Who may be reached, and on which TCP port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rule {
    /// Who.
    pub target: Target,
    /// None for 80 and 443.
    pub port: Option<u16>,
}

// === impl Target ===

impl FromStr for Target {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let front = text.split_once('/').map_or(text, |(front, _)| front);
        if front.parse::<Ipv4Addr>().is_ok() {
            return text.parse().map(Self::Net);
        }
        if front.len() < text.len() {
            return Err(Error::invalid(format!(
                "{:?} is not a host: name the host alone, without a path, or a network as in 192.0.2.0/24",
                shown(text)
            )));
        }
        text.parse().map(Self::Host)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(pattern) => write!(f, "{pattern}"),
            Self::Net(net) => write!(f, "{net}"),
        }
    }
}

// === impl Rule ===

impl Rule {
    /// Whether it opens the port to whom it is about.
    pub fn opens(&self, port: u16) -> bool {
        match self.port {
            Some(only) => only == port,
            None => WEB_PORTS.contains(&port),
        }
    }

    /// Whether it is about this name, on any port.
    pub fn matches_name(&self, name: &HostName) -> bool {
        matches!(&self.target, Target::Host(pattern) if pattern.matches(name))
    }

    /// Whether it is about this address, on any port.
    pub fn matches_address(&self, address: Ipv4Addr) -> bool {
        matches!(&self.target, Target::Net(net) if net.contains(address))
    }
}

impl FromStr for Rule {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = |why: &str| Err(Error::invalid(format!("rule {:?}: {why}", shown(text))));
        if text.contains("://") {
            return refused("name the host alone, without a scheme, as in example.com:8443");
        }
        if text.starts_with('[') || text.matches(':').count() > 1 {
            return refused("IPv6 addresses cannot be reached: sandboxes have IPv4 only");
        }
        let Some((target, port)) = text.split_once(':') else {
            let target: Target = text.parse()?;
            if WORDS.contains(&target.to_string().as_str()) {
                return refused("`none` and `all` are written alone, in lower case");
            }
            return Ok(Self { target, port: None });
        };
        let Some(port) = parse_port(port) else {
            return refused("a port is a number from 1 to 65535");
        };
        let target = target.parse()?;
        Ok(Self {
            target,
            port: Some(port),
        })
    }
}

impl TryFrom<String> for Rule {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Rule> for String {
    fn from(rule: Rule) -> Self {
        rule.to_string()
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.target),
            None => write!(f, "{}", self.target),
        }
    }
}

fn parse_port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    digits.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule(text: &str) -> Rule {
        text.parse().unwrap()
    }

    fn error(text: &str) -> String {
        text.parse::<Rule>().unwrap_err().message
    }

    #[test]
    fn rules_are_read_and_written() {
        for (text, want) in [
            ("example.com", "example.com"),
            ("Example.COM.:8443", "example.com:8443"),
            ("*.example.com:22", "*.example.com:22"),
            ("10.1.0.0/16:5432", "10.1.0.0/16:5432"),
            ("1.2.3.4/32:22", "1.2.3.4:22"),
            ("1.2.3.4", "1.2.3.4"),
        ] {
            assert_eq!(rule(text).to_string(), want);
            assert_eq!(rule(want), rule(text));
        }
        assert!(matches!(rule("1.2.3.4").target, Target::Net(_)));
    }

    #[test]
    fn a_rule_without_a_port_opens_the_web() {
        let web = rule("example.com");
        assert!(web.opens(80) && web.opens(443));
        assert!(!web.opens(22) && !web.opens(8080) && !web.opens(0));
        let one = rule("example.com:443");
        assert!(one.opens(443) && !one.opens(80));
    }

    #[test]
    fn errors_say_what_to_do() {
        assert!(error("https://example.com").contains("scheme"));
        assert!(error("example.com/path").contains("path"));
        assert!(error("[::1]:443").contains("IPv6"));
        assert!(error("2001:db8::1").contains("IPv6"));
        for port in ["0", "65536", "x", "", "+80", "080", "-1", "8 "] {
            assert!(error(&format!("example.com:{port}")).contains("1 to 65535"));
        }
        assert!(error("10.1.2.3/16").contains("10.1.0.0/16"));
        assert!(error(":443").contains("empty"));
        for word in ["all", "ALL", "all.", "None", "none."] {
            assert!(error(word).contains("alone"), "{word}");
        }
        assert_eq!(rule("all:443").to_string(), "all:443");
    }

    proptest! {
        #[test]
        fn nonsense_never_panics_and_what_passes_round_trips(text in "[a-zA-Z0-9.:/*@_ -]{0,40}") {
            if let Ok(rule) = text.parse::<Rule>() {
                prop_assert_eq!(rule.to_string().parse::<Rule>().unwrap(), rule);
            }
        }

        #[test]
        fn any_text_never_panics(text in "\\PC{0,60}") {
            let _ = text.parse::<Rule>();
        }
    }
}
