//! Deduplicating work queue with exponential back-off: a key is queued at most once, and never reconciled by two
//! workers at a time.

use crate::cache::Key;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Back-off after the first failure (doubled before it is used), and the longest.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// What a reconcile returns: when to reconcile the object again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Action {
    /// When a watch reports a change.
    AwaitChange,
    /// After this time.
    RequeueAfter(Duration),
    /// After a back-off that doubles with each failure in a row.
    BackOff,
}

#[derive(Default)]
pub(crate) struct WorkQueue {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Key>,
    /// The keys in `ready`, for deduplication.
    queued: HashSet<Key>,
    /// Keys that a worker is reconciling.
    running: HashSet<Key>,
    /// Keys that were added while they were being reconciled.
    again: HashSet<Key>,
    /// Delayed keys, by the time at which they become ready.
    later: BTreeSet<(Instant, Key)>,
    /// The same, by key.
    due: HashMap<Key, Instant>,
    /// Failures in a row, for the back-off.
    failures: HashMap<Key, u32>,
}

// === impl Action ===

impl Action {
    /// The earlier of two actions.
    pub(crate) fn sooner(self, other: Self) -> Self {
        match (self, other) {
            (Self::RequeueAfter(a), Self::RequeueAfter(b)) => Self::RequeueAfter(a.min(b)),
            (Self::AwaitChange, other) | (other, _) => other,
        }
    }
}

// === impl WorkQueue ===

impl WorkQueue {
    pub(crate) fn add(&self, key: Key) {
        let mut state = self.lock();
        state.add(key);
        drop(state);
        self.wake.notify_one();
    }

    /// Adds a key after a delay. An earlier time that is already set is kept.
    pub(crate) fn add_after(&self, key: Key, delay: Duration) {
        let mut state = self.lock();
        state.add_at(key, Instant::now() + delay);
        drop(state);
        self.wake.notify_one();
    }

    /// Waits for the next key. The worker calls [`WorkQueue::done`] with it afterwards.
    pub(crate) async fn take(&self) -> Key {
        loop {
            let wake = self.wake.notified();
            let next_due = {
                let mut state = self.lock();
                state.promote(Instant::now());
                if let Some(key) = state.take() {
                    // Wakes another worker, for the next ready key or for the timer of the delayed ones.
                    if !(state.ready.is_empty() && state.later.is_empty()) {
                        self.wake.notify_one();
                    }
                    return key;
                }
                state.later.first().map(|(at, _)| *at)
            };
            match next_due {
                Some(at) => {
                    let _woken_or_due = tokio::time::timeout_at(at, wake).await;
                }
                None => wake.await,
            }
        }
    }

    /// Ends the reconcile of a key and schedules the next one.
    pub(crate) fn done(&self, key: &Key, next: Action) {
        let mut state = self.lock();
        state.running.remove(key);
        let failures = match next {
            Action::BackOff => state.failures.get(key).copied().unwrap_or(0) + 1,
            Action::AwaitChange | Action::RequeueAfter(_) => 0,
        };
        if failures == 0 {
            state.failures.remove(key);
        } else {
            state.failures.insert(key.clone(), failures);
        }
        if state.again.remove(key) && failures == 0 {
            state.add(key.clone());
        } else if let Action::RequeueAfter(delay) = next {
            state.add_at(key.clone(), Instant::now() + delay);
        } else if failures > 0 {
            let wait = BACKOFF_MIN.saturating_mul(1 << failures.min(16));
            state.add_at(key.clone(), Instant::now() + wait.min(BACKOFF_MAX));
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Number of keys that are ready or being reconciled; delayed ones do not count.
    pub(crate) fn depth(&self) -> usize {
        let state = self.lock();
        state.ready.len() + state.running.len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no code panics under this lock")
    }
}

// === impl State ===

impl State {
    fn add(&mut self, key: Key) {
        if let Some(at) = self.due.remove(&key) {
            self.later.remove(&(at, key.clone()));
        }
        if self.running.contains(&key) {
            self.again.insert(key);
        } else if self.queued.insert(key.clone()) {
            self.ready.push_back(key);
        }
    }

    fn add_at(&mut self, key: Key, at: Instant) {
        if self.queued.contains(&key) {
            return;
        }
        match self.due.get(&key) {
            Some(earlier) if *earlier <= at => return,
            Some(later) => {
                let later = (*later, key.clone());
                self.later.remove(&later);
            }
            None => {}
        }
        self.due.insert(key.clone(), at);
        self.later.insert((at, key));
    }

    fn promote(&mut self, now: Instant) {
        while let Some((at, key)) = self.later.first().cloned() {
            if at > now {
                break;
            }
            self.later.pop_first();
            self.due.remove(&key);
            self.add(key);
        }
    }

    fn take(&mut self) -> Option<Key> {
        let key = self.ready.pop_front()?;
        self.queued.remove(&key);
        self.running.insert(key.clone());
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("ns", name)
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_has_one_worker_and_is_requeued_when_added_meanwhile() {
        let queue = WorkQueue::default();
        queue.add(key("a"));
        queue.add(key("a"));
        assert_eq!(queue.take().await, key("a"));
        queue.add(key("a"));
        let second = tokio::time::timeout(Duration::from_secs(1), queue.take()).await;
        assert!(second.is_err(), "the first reconcile is not done");
        queue.done(&key("a"), Action::AwaitChange);
        assert_eq!(queue.take().await, key("a"));
        queue.done(&key("a"), Action::AwaitChange);
        assert_eq!(queue.depth(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_back_off_exponentially_and_a_success_resets_the_back_off() {
        let queue = WorkQueue::default();
        queue.add(key("a"));
        let mut waits = Vec::new();
        for _ in 0..20 {
            let before = Instant::now();
            queue.take().await;
            waits.push(before.elapsed());
            queue.done(&key("a"), Action::BackOff);
        }
        assert!(waits.windows(2).all(|w| w[0] <= w[1]));
        assert_eq!(waits.last(), Some(&BACKOFF_MAX));
        queue.take().await;
        queue.done(&key("a"), Action::AwaitChange);
        queue.add(key("a"));
        queue.take().await;
        let before = Instant::now();
        queue.done(&key("a"), Action::BackOff);
        queue.take().await;
        assert!(before.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_earlier_of_two_delays_is_kept() {
        let queue = WorkQueue::default();
        queue.add_after(key("a"), Duration::from_secs(5));
        queue.add_after(key("a"), Duration::from_secs(50));
        let before = Instant::now();
        queue.take().await;
        assert_eq!(before.elapsed().as_secs(), 5);
        queue.done(&key("a"), Action::AwaitChange);
        let more = tokio::time::timeout(Duration::from_secs(100), queue.take()).await;
        assert!(more.is_err());
    }
}
