//! Keys that wait for a pass: each at most once, never two passes over one key at a time.

use crate::cache::Key;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// First wait after a failure, and the longest.
const FIRST_RETRY: Duration = Duration::from_millis(10);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// What a pass wants next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Next {
    /// Nothing until something changes.
    Wait,
    /// Another pass after this time.
    After(Duration),
    /// Another pass, later each time.
    Retry,
}

#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Key>,
    /// Keys in `ready`.
    queued: HashSet<Key>,
    running: HashSet<Key>,
    /// Keys that changed while a pass over them ran.
    again: HashSet<Key>,
    later: BTreeSet<(Instant, Key)>,
    due: HashMap<Key, Instant>,
    failures: HashMap<Key, u32>,
}

// === impl Next ===

impl Next {
    /// The earlier of two wishes.
    pub(crate) fn sooner(self, other: Self) -> Self {
        match (self, other) {
            (Self::After(a), Self::After(b)) => Self::After(a.min(b)),
            (Self::Wait, other) | (other, _) => other,
        }
    }
}

// === impl Queue ===

impl Queue {
    pub(crate) fn add(&self, key: Key) {
        let mut state = self.lock();
        state.add(key);
        drop(state);
        self.wake.notify_one();
    }

    /// Adds a key for later; an earlier appointment stands.
    pub(crate) fn add_after(&self, key: Key, delay: Duration) {
        let mut state = self.lock();
        state.add_at(key, Instant::now() + delay);
        drop(state);
        self.wake.notify_one();
    }

    /// The next key; the caller says [`Queue::done`] with it.
    pub(crate) async fn take(&self) -> Key {
        loop {
            let wake = self.wake.notified();
            let next_due = {
                let mut state = self.lock();
                state.promote(Instant::now());
                if let Some(key) = state.take() {
                    // Somebody else takes the next one, or watches the clock for those that are due later.
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

    /// Ends a pass.
    pub(crate) fn done(&self, key: &Key, next: Next) {
        let mut state = self.lock();
        state.running.remove(key);
        let failures = match next {
            Next::Retry => state.failures.get(key).copied().unwrap_or(0) + 1,
            Next::Wait | Next::After(_) => 0,
        };
        if failures == 0 {
            state.failures.remove(key);
        } else {
            state.failures.insert(key.clone(), failures);
        }
        if state.again.remove(key) && failures == 0 {
            state.add(key.clone());
        } else if let Next::After(delay) = next {
            state.add_at(key.clone(), Instant::now() + delay);
        } else if failures > 0 {
            let wait = FIRST_RETRY.saturating_mul(1 << failures.min(16));
            state.add_at(key.clone(), Instant::now() + wait.min(LONGEST_RETRY));
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Keys that wait or run.
    pub(crate) fn depth(&self) -> usize {
        let state = self.lock();
        state.ready.len() + state.running.len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder of the queue panics")
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
    async fn a_key_runs_once_at_a_time_and_again_when_it_changed_meanwhile() {
        let queue = Queue::default();
        queue.add(key("a"));
        queue.add(key("a"));
        assert_eq!(queue.take().await, key("a"));
        queue.add(key("a"));
        let second = tokio::time::timeout(Duration::from_secs(1), queue.take()).await;
        assert!(second.is_err(), "the first pass is not over");
        queue.done(&key("a"), Next::Wait);
        assert_eq!(queue.take().await, key("a"));
        queue.done(&key("a"), Next::Wait);
        assert_eq!(queue.depth(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_wait_longer_each_time_and_a_success_forgets_them() {
        let queue = Queue::default();
        queue.add(key("a"));
        let mut waits = Vec::new();
        for _ in 0..20 {
            let before = Instant::now();
            queue.take().await;
            waits.push(before.elapsed());
            queue.done(&key("a"), Next::Retry);
        }
        assert!(waits.windows(2).all(|w| w[0] <= w[1]));
        assert_eq!(waits.last(), Some(&LONGEST_RETRY));
        queue.take().await;
        queue.done(&key("a"), Next::Wait);
        queue.add(key("a"));
        queue.take().await;
        let before = Instant::now();
        queue.done(&key("a"), Next::Retry);
        queue.take().await;
        assert!(before.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_earlier_appointment_stands() {
        let queue = Queue::default();
        queue.add_after(key("a"), Duration::from_secs(5));
        queue.add_after(key("a"), Duration::from_secs(50));
        let before = Instant::now();
        queue.take().await;
        assert_eq!(before.elapsed().as_secs(), 5);
        queue.done(&key("a"), Next::Wait);
        let more = tokio::time::timeout(Duration::from_secs(100), queue.take()).await;
        assert!(more.is_err());
    }
}
