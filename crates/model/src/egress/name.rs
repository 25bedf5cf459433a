//! Host names in one spelling, and patterns of them.

use super::shown;
use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// RFC 1035, written without the last dot.
const NAME_BYTES_MAX: usize = 253;

/// RFC 1035.
const LABEL_BYTES_MAX: usize = 63;

/// A host's name in the one spelling that can be compared: lower case, no last dot.
///
/// Letters, digits, inner dashes and `_`. Never an address, in no spelling that any resolver takes
/// for one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostName(String);

/// One name, or all names below one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HostPattern {
    /// This name only.
    Exact(HostName),
    /// `*.x`: every name below `x` at any depth, not `x` itself.
    Below(HostName),
}

// === impl HostName ===

impl HostName {
    /// Reads a name in any case, with or without its last dot.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let name = text.strip_suffix('.').unwrap_or(text);
        check(name).map_err(|why| {
            Error::invalid(format!("host name {:?} is not valid: {why}", shown(text)))
        })?;
        Ok(Self(name.to_ascii_lowercase()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is a name below `parent`, at any depth.
    pub fn is_below(&self, parent: &Self) -> bool {
        self.0
            .strip_suffix(parent.as_str())
            .is_some_and(|front| front.ends_with('.'))
    }
}

impl FromStr for HostName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::parse(text)
    }
}

impl TryFrom<String> for HostName {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        Self::parse(&text)
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> Self {
        name.0
    }
}

impl AsRef<str> for HostName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl HostPattern ===

impl HostPattern {
    /// Whether `name` is one of those it stands for.
    pub fn matches(&self, name: &HostName) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Below(parent) => name.is_below(parent),
        }
    }
}

impl FromStr for HostPattern {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "*" {
            return Err(Error::invalid(
                "\"*\" is not a host name: write `all` for every host, or `*.example.com` for those below one",
            ));
        }
        match text.strip_prefix("*.") {
            Some(parent) => HostName::parse(parent).map(Self::Below),
            None => HostName::parse(text).map(Self::Exact),
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => write!(f, "{name}"),
            Self::Below(parent) => write!(f, "*.{parent}"),
        }
    }
}

fn check(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("it is empty".to_owned());
    }
    if !name.is_ascii() {
        return Err("write a name with other than ASCII letters in its xn-- form".to_owned());
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(format!(
            "it has {} characters, at most {NAME_BYTES_MAX} are allowed",
            name.len()
        ));
    }
    if name.parse::<Ipv6Addr>().is_ok() {
        return Err("it is an IPv6 address, and sandboxes have IPv4 only".to_owned());
    }
    if name.contains('*') {
        return Err("a star can only be the whole first part, as in `*.example.com`".to_owned());
    }
    name.split('.').try_for_each(check_label)?;
    if name.parse::<Ipv4Addr>().is_ok() || name.rsplit('.').next().is_some_and(is_number) {
        return Err("it is a number, and a name is wanted here".to_owned());
    }
    Ok(())
}

fn check_label(label: &str) -> Result<(), String> {
    if label.is_empty() {
        return Err("there is nothing between two dots, or before the first".to_owned());
    }
    if label.len() > LABEL_BYTES_MAX {
        return Err(format!(
            "a part of it has {} characters, at most {LABEL_BYTES_MAX} are allowed between dots",
            label.len()
        ));
    }
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if !label.bytes().all(good) || label.starts_with('-') || label.ends_with('-') {
        return Err("use letters, digits, `_` and inner dashes between dots".to_owned());
    }
    Ok(())
}

