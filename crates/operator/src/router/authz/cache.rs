//! TTL cache with a bounded number of entries.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Each entry has its own TTL. When full, the oldest entry is evicted.
pub(super) struct Cache<K, V> {
    entries: Mutex<Entries<K, V>>,
    count_max: usize,
}

struct Entries<K, V> {
    by_key: HashMap<K, Entry<V>>,
    /// Eviction order, oldest first. A key that was stored again is in it twice; the first of the two is skipped.
    order: VecDeque<(K, u64)>,
    /// Number of entries ever stored.
    count: u64,
}

struct Entry<V> {
    value: V,
    until: Instant,
    /// Sequence number, to recognize outdated positions in `order`.
    number: u64,
}

impl<K: Eq + Hash + Clone, V: Clone> Cache<K, V> {
    pub(super) fn new(count_max: usize) -> Self {
        let entries = Entries {
            by_key: HashMap::new(),
            order: VecDeque::new(),
            count: 0,
        };
        Self {
            entries: Mutex::new(entries),
            count_max,
        }
    }

    pub(super) fn get(&self, key: &K) -> Option<V> {
        self.get_until(key).map(|(value, _)| value)
    }

    /// The value, and when it expires.
    pub(super) fn get_until(&self, key: &K) -> Option<(V, Instant)> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.by_key.get(key)?;
        (Instant::now() < entry.until).then(|| (entry.value.clone(), entry.until))
    }

    pub(super) fn put(&self, key: K, value: V, ttl: Duration) {
        if self.count_max == 0 || ttl.is_zero() {
            return;
        }
        let until = Instant::now() + ttl;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.count += 1;
        let number = entries.count;
        let entry = Entry {
            value,
            until,
            number,
        };
        entries.by_key.insert(key.clone(), entry);
        entries.order.push_back((key, number));
        while entries.order.len() > self.count_max {
            let Some((oldest, number)) = entries.order.pop_front() else {
                break;
            };
            let entry = entries.by_key.get(&oldest);
            if entry.is_some_and(|entry| entry.number == number) {
                entries.by_key.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_bounded_and_expire() {
        let cache = Cache::new(3);
        let ttl = Duration::from_secs(30);
        for n in 0..10 {
            cache.put(n, n, ttl);
        }
        let entries = |cache: &Cache<i32, i32>| cache.entries.lock().unwrap().by_key.len();
        assert_eq!(entries(&cache), 3);
        assert_eq!((cache.get(&6), cache.get(&9)), (None, Some(9)));
        for _ in 0..10 {
            cache.put(9, 1, ttl);
        }
        assert_eq!(cache.get(&9), Some(1));
        assert!(cache.entries.lock().unwrap().order.len() <= 3);
        cache.put(9, 2, Duration::from_nanos(1));
        while cache.get(&9).is_some() {
            std::thread::yield_now();
        }
    }
}
