//! DNS cache of the resolver: a bounded map with expiry.

use k8e_model::egress::HostName;
use std::collections::{BTreeSet, HashMap};
use tokio::time::Instant;

/// Cached names, for all sandboxes together. Memory per name is bounded too (addresses, aliases): some
/// 10 MB at most, typically below one.
const NAMES_MAX: usize = 4096;

/// A bounded map of names. When it is full, the entry that expires first is evicted.
pub(super) struct Cache<T> {
    entries: HashMap<HostName, (T, Instant)>,
    ends: BTreeSet<(Instant, HostName)>,
    names_max: usize,
}

// === impl Cache ===

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self::with_room(NAMES_MAX)
    }
}

impl<T: Clone> Cache<T> {
    /// The value and its expiry, unless it has expired at `now`.
    pub(super) fn get(&self, name: &HostName, now: Instant) -> Option<(T, Instant)> {
        let (value, end) = self.entries.get(name)?;
        (now < *end).then(|| (value.clone(), *end))
    }

    /// Adds or replaces an entry that expires at `end`.
    pub(super) fn put(&mut self, name: HostName, value: T, end: Instant, now: Instant) {
        self.remove(&name);
        while let Some((first, _)) = self.ends.first() {
            if *first > now && self.entries.len() < self.names_max {
                break;
            }
            if let Some((_, gone)) = self.ends.pop_first() {
                self.entries.remove(&gone);
            }
        }
        self.ends.insert((end, name.clone()));
        self.entries.insert(name, (value, end));
    }

    fn remove(&mut self, name: &HostName) {
        if let Some((_, end)) = self.entries.remove(name) {
            self.ends.remove(&(end, name.clone()));
        }
    }
}

impl<T> Cache<T> {
    fn with_room(names_max: usize) -> Self {
        Self {
            entries: HashMap::new(),
            ends: BTreeSet::new(),
            names_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn host(number: usize) -> HostName {
        HostName::parse(&format!("h{number}.example")).unwrap()
    }

    #[test]
    fn an_expired_entry_is_gone() {
        let mut cache = Cache::default();
        let now = Instant::now();
        let second = Duration::from_secs(1);
        cache.put(host(1), 'a', now + second, now);
        assert_eq!(cache.get(&host(1), now), Some(('a', now + second)));
        assert_eq!(cache.get(&host(1), now + second), None);
        assert_eq!(cache.get(&host(2), now), None);
        cache.put(host(2), 'b', now + 9 * second, now + 2 * second);
        assert_eq!((cache.entries.len(), cache.ends.len()), (1, 1));
    }

    #[test]
    fn the_same_name_again_is_one_entry() {
        let mut cache = Cache::default();
        let now = Instant::now();
        for seconds in 1..100 {
            cache.put(host(1), seconds, now + Duration::from_secs(seconds), now);
        }
        assert_eq!((cache.entries.len(), cache.ends.len()), (1, 1));
        assert_eq!(cache.get(&host(1), now).unwrap().0, 99);
    }

    #[test]
    fn a_full_cache_evicts_what_expires_first() {
        let mut cache = Cache::with_room(10);
        let now = Instant::now();
        for number in 0..1000 {
            let end = now + Duration::from_secs(1000 + number as u64);
            cache.put(host(number), number, end, now);
        }
        assert_eq!((cache.entries.len(), cache.ends.len()), (10, 10));
        assert_eq!(cache.get(&host(0), now), None);
        assert_eq!(cache.get(&host(999), now).unwrap().0, 999);
    }
}