/// Whether resolvers read a name that ends so as an address: `1.2.3.4`, but also `2130706433`,
/// `127.1` and `0x7f.1`.
fn is_number(last: &str) -> bool {
    let hex = last.strip_prefix("0x").or(last.strip_prefix("0X"));
    last.bytes().all(|b| b.is_ascii_digit())
        || hex.is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(text: &str) -> HostName {
        text.parse().unwrap()
    }

    fn error(text: &str) -> String {
        text.parse::<HostPattern>().unwrap_err().message
    }

    #[test]
    fn one_spelling() {
        for (text, want) in [
            ("example.com", "example.com"),
            ("EXAMPLE.Com.", "example.com"),
            ("a", "a"),
            ("_dmarc.example.com", "_dmarc.example.com"),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("3.example", "3.example"),
            ("1.2.3.4.example", "1.2.3.4.example"),
        ] {
            assert_eq!(name(text).as_str(), want);
        }
        let longest = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "b".repeat(61));
        assert_eq!(name(&longest).as_str().len(), NAME_BYTES_MAX);
        assert_eq!(name(&format!("{longest}.")).as_str(), longest);
        assert!(format!("{longest}b").parse::<HostName>().is_err());
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let long = "a".repeat(64);
        for bad in [
            "",
            ".",
            "..",
            ".a",
            "a..b",
            "a..",
            "-a.b",
            "a-.b",
            "a b",
            "a/b",
            "a:1",
            "a@b",
            "a\0",
            "a\n",
            " a",
            "a,b",
            "a*",
            "[::1]",
            "::1",
            "1.2.3.4",
            "127.1",
            "127",
            "0x7f.1",
            "a.0x",
            "0x7F000001",
            "0177.1",
            "bücher.example",
            "ａ.example",
            &long,
        ] {
            assert!(bad.parse::<HostName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn errors_say_what_to_do() {
        assert!(error("bücher.example").contains("xn--"));
        assert!(error("*").contains("`all`"));
        assert!(error("a.*.b").contains("*.example.com"));
        assert!(error("::1").contains("IPv6"));
        assert!(error(&"a".repeat(5000)).len() < 300);
    }

    #[test]
    fn below_is_any_depth_and_not_itself() {
        let below: HostPattern = "*.Example.com".parse().unwrap();
        assert_eq!(below.to_string(), "*.example.com");
        for good in ["a.example.com", "b.a.example.com", "_x.example.com"] {
            assert!(below.matches(&name(good)), "{good}");
        }
        for bad in [
            "example.com",
            "badexample.com",
            "example.com.evil.test",
            "com",
        ] {
            assert!(!below.matches(&name(bad)), "{bad}");
        }
    }

    prop_compose! {
        fn any_label()(text in "[a-z_]([a-z0-9_-]{0,10}[a-z0-9_])?") -> String { text }
    }
    prop_compose! {
        fn any_name()(labels in prop::collection::vec(any_label(), 1..6)) -> HostName {
            name(&labels.join("."))
        }
    }

    proptest! {
        #[test]
        fn round_trip(host in any_name(), below: bool) {
            prop_assert_eq!(&host.to_string().parse::<HostName>().unwrap(), &host);
            prop_assert_eq!(&host.to_string().to_uppercase().parse::<HostName>().unwrap(), &host);
            let pattern = if below { HostPattern::Below(host) } else { HostPattern::Exact(host) };
            prop_assert_eq!(pattern.to_string().parse::<HostPattern>().unwrap(), pattern);
        }

        #[test]
        fn a_pattern_matches_no_parent_and_no_sibling(
            parent in any_name(), a in any_label(), b in any_label()
        ) {
            prop_assume!(a != b);
            let (child, sibling) = (name(&format!("{a}.{parent}")), name(&format!("{b}.{parent}")));
            let glued = name(&format!("{a}{parent}"));
            let exact = HostPattern::Exact(child.clone());
            prop_assert!(exact.matches(&child));
            prop_assert!(!exact.matches(&parent) && !exact.matches(&sibling));
            let below = HostPattern::Below(child.clone());
            let grandchild = name(&format!("{b}.{child}"));
            prop_assert!(below.matches(&grandchild));
            prop_assert!(!below.matches(&child) && !below.matches(&parent) && !below.matches(&sibling));
            prop_assert!(!HostPattern::Below(parent).matches(&glued));
        }

        #[test]
        fn nonsense_never_panics_and_what_passes_is_canonical(text in "\\PC{0,80}") {
            if let Ok(host) = text.parse::<HostName>() {
                prop_assert_eq!(&host.as_str().parse::<HostName>().unwrap(), &host);
                prop_assert!(!host.as_str().bytes().any(|b| b.is_ascii_uppercase()));
                prop_assert!(!host.as_str().ends_with('.'));
            }
            let _ = text.parse::<HostPattern>();
        }
    }
}
