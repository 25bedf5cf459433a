//! Which names there are, and what a resolver says of them: a table that a test changes at will.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};

/// Long enough for a test to be over.
const TTL_SECONDS: u32 = 300;

/// A chain that is longer goes in a circle.
const CHAIN_MAX: usize = 16;

/// What one name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// An address.
    Address(IpAddr),
    /// Another name.
    Alias(String),
    /// A record of another name, that nobody asked for.
    Stray(String, IpAddr),
    /// The resolver does not answer at all.
    Silence,
    /// The resolver fails.
    Failure,
}

/// A record of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) owner: String,
    pub(super) ttl: u32,
    pub(super) data: Data,
}

/// The table, shared by every resolver.
#[derive(Clone, Debug, Default)]
pub struct Zone(Arc<Mutex<HashMap<String, Entry>>>);

#[derive(Debug, Default)]
struct Entry {
    ttl: u32,
    /// The last one stays.
    turns: Vec<Vec<Data>>,
    asked: usize,
}

/// A's in DNS.
pub(super) const A: u16 = 1;
/// AAAA's in DNS.
pub(super) const AAAA: u16 = 28;

// === impl Zone ===

impl Zone {
    /// A name with these addresses. `*.x` is every name below x, `*` every name.
    pub fn address(&self, name: &str, addresses: &[Ipv4Addr]) {
        let data = addresses.iter().copied().map(Data::from).collect();
        self.turns(name, TTL_SECONDS, vec![data]);
    }

    /// A name that is another.
    pub fn alias(&self, name: &str, target: &str) {
        let data = vec![Data::Alias(target.to_owned())];
        self.turns(name, TTL_SECONDS, vec![data]);
    }

    /// A name that is something else each time that it is asked for; the last stays.
    pub fn turns(&self, name: &str, ttl: u32, turns: Vec<Vec<Data>>) {
        let entry = Entry {
            ttl,
            turns,
            asked: 0,
        };
        self.0.lock().unwrap().insert(name.to_owned(), entry);
    }

    /// What there is to say; nothing for a name that does not exist.
    pub(super) fn look_up(&self, name: &str, kind: u16) -> Option<Vec<Record>> {
        let mut owner = name.to_ascii_lowercase();
        let mut records = Vec::new();
        for _ in 0..CHAIN_MAX {
            let found = self.entry(&owner, kind)?;
            let alias = found.iter().find_map(|record| match &record.data {
                Data::Alias(target) => Some(target.clone()),
                Data::Address(_) | Data::Stray(..) | Data::Silence | Data::Failure => None,
            });
            records.extend(found);
            let Some(target) = alias else {
                return Some(records);
            };
            owner = target;
        }
        Some(records)
    }

    fn entry(&self, name: &str, kind: u16) -> Option<Vec<Record>> {
        let mut entries = self.0.lock().unwrap();
        let key = pattern(&entries, name)?;
        let entry = entries.get_mut(&key)?;
        let turn = entry.asked.min(entry.turns.len() - 1);
        if kind == A {
            entry.asked += 1;
        }
        let record = |data: &Data| Record {
            owner: name.to_owned(),
            ttl: entry.ttl,
            data: data.clone(),
        };
        let wanted = |data: &&Data| match data {
            Data::Address(IpAddr::V4(_)) => kind == A,
            Data::Address(IpAddr::V6(_)) => kind == AAAA,
            Data::Alias(_) | Data::Stray(..) | Data::Silence | Data::Failure => true,
        };
        Some(
            entry.turns[turn]
                .iter()
                .filter(wanted)
                .map(record)
                .collect(),
        )
    }
}

/// The most exact entry.
fn pattern(entries: &HashMap<String, Entry>, name: &str) -> Option<String> {
    let parents = name
        .match_indices('.')
        .map(|(dot, _)| format!("*{}", &name[dot..]));
    std::iter::once(name.to_owned())
        .chain(parents)
        .chain(["*".to_owned()])
        .find(|key| entries.contains_key(key))
}

// === impl Data ===

impl From<Ipv4Addr> for Data {
    fn from(address: Ipv4Addr) -> Self {
        Self::Address(address.into())
    }
}
