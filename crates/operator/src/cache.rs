//! What the API server is known to hold: one table per kind, filled by a watch and by our own writes.
//!
//! A write's answer goes into the table at once, so the next pass sees it and nobody waits for the watch to echo it.
//! Versions of one cluster are numbers that only grow; the newer one stays, whichever way it came.

use kube::api::ObjectMeta;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, RwLock};

/// How many deleted uids are remembered: a late answer to a write must not bring its object back.
const REMEMBERED_DELETIONS: usize = 20_000;

/// Namespace and name.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Key {
    /// Namespace, empty for kinds without one.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// A thing that can be held.
pub(crate) trait Held: Send + Sync + 'static {
    /// Its metadata.
    fn meta(&self) -> &ObjectMeta;
    /// The words under which it can be looked up.
    fn index(&self) -> Vec<String>;
}

/// The objects of one kind.
pub(crate) struct Cache<T> {
    table: RwLock<Table<T>>,
}

struct Table<T> {
    objects: HashMap<Key, Entry<T>>,
    index: HashMap<String, HashSet<Key>>,
    /// Uid and version at its deletion: an object may come back into a watch by label.
    deleted: HashMap<String, u64>,
    deletions: VecDeque<String>,
    /// Counts changes; a list replaces only what was here before it began.
    clock: u64,
    relist: Option<Relist>,
}

struct Entry<T> {
    object: Arc<T>,
    touched: u64,
}

struct Relist {
    began: u64,
    seen: HashSet<Key>,
}

/// An object before and after.
pub(crate) struct Change<T> {
    pub(crate) key: Key,
    pub(crate) before: Option<Arc<T>>,
    pub(crate) after: Option<Arc<T>>,
}

// === impl Key ===

impl Key {
    pub(crate) fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    pub(crate) fn of(meta: &ObjectMeta) -> Self {
        Self::new(
            meta.namespace.clone().unwrap_or_default(),
            meta.name.clone().unwrap_or_default(),
        )
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

// === impl Cache ===

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self {
            table: RwLock::new(Table {
                objects: HashMap::new(),
                index: HashMap::new(),
                deleted: HashMap::new(),
                deletions: VecDeque::new(),
                clock: 0,
                relist: None,
            }),
        }
    }
}

