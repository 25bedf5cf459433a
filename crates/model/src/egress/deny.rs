//! What nobody may reach, whatever their own rules say.

use super::{EgressPolicy, HostName, HostPattern, Ipv4Net, Target};
use crate::Error;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;

/// Hosts and networks that are closed on every port. It wins over every rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct DenyList {
    names: Vec<HostPattern>,
    nets: Vec<Ipv4Net>,
}

// === impl DenyList ===

impl DenyList {
    /// Reads entries as people type them: hosts, `*.` patterns, networks and presets, no ports.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<Self, Error> {
        let mut list = Self::default();
        if entries.is_empty() {
            return Ok(list);
        }
        let policy = EgressPolicy::parse(entries)
            .map_err(|error| Error::invalid(format!("denied hosts: {error}")))?;
        let EgressPolicy::Only(rules) = policy else {
            return Err(Error::invalid(
                "denied hosts: name hosts and networks; `none` and `all` are words for allowed hosts",
            ));
        };
        for rule in rules {
            if rule.port.is_some() {
                return Err(Error::invalid(format!(
                    "denied host \"{rule}\" has a port: what is denied is denied on all ports, write \"{}\"",
                    rule.target
                )));
            }
            match rule.target {
                Target::Host(pattern) => list.names.push(pattern),
                Target::Net(net) => list.nets.push(net),
            }
        }
        Ok(list)
    }

    /// As people type it; empty for an empty list.
    pub fn entries(&self) -> Vec<String> {
        let names = self.names.iter().map(HostPattern::to_string);
        names
            .chain(self.nets.iter().map(Ipv4Net::to_string))
            .collect()
    }

    /// Whether it denies nothing.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.nets.is_empty()
    }

    /// The entry that denies the name.
    pub fn denies_name(&self, name: &HostName) -> Option<String> {
        let entry = self.names.iter().find(|pattern| pattern.matches(name));
        entry.map(HostPattern::to_string)
    }

    /// The entry that denies the address.
    pub fn denies_address(&self, address: Ipv4Addr) -> Option<String> {
        let entry = self.nets.iter().find(|net| net.contains(address));
        entry.map(Ipv4Net::to_string)
    }

    /// What either of the two denies.
    pub fn merged(&self, other: &Self) -> Self {
        let mut both = self.clone();
        for pattern in &other.names {
            if !both.names.contains(pattern) {
                both.names.push(pattern.clone());
            }
        }
        for net in &other.nets {
            if !both.nets.contains(net) {
                both.nets.push(*net);
            }
        }
        both
    }
}

impl TryFrom<Vec<String>> for DenyList {
    type Error = Error;
    fn try_from(entries: Vec<String>) -> Result<Self, Error> {
        Self::parse(&entries)
    }
}

impl From<DenyList> for Vec<String> {
    fn from(list: DenyList) -> Self {
        list.entries()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> DenyList {
        DenyList::parse(entries).unwrap()
    }

    #[test]
    fn names_and_networks() {
        let list = list(&["bad.example", "*.worse.example", "192.0.2.0/24"]);
        let denies = |text: &str| list.denies_name(&text.parse().unwrap());
        assert_eq!(denies("bad.example").as_deref(), Some("bad.example"));
        assert_eq!(
            denies("a.worse.example").as_deref(),
            Some("*.worse.example")
        );
        assert_eq!(denies("worse.example"), None);
        assert_eq!(denies("a.bad.example"), None);
        let address = |text: &str| list.denies_address(text.parse().unwrap());
        assert_eq!(address("192.0.2.9").as_deref(), Some("192.0.2.0/24"));
        assert_eq!(address("192.0.3.9"), None);
    }

    #[test]
    fn an_empty_list_denies_nothing() {
        let empty = DenyList::parse::<&str>(&[]).unwrap();
        assert!(empty.is_empty() && empty.entries().is_empty());
        assert_eq!(empty.denies_name(&"example.com".parse().unwrap()), None);
        assert!(!list(&["@npm"]).is_empty());
    }

    #[test]
    fn ports_and_words_are_refused() {
        for bad in ["bad.example:443", "none", "all", "", "a b"] {
            assert!(DenyList::parse(&[bad]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn merged_denies_what_either_does() {
        let one = list(&["a.example", "192.0.2.1"]);
        let both = one.merged(&list(&["b.example", "a.example", "192.0.2.2"]));
        let want = ["a.example", "b.example", "192.0.2.1", "192.0.2.2"];
        assert_eq!(both.entries(), want);
        assert_eq!(DenyList::parse(&both.entries()).unwrap(), both);
        assert_eq!(one.merged(&DenyList::default()), one);
    }
}
