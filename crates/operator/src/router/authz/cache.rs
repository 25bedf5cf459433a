//! What was asked lately, with its answer: so many at most, and none for long.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Forgets the oldest when it is full.
pub(super) struct Cache<K, V> {
    entries: Mutex<Entries<K, V>>,
    count_max: usize,
}

struct Entries<K, V> {
    known: HashMap<K, Known<V>>,
    /// Oldest first. A key that was asked again is here twice; the first of them is passed over.
    order: VecDeque<(K, u64)>,
    /// How many there ever were.
    count: u64,
}

struct Known<V> {
    value: V,
    until: Instant,
    /// Which of all it is.
    number: u64,
}

impl<K: Eq + Hash + Clone, V: Clone> Cache<K, V> {
    pub(super) fn new(count_max: usize) -> Self {
        let entries = Entries {
            known: HashMap::new(),
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

    /// With when it will be forgotten.
    pub(super) fn get_until(&self, key: &K) -> Option<(V, Instant)> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let known = entries.known.get(key)?;
        (Instant::now() < known.until).then(|| (known.value.clone(), known.until))
    }

    pub(super) fn put(&self, key: K, value: V, ttl: Duration) {
        if self.count_max == 0 || ttl.is_zero() {
            return;
        }
        let until = Instant::now() + ttl;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.count += 1;
        let number = entries.count;
        let known = Known {
            value,
            until,
            number,
        };
        entries.known.insert(key.clone(), known);
        entries.order.push_back((key, number));
        while entries.order.len() > self.count_max {
            let Some((oldest, number)) = entries.order.pop_front() else {
                break;
            };
            let known = entries.known.get(&oldest);
            if known.is_some_and(|known| known.number == number) {
                entries.known.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_and_forgets() {
        let cache = Cache::new(3);
        let ttl = Duration::from_secs(30);
        for n in 0..10 {
            cache.put(n, n, ttl);
        }
        let entries = |cache: &Cache<i32, i32>| cache.entries.lock().unwrap().known.len();
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
