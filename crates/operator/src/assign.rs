//! Which warm sandbox a claim gets: an index in memory, rebuilt from the watches, that never gives one out twice.
//!
//! The index only proposes. What decides is the API server: the write that changes the owner of a sandbox names the
//! version that was looked at, so of two writers one loses and looks again.

use crate::cache::Key;
use crate::crd::conditions::{FINISHED, POD_SCHEDULED, READY, is_true};
use crate::crd::names::{TEMPLATE_HASH, TEMPLATE_REF_HASH, WARM_POOL};
use crate::crd::{OperatingMode, Sandbox};
use crate::held::{controller_of, label};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};

/// A sandbox that waits in a pool.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// Its namespace and name.
    pub key: Key,
    /// Uid of the pool that owns it.
    pub pool: String,
    /// Seconds since the epoch.
    pub created: i64,
    /// Its pod runs and has an address.
    pub ready: bool,
    /// The node of its pod.
    pub node: Option<String>,
    /// Hash of what it was made from.
    pub template_hash: Option<String>,
}

/// The candidates of one pool.
#[derive(Debug, Default)]
pub struct Candidates {
    waiting: BTreeMap<Key, Candidate>,
    /// Candidates whose adoption is being written.
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
    /// The pool in which a candidate stands.
    home: HashMap<Key, String>,
}

// === impl Candidate ===

impl Candidate {
    /// A sandbox as a candidate, if it is one.
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
    /// A candidate appeared or changed.
    pub fn offer(&mut self, candidate: Candidate) {
        self.waiting.insert(candidate.key.clone(), candidate);
    }

    /// A candidate left the pool: claimed, deleted, or no longer usable.
    pub fn withdraw(&mut self, key: &Key) {
        self.waiting.remove(key);
        self.taken.remove(key);
    }

    /// Takes the best candidate: a ready one before one that starts, from the node with most of them, the oldest.
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

    /// The adoption was not written: the candidate is free again, if it is still one.
    pub fn give_back(&mut self, key: &Key) {
        self.taken.remove(key);
    }

    /// Candidates that nobody has taken.
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
    /// Keeps the index true. The table is read under the lock: of two changes that come in the wrong order, the last
    /// one to come sees what is there, not what was.
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
        self.state.lock().expect("no holder of the index panics")
    }
}

#[cfg(test)]
mod tests;
