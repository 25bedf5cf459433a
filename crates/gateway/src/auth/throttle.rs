//! Brute-force throttling: wrong API keys, counted for each source address.
//!
//! A source that sent too many is throttled: only keys that were right from there before are accepted, and any other is
//! refused without saying whether it is right. So guessing gets nowhere, and clients that share an address with the
//! attacker (loopback, an office) go on working.

use crate::source::Source;
use k8e_model::KeyId;
use k8e_net::token_bucket::{Rate, TokenBucket};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Wrong keys of one source: typing errors and a client with an old key stay below it, guessing does not.
const WRONG: Rate = Rate {
    per_second: 1,
    burst: 10,
};

/// Sources that are counted. Beyond that new ones share one bucket: an attacker with more addresses than this throttles
/// only clients whose key was never right from their address.
const SOURCES_MAX: usize = 4096;

/// Sources kept for one key, the latest. More than a roaming laptop needs.
const KNOWN_PLACES_MAX: usize = 8;

/// Keys whose sources are kept: more than a server has.
const KNOWN_KEYS_MAX: usize = 16_384;

/// The sources of wrong keys, and of right ones.
pub(crate) struct Throttle {
    table: Mutex<Table>,
}

struct Table {
    wrong: HashMap<Source, Guesses>,
    others: Guesses,
    known: HashMap<KeyId, VecDeque<Source>>,
}

/// The wrong keys of one source.
struct Guesses {
    bucket: TokenBucket,
    /// Whether the throttling was logged; reset when the bucket is full again.
    logged: bool,
}

/// The answer to a call with a wrong key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// The key is wrong.
    Invalid,
    /// Throttled from now on; to be logged.
    TooMany,
    /// Throttled before.
    StillTooMany,
}

// === impl Throttle ===

impl Throttle {
    pub(crate) fn new() -> Self {
        Self {
            table: Mutex::new(Table {
                wrong: HashMap::new(),
                others: Guesses::none(Instant::now()),
                known: HashMap::new(),
            }),
        }
    }

    /// Whether a right key is accepted from this address now.
    pub(crate) fn right(&self, from: IpAddr, key: &KeyId) -> bool {
        self.right_at(Source::of(from), key, Instant::now())
    }

    /// Counts a wrong key.
    pub(crate) fn wrong(&self, from: IpAddr) -> Wrong {
        self.wrong_at(Source::of(from), Instant::now())
    }

    fn right_at(&self, from: Source, key: &KeyId, now: Instant) -> bool {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let known = table.known.get(key);
        if known.is_some_and(|places| places.contains(&from)) {
            return true;
        }
        if table.guesses(from).bucket.is_empty(WRONG, now) {
            return false;
        }
        if table.known.len() >= KNOWN_KEYS_MAX && !table.known.contains_key(key) {
            table.known.clear();
        }
        let places = table.known.entry(key.clone()).or_default();
        if places.len() >= KNOWN_PLACES_MAX {
            places.pop_front();
        }
        places.push_back(from);
        true
    }

    fn wrong_at(&self, from: Source, now: Instant) -> Wrong {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let guesses = table.guesses_mut(from, now);
        guesses.logged &= !guesses.bucket.is_full(now);
        if guesses.bucket.take(WRONG, now) {
            return Wrong::Invalid;
        }
        if std::mem::replace(&mut guesses.logged, true) {
            Wrong::StillTooMany
        } else {
            Wrong::TooMany
        }
    }
}

// === impl Table ===

impl Table {
    fn guesses(&self, from: Source) -> &Guesses {
        // Sources without a bucket of their own share one.
        self.wrong.get(&from).unwrap_or(&self.others)
    }

    fn guesses_mut(&mut self, from: Source, now: Instant) -> &mut Guesses {
        if !self.wrong.contains_key(&from) && self.wrong.len() >= SOURCES_MAX {
            self.wrong.retain(|_, guesses| !guesses.bucket.is_full(now));
            if self.wrong.len() >= SOURCES_MAX {
                return &mut self.others;
            }
        }
        self.wrong.entry(from).or_insert_with(|| Guesses::none(now))
    }
}

// === impl Guesses ===

impl Guesses {
    fn none(now: Instant) -> Self {
        Self {
            bucket: TokenBucket::full(now),
            logged: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn from(text: &str) -> Source {
        Source::of(text.parse().unwrap())
    }

    #[test]
    fn guessing_is_slowed_down_to_nothing_and_others_are_not() {
        let throttle = Throttle::new();
        let (now, known, new) = (Instant::now(), KeyId::random(), KeyId::random());
        let (office, home) = (from("192.0.2.1"), from("198.51.100.1"));
        assert!(throttle.right_at(office, &known, now));
        let second: Vec<_> = (0..1000).map(|_| throttle.wrong_at(office, now)).collect();
        let count = |what| second.iter().filter(|wrong| **wrong == what).count();
        assert_eq!((count(Wrong::Invalid), count(Wrong::TooMany)), (10, 1));
        assert!(throttle.right_at(office, &known, now), "it was right there");
        assert!(
            !throttle.right_at(office, &new, now),
            "that might be the guess"
        );
        assert!(throttle.right_at(home, &new, now), "another place");
        let later = now + Duration::from_secs(20);
        assert!(throttle.right_at(office, &new, later));
        assert_eq!(throttle.wrong_at(office, later), Wrong::Invalid);
    }

    #[test]
    fn the_tables_are_bounded() {
        let throttle = Throttle::new();
        let now = Instant::now();
        let key = KeyId::random();
        assert!(throttle.right_at(from("192.0.2.1"), &key, now));
        let many = u32::try_from(2 * SOURCES_MAX).unwrap();
        for n in 0..many {
            throttle.wrong_at(Source::of(IpAddr::V4(n.into())), now);
        }
        let table = throttle.table.lock().unwrap();
        assert_eq!(table.wrong.len(), SOURCES_MAX);
        drop(table);
        assert!(throttle.right_at(from("192.0.2.1"), &key, now));
        for n in 0..100 {
            throttle.right_at(
                Source::of(IpAddr::V4(n.into())),
                &key,
                now + Duration::from_secs(60),
            );
        }
        assert_eq!(
            throttle.table.lock().unwrap().known[&key].len(),
            KNOWN_PLACES_MAX
        );
    }
}