impl<T: Held> Cache<T> {
    pub(crate) fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.read()
            .objects
            .get(key)
            .map(|entry| entry.object.clone())
    }

    /// Everything under a word of [`Held::index`], in no order.
    pub(crate) fn find(&self, word: &str) -> Vec<Arc<T>> {
        let table = self.read();
        let keys = table.index.get(word).into_iter().flatten();
        keys.filter_map(|key| table.objects.get(key))
            .map(|entry| entry.object.clone())
            .collect()
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.read()
            .objects
            .values()
            .map(|e| e.object.clone())
            .collect()
    }

    /// Takes in an object from a watch or from the answer to a write. `None`: nothing new.
    pub(crate) fn put(&self, object: T) -> Option<Change<T>> {
        let mut table = self.write();
        let key = Key::of(object.meta());
        if let Some(relist) = &mut table.relist {
            relist.seen.insert(key.clone());
        }
        let uid = object.meta().uid.clone().unwrap_or_default();
        let gone_at = table.deleted.get(&uid);
        if gone_at.is_some_and(|at| version(object.meta()) <= *at) {
            return None;
        }
        let known = table.objects.get(&key);
        if known.is_some_and(|entry| version(entry.object.meta()) >= version(object.meta())) {
            return None;
        }
        Some(table.replace(key, Some(object)))
    }

    /// Takes out an object that was deleted.
    pub(crate) fn remove(&self, meta: &ObjectMeta) -> Option<Change<T>> {
        let mut table = self.write();
        let key = Key::of(meta);
        table.remember_deleted(meta.uid.clone().unwrap_or_default(), version(meta));
        let known = table.objects.get(&key)?;
        (known.object.meta().uid == meta.uid).then(|| table.replace(key, None))
    }

    /// An object that a list brought and nobody can read: it is there, and what is known of it stays.
    pub(crate) fn saw(&self, meta: &ObjectMeta) {
        if let Some(relist) = &mut self.write().relist {
            relist.seen.insert(Key::of(meta));
        }
    }

    /// A list begins: what it does not bring is gone.
    pub(crate) fn begin_list(&self) {
        let mut table = self.write();
        table.relist = Some(Relist {
            began: table.clock,
            seen: HashSet::new(),
        });
    }

    /// The list is complete. What was put in since it began stays: the watch will tell of its end.
    pub(crate) fn end_list(&self) -> Vec<Change<T>> {
        let mut table = self.write();
        let Some(relist) = table.relist.take() else {
            return Vec::new();
        };
        let stale = |(key, entry): (&Key, &Entry<T>)| {
            (entry.touched <= relist.began && !relist.seen.contains(key)).then(|| key.clone())
        };
        let gone: Vec<Key> = table.objects.iter().filter_map(stale).collect();
        gone.into_iter()
            .map(|key| table.replace(key, None))
            .collect()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Table<T>> {
        self.table.read().expect("no holder of the cache panics")
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Table<T>> {
        self.table.write().expect("no holder of the cache panics")
    }
}

// === impl Table ===

impl<T: Held> Table<T> {
    fn replace(&mut self, key: Key, object: Option<T>) -> Change<T> {
        self.clock += 1;
        let before = self.objects.remove(&key).map(|entry| entry.object);
        for word in before.iter().flat_map(|object| object.index()) {
            if let Some(keys) = self.index.get_mut(&word) {
                keys.remove(&key);
                if keys.is_empty() {
                    self.index.remove(&word);
                }
            }
        }
        let after = object.map(Arc::new);
        if let Some(object) = &after {
            for word in object.index() {
                self.index.entry(word).or_default().insert(key.clone());
            }
            let entry = Entry {
                object: object.clone(),
                touched: self.clock,
            };
            self.objects.insert(key.clone(), entry);
        }
        Change { key, before, after }
    }

    fn remember_deleted(&mut self, uid: String, at: u64) {
        if self.deleted.insert(uid.clone(), at).is_none() {
            self.deletions.push_back(uid);
        }
        if self.deletions.len() > REMEMBERED_DELETIONS
            && let Some(oldest) = self.deletions.pop_front()
        {
            self.deleted.remove(&oldest);
        }
    }
}

fn version(meta: &ObjectMeta) -> u64 {
    let version = meta.resource_version.as_deref();
    version.and_then(|v| v.parse().ok()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Thing(ObjectMeta);

    impl Held for Thing {
        fn meta(&self) -> &ObjectMeta {
            &self.0
        }

        fn index(&self) -> Vec<String> {
            self.0
                .labels
                .iter()
                .flatten()
                .map(|(k, _)| k.clone())
                .collect()
        }
    }

    fn thing(name: &str, uid: &str, version: u64, label: &str) -> Thing {
        Thing(ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            resource_version: Some(version.to_string()),
            labels: Some([(label.to_owned(), String::new())].into()),
            ..ObjectMeta::default()
        })
    }

    #[test]
    fn the_newer_version_stays_whichever_way_it_came() {
        let cache = Cache::default();
        assert!(cache.put(thing("a", "1", 9, "new")).is_some());
        assert!(cache.put(thing("a", "1", 5, "old")).is_none());
        assert_eq!(cache.find("new").len(), 1);
        assert!(cache.find("old").is_empty());
    }

    #[test]
    fn a_late_answer_does_not_bring_a_deleted_object_back() {
        let cache = Cache::default();
        cache.put(thing("a", "1", 5, "x"));
        assert!(cache.remove(&thing("a", "1", 7, "x").0).is_some());
        assert!(cache.put(thing("a", "1", 6, "x")).is_none());
        assert!(
            cache.put(thing("b", "1", 9, "x")).is_some(),
            "it came back into a watch by label"
        );
        cache.remove(&thing("b", "1", 10, "x").0);
        assert!(
            cache.put(thing("a", "2", 8, "x")).is_some(),
            "another object of that name"
        );
        assert!(cache.remove(&thing("a", "1", 7, "x").0).is_none());
        assert_eq!(cache.find("x").len(), 1);
    }

    #[test]
    fn a_list_removes_what_it_does_not_bring_but_not_what_was_written_meanwhile() {
        let cache = Cache::default();
        cache.put(thing("gone", "1", 1, "x"));
        cache.put(thing("here", "2", 2, "x"));
        cache.begin_list();
        cache.put(thing("here", "2", 2, "x"));
        cache.put(thing("made", "3", 9, "x"));
        let gone: Vec<_> = cache.end_list().into_iter().map(|c| c.key.name).collect();
        assert_eq!(gone, ["gone"]);
        assert_eq!(cache.find("x").len(), 2);
    }
}
