//! All that one sandbox may reach.

use super::{HostName, Rule, Target, presets};
use crate::Error;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::net::Ipv4Addr;

/// Rules of one policy, presets counted by what is in them. Each connection may look at all of
/// them, and people read them; more is a network, and networks have a notation of their own.
pub const RULES_MAX: usize = 256;

/// Rules that a sentence names: more would be a list, which there is too.
const RULES_IN_WORDS_MAX: usize = 8;

/// All that one sandbox may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub enum EgressPolicy {
    /// Nothing.
    #[default]
    None,
    /// What some rule allows.
    Only(Vec<Rule>),
    /// Every public address, on every port, without a name.
    All,
}

// === impl EgressPolicy ===

impl EgressPolicy {
    /// Reads entries as people type them: rules, presets, or one word alone, `none` or `all`.
    ///
    /// Presets are replaced by what is in them, and what was said before is left out; the order
    /// stays. No entries at all is an error: whether that means `none` or a default is the
    /// caller's to say.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<Self, Error> {
        let too_many = || {
            Err(Error::invalid(format!(
                "more than {RULES_MAX} hosts: use `*.` patterns or networks"
            )))
        };
        if entries.len() > RULES_MAX {
            return too_many();
        }
        let mut rules = Vec::new();
        let mut seen = HashSet::new();
        for entry in entries {
            let entry = entry.as_ref().trim();
            match entry {
                "none" if entries.len() == 1 => return Ok(Self::None),
                "all" if entries.len() == 1 => return Ok(Self::All),
                "none" | "all" => {
                    return Err(Error::invalid(format!(
                        "{entry:?} stands alone: write it without other hosts"
                    )));
                }
                _ => {}
            }
            for rule in read_entry(entry)? {
                if seen.insert(rule.clone()) {
                    rules.push(rule);
                }
            }
            if rules.len() > RULES_MAX {
                return too_many();
            }
        }
        if rules.is_empty() {
            return Err(Error::invalid(
                "no hosts are given: name hosts, none or all",
            ));
        }
        Ok(Self::Only(rules))
    }

    /// As people type it: what `parse` reads back as the same policy.
    pub fn entries(&self) -> Vec<String> {
        match self {
            Self::Only(rules) if !rules.is_empty() => rules.iter().map(Rule::to_string).collect(),
            Self::None | Self::Only(_) => vec!["none".to_owned()],
            Self::All => vec!["all".to_owned()],
        }
    }

    /// Its rules. `All` has none: it needs none.
    pub fn rules(&self) -> &[Rule] {
        match self {
            Self::Only(rules) => rules,
            Self::None | Self::All => &[],
        }
    }

    /// What can be reached, in words.
    pub fn in_words(&self) -> String {
        let rules = match self {
            Self::None => return "nothing outside the sandbox can be reached".to_owned(),
            Self::All => return "every public address can be reached, on every port".to_owned(),
            Self::Only(rules) => rules,
        };
        let named = rules.iter().take(RULES_IN_WORDS_MAX).map(Rule::to_string);
        let named = named.collect::<Vec<_>>().join(", ");
        match rules.len().saturating_sub(RULES_IN_WORDS_MAX) {
            0 => format!("only these can be reached: {named}"),
            more => format!("only these can be reached: {named} and {more} more"),
        }
    }

    /// Whether it allows the same as `other`, in whatever order it says so.
    pub fn allows_same(&self, other: &Self) -> bool {
        let set = |policy: &Self| policy.entries().into_iter().collect::<HashSet<_>>();
        self == other || set(self) == set(other)
    }

    /// Whether the name may be resolved: some rule is about it, on whatever port.
    pub fn allows_name(&self, name: &HostName) -> bool {
        *self == Self::All || self.rules().iter().any(|rule| rule.matches_name(name))
    }

    /// The first rule that opens this port of this name. None for `All`, which has no rules.
    pub fn rule_for_name(&self, name: &HostName, port: u16) -> Option<&Rule> {
        self.name_rules_with_port(port)
            .find(|rule| rule.matches_name(name))
    }

    /// The first rule about networks that opens this port of this address.
    pub fn rule_for_address(&self, address: Ipv4Addr, port: u16) -> Option<&Rule> {
        self.rules()
            .iter()
            .find(|rule| rule.opens(port) && rule.matches_address(address))
    }

    /// Whether some rule about networks names this address, on whatever port.
    pub fn covers_address(&self, address: Ipv4Addr) -> bool {
        self.rules()
            .iter()
            .any(|rule| rule.matches_address(address))
    }

    /// The rules about names that open this port.
    pub fn name_rules_with_port(&self, port: u16) -> impl Iterator<Item = &Rule> {
        self.rules()
            .iter()
            .filter(move |rule| matches!(rule.target, Target::Host(_)) && rule.opens(port))
    }
}

impl TryFrom<Vec<String>> for EgressPolicy {
    type Error = Error;
    fn try_from(entries: Vec<String>) -> Result<Self, Error> {
        Self::parse(&entries)
    }
}

impl From<EgressPolicy> for Vec<String> {
    fn from(policy: EgressPolicy) -> Self {
        policy.entries()
    }
}

