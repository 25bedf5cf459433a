//! Informer cache (watch cache) of one kind, filled by a watch and by the responses to our own writes.
//!
//! A response is cached at once, so the next reconcile reads its own writes and need not wait for the watch. The
//! resourceVersions of a cluster are increasing numbers; the newer version of an object wins, from either source.

use kube::api::ObjectMeta;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, RwLock};

/// Number of tombstones (UIDs of deleted objects): a late response to a write must not bring its object back.
const TOMBSTONES_MAX: usize = 20_000;

/// Namespace and name of an object: the key of caches and work queues.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Key {
    /// Namespace of the object; empty for cluster-scoped kinds.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
}

/// An object, or the part of one, that a cache keeps.
pub(crate) trait Cached: Send + Sync + 'static {
    /// Metadata of the object.
    fn meta(&self) -> &ObjectMeta;
    /// The index keys under which [`Cache::find`] returns it.
    fn index(&self) -> Vec<String>;
}

/// The cached objects of one kind, with an index.
pub(crate) struct Cache<T> {
    table: RwLock<Table<T>>,
}

struct Table<T> {
    objects: HashMap<Key, Entry<T>>,
    index: HashMap<String, HashSet<Key>>,
    /// Tombstones: UID and resourceVersion at the deletion. A newer version may reappear in a watch by label.
    deleted: HashMap<String, u64>,
    /// UIDs in `deleted`, oldest first.
    deletions: VecDeque<String>,
    /// Counts changes; a list removes only what was cached before it began.
    clock: u64,
    relist: Option<Relist>,
}

struct Entry<T> {
    object: Arc<T>,
    /// `clock` at its last change.
    touched: u64,
}

/// A list in progress.
struct Relist {
    began: u64,
    seen: HashSet<Key>,
}

/// A change of one object: as it was and as it is.
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

impl<T: Cached> Cache<T> {
    pub(crate) fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.read()
            .objects
            .get(key)
            .map(|entry| entry.object.clone())
    }

    /// All objects with an index key of [`Cached::index`], in no order.
    pub(crate) fn find(&self, index_key: &str) -> Vec<Arc<T>> {
        let table = self.read();
        let keys = table.index.get(index_key).into_iter().flatten();
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

    /// Stores an object from a watch or from the response to a write. `None`: the cache has this version or a newer
    /// one.
    pub(crate) fn put(&self, object: impl Into<Arc<T>>) -> Option<Change<T>> {
        let object = object.into();
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

    /// Removes a deleted object and leaves a tombstone.
    pub(crate) fn remove(&self, meta: &ObjectMeta) -> Option<Change<T>> {
        let mut table = self.write();
        let key = Key::of(meta);
        table.remember_deleted(meta.uid.clone().unwrap_or_default(), version(meta));
        let known = table.objects.get(&key)?;
        (known.object.meta().uid == meta.uid).then(|| table.replace(key, None))
    }

    /// Records that a list contains an object that cannot be deserialized: its cached version is kept.
    pub(crate) fn saw(&self, meta: &ObjectMeta) {
        if let Some(relist) = &mut self.write().relist {
            relist.seen.insert(Key::of(meta));
        }
    }

    /// Begins a list: objects that it does not contain will be removed.
    pub(crate) fn begin_list(&self) {
        let mut table = self.write();
        table.relist = Some(Relist {
            began: table.clock,
            seen: HashSet::new(),
        });
    }

    /// Ends a list and removes what it does not contain. Objects that were stored since it began stay: the watch
    /// reports their deletion.
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
        self.table.read().expect("no code panics under this lock")
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Table<T>> {
        self.table.write().expect("no code panics under this lock")
    }
}

// === impl Table ===

impl<T: Cached> Table<T> {
    fn replace(&mut self, key: Key, after: Option<Arc<T>>) -> Change<T> {
        self.clock += 1;
        let before = self.objects.remove(&key).map(|entry| entry.object);
        for index_key in before.iter().flat_map(|object| object.index()) {
            if let Some(keys) = self.index.get_mut(&index_key) {
                keys.remove(&key);
                if keys.is_empty() {
                    self.index.remove(&index_key);
                }
            }
        }
        if let Some(object) = &after {
            for index_key in object.index() {
                self.index.entry(index_key).or_default().insert(key.clone());
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
        if self.deletions.len() > TOMBSTONES_MAX
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

    impl Cached for Thing {
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
    fn the_newer_resource_version_wins_from_either_source() {
        let cache = Cache::default();
        assert!(cache.put(thing("a", "1", 9, "new")).is_some());
        assert!(cache.put(thing("a", "1", 5, "old")).is_none());
        assert_eq!(cache.find("new").len(), 1);
        assert!(cache.find("old").is_empty());
    }

    #[test]
    fn a_late_response_does_not_bring_a_deleted_object_back() {
        let cache = Cache::default();
        cache.put(thing("a", "1", 5, "x"));
        assert!(cache.remove(&thing("a", "1", 7, "x").0).is_some());
        assert!(cache.put(thing("a", "1", 6, "x")).is_none());
        assert!(
            cache.put(thing("b", "1", 9, "x")).is_some(),
            "a newer version reappears in a watch by label"
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
    fn a_list_removes_missing_objects_but_not_those_written_meanwhile() {
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
