//! Assignment of warm sandboxes to claims: an in-memory index of candidates per pool, built from the informer cache. It
//! never offers a candidate to two claims at a time.
//!
//! The index only proposes. The API server decides (optimistic concurrency): the write that changes the owner of a
//! sandbox has its resourceVersion as precondition, so of two writers one gets a conflict and tries again.

use crate::cache::Key;
use crate::crd::conditions::{FINISHED, POD_SCHEDULED, READY, is_true};
use crate::crd::names::{TEMPLATE_HASH, TEMPLATE_REF_HASH, WARM_POOL};
use crate::crd::{OperatingMode, Sandbox};
use crate::object_meta::{controller_of, label};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};

/// An unclaimed sandbox of a pool.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// Namespace and name of the sandbox.
    pub key: Key,
    /// UID of the pool that owns it.
    pub pool: String,
    /// Creation time, in Unix seconds.
    pub created: i64,
    /// Its condition `Ready` is true and its pod has an address.
    pub ready: bool,
    /// Node of its pod, once scheduled.
    pub node: Option<String>,
    /// Hash of the template that it was created from.
    pub template_hash: Option<String>,
}

/// The candidates of one pool.
#[derive(Debug, Default)]
pub struct Candidates {
    waiting: BTreeMap<Key, Candidate>,
    /// Candidates that a claim is being bound to.
    taken: HashSet<Key>,
}

/// The candidates of all pools.
#[derive(Default)]
pub(crate) struct Assigner {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pools: HashMap<String, Candidates>,
    /// Pool of each candidate.
    home: HashMap<Key, String>,
}

// === impl Candidate ===

impl Candidate {
    /// The candidate for a sandbox. `None`: not pooled, unschedulable, suspended, finished or being deleted.
    pub(crate) fn of(sandbox: &Sandbox) -> Option<Self> {
        let meta = &sandbox.metadata;
        let owner = controller_of(meta).filter(|owner| owner.kind == "SandboxWarmPool")?;
        label(meta, WARM_POOL)?;
        label(meta, TEMPLATE_REF_HASH)?;
        let unschedulable = sandbox
            .condition(POD_SCHEDULED)
            .is_some_and(|c| c.status == "False");
        let unusable = meta.deletion_timestamp.is_some()
            || sandbox.condition(FINISHED).is_some()
            || sandbox.operating_mode() == OperatingMode::Suspended;
        if unusable || unschedulable {
            return None;
        }
        let status = sandbox.status.as_ref();
        let has_address = status
            .and_then(|s| s.pod_ips.as_ref())
            .is_some_and(|ips| !ips.is_empty());
        Some(Self {
            key: Key::of(meta),
            pool: owner.uid.clone(),
            created: meta
                .creation_timestamp
                .as_ref()
                .map_or(0, |t| t.0.as_second()),
            ready: has_address && is_true(sandbox.condition(READY)),
            node: status.and_then(|s| s.node_name.clone()),
            template_hash: label(meta, TEMPLATE_HASH).map(str::to_owned),
        })
    }
}

// === impl Candidates ===

impl Candidates {
    /// Adds or updates a candidate.
    pub fn offer(&mut self, candidate: Candidate) {
        self.waiting.insert(candidate.key.clone(), candidate);
    }

    /// Removes a candidate: it was claimed or deleted, or is no longer usable.
    pub fn withdraw(&mut self, key: &Key) {
        self.waiting.remove(key);
        self.taken.remove(key);
    }

    /// Takes the best candidate: ready before starting, then on the node with most candidates, then the oldest.
    pub fn take(&mut self, usable: impl Fn(&Candidate) -> bool) -> Option<Candidate> {
        let free = || {
            self.waiting
                .values()
                .filter(|c| !self.taken.contains(&c.key))
        };
        let mut on_node: HashMap<Option<&str>, usize> = HashMap::new();
        for candidate in free() {
            *on_node.entry(candidate.node.as_deref()).or_default() += 1;
        }
        let best = free()
            .filter(|candidate| usable(candidate))
            .min_by_key(|c| {
                let crowd = on_node.get(&c.node.as_deref()).copied().unwrap_or(0);
                (!c.ready, usize::MAX - crowd, c.created, c.key.clone())
            })?
            .clone();
        self.taken.insert(best.key.clone());
        Some(best)
    }

    /// Releases a candidate that was taken: it can be offered again, if it is still a candidate.
    pub fn give_back(&mut self, key: &Key) {
        self.taken.remove(key);
    }

    /// Number of candidates that are not taken.
    pub fn free(&self) -> usize {
        self.waiting.len()
            - self
                .taken
                .iter()
                .filter(|key| self.waiting.contains_key(key))
                .count()
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.taken.is_empty()
    }
}

// === impl Assigner ===

impl Assigner {
    /// Updates the index for one sandbox. The cache is read under the lock: if two changes arrive in the wrong order,
    /// the later call still sees the newest version.
    pub(crate) fn refresh(&self, key: &Key, current: impl FnOnce() -> Option<Arc<Sandbox>>) {
        let mut state = self.lock();
        let candidate = current().as_deref().and_then(Candidate::of);
        let home = state.home.get(key).cloned();
        let stays = home.as_ref() == candidate.as_ref().map(|c| &c.pool);
        if let Some(pool) = home.filter(|_| !stays) {
            state.home.remove(key);
            if let Some(candidates) = state.pools.get_mut(&pool) {
                candidates.withdraw(key);
                if candidates.is_empty() {
                    state.pools.remove(&pool);
                }
            }
        }
        if let Some(candidate) = candidate {
            state.home.insert(key.clone(), candidate.pool.clone());
            let pool = state.pools.entry(candidate.pool.clone()).or_default();
            pool.offer(candidate);
        }
    }

    pub(crate) fn take(
        &self,
        pool: &str,
        usable: impl Fn(&Candidate) -> bool,
    ) -> Option<Candidate> {
        self.lock().pools.get_mut(pool)?.take(usable)
    }

    pub(crate) fn give_back(&self, candidate: &Candidate) {
        if let Some(candidates) = self.lock().pools.get_mut(&candidate.pool) {
            candidates.give_back(&candidate.key);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no code panics under this lock")
    }
}

#[cfg(test)]
mod tests;