fn read_entry(entry: &str) -> Result<Vec<Rule>, Error> {
    if entry.is_empty() {
        return Err(Error::invalid(
            "one of the hosts is empty: name hosts, none or all",
        ));
    }
    if entry.starts_with('@') {
        let entries = presets::expand(entry)?;
        return entries.into_iter().map(str::parse).collect();
    }
    entry.parse().map(|rule| vec![rule])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy(entries: &[&str]) -> EgressPolicy {
        EgressPolicy::parse(entries).unwrap()
    }

    fn error(entries: &[&str]) -> String {
        EgressPolicy::parse(entries).unwrap_err().message
    }

    fn name(text: &str) -> HostName {
        text.parse().unwrap()
    }

    #[test]
    fn words_stand_alone() {
        assert_eq!(policy(&["none"]), EgressPolicy::None);
        assert_eq!(policy(&[" all "]), EgressPolicy::All);
        assert!(error(&["all", "example.com"]).contains("alone"));
        assert!(error(&["example.com", "none"]).contains("alone"));
        assert!(error(&["none", "none"]).contains("alone"));
        assert!(error(&[]).contains("none or all"));
        assert!(error(&[""]).contains("none or all"));
    }

    #[test]
    fn order_is_kept_and_repeats_are_dropped() {
        let asked = policy(&["b.example", "a.example", "B.example.", "a.example:443"]);
        assert_eq!(asked.entries(), ["b.example", "a.example", "a.example:443"]);
        let python = policy(&["@python"]).entries();
        let both = policy(&["@python", &python[0], "@default"]).entries();
        assert_eq!(both[..python.len()], python);
        assert_eq!(both.iter().filter(|entry| **entry == python[0]).count(), 1);
    }

    #[test]
    fn there_is_a_bound() {
        let many: Vec<String> = (0..=RULES_MAX).map(|n| format!("h{n}.example")).collect();
        assert!(EgressPolicy::parse(&many[1..]).is_ok());
        let message = EgressPolicy::parse(&many).unwrap_err().message;
        assert!(message.contains("256"), "{message}");
    }

    #[test]
    fn order_does_not_matter_for_what_is_allowed() {
        let one = policy(&["a.example", "b.example:22"]);
        assert!(one.allows_same(&policy(&["b.example:22", "a.example"])));
        assert!(!one.allows_same(&policy(&["b.example", "a.example"])));
        assert!(!one.allows_same(&EgressPolicy::All));
        assert!(EgressPolicy::None.allows_same(&EgressPolicy::Only(Vec::new())));
    }

    #[test]
    fn words_for_people() {
        assert!(EgressPolicy::None.in_words().contains("nothing"));
        assert!(
            EgressPolicy::All
                .in_words()
                .contains("every public address")
        );
        let many: Vec<String> = (0..10).map(|n| format!("h{n}.example")).collect();
        let words = EgressPolicy::parse(&many).unwrap().in_words();
        assert!(words.contains("h7.example and 2 more"), "{words}");
        let words = policy(&["a.example", "b.example"]).in_words();
        assert!(words.ends_with("a.example, b.example"), "{words}");
    }

    #[test]
    fn names_and_ports() {
        let policy = policy(&["example.com", "*.example.com:8443", "10.0.0.0/8:5432"]);
        let (top, sub) = (name("example.com"), name("a.example.com"));
        assert!(policy.allows_name(&top) && policy.allows_name(&sub));
        assert!(!policy.allows_name(&name("example.org")));
        let rule = |name, port| policy.rule_for_name(name, port).map(Rule::to_string);
        assert_eq!(rule(&top, 443).as_deref(), Some("example.com"));
        assert_eq!(rule(&sub, 8443).as_deref(), Some("*.example.com:8443"));
        assert_eq!(rule(&top, 8443), None);
        assert_eq!(rule(&sub, 443), None);
        assert_eq!(policy.name_rules_with_port(5432).count(), 0);
        assert_eq!(policy.name_rules_with_port(8443).count(), 1);
    }

    #[test]
    fn addresses_only_by_network() {
        let policy = policy(&["example.com", "10.0.0.0/8:5432", "1.2.3.4"]);
        let ip = |text: &str| text.parse::<Ipv4Addr>().unwrap();
        assert!(policy.rule_for_address(ip("10.9.9.9"), 5432).is_some());
        assert!(policy.rule_for_address(ip("10.9.9.9"), 443).is_none());
        assert!(policy.rule_for_address(ip("1.2.3.4"), 443).is_some());
        assert!(policy.rule_for_address(ip("1.2.3.5"), 443).is_none());
        assert!(policy.covers_address(ip("10.9.9.9")));
        assert!(!policy.covers_address(ip("11.9.9.9")));
    }

    #[test]
    fn none_and_all() {
        let (host, ip) = (name("example.com"), Ipv4Addr::new(1, 2, 3, 4));
        assert!(!EgressPolicy::None.allows_name(&host));
        assert!(EgressPolicy::All.allows_name(&host));
        assert!(EgressPolicy::All.rule_for_name(&host, 443).is_none());
        assert!(!EgressPolicy::All.covers_address(ip));
        assert_eq!(EgressPolicy::Only(Vec::new()).entries(), ["none"]);
    }

    #[test]
    fn serde_is_the_list_of_entries() {
        let policy = policy(&["example.com:22", "*.example.org"]);
        let json = serde_json::to_string(&policy).unwrap();
        assert_eq!(json, r#"["example.com:22","*.example.org"]"#);
        assert_eq!(serde_json::from_str::<EgressPolicy>(&json).unwrap(), policy);
        assert!(serde_json::from_str::<EgressPolicy>("[]").is_err());
    }

    proptest! {
        #[test]
        fn what_parses_round_trips(
            entries in prop::collection::vec("(@python|@github|none|all|[a-z*.0-9/:-]{1,16})", 0..5)
        ) {
            if let Ok(policy) = EgressPolicy::parse(&entries) {
                prop_assert_eq!(EgressPolicy::parse(&policy.entries()).unwrap(), policy);
            }
        }

        #[test]
        fn nonsense_never_panics(entries in prop::collection::vec("\\PC{0,40}", 0..5)) {
            let _ = EgressPolicy::parse(&entries);
        }
    }
}
