//! Single flight: concurrent lookups of the same name share one upstream query; its result is cached.

use super::cache::Cache;
use k8e_model::egress::HostName;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// The cache, and the lookups in flight.
pub(super) struct SingleFlight<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    cache: Cache<T>,
    /// Bounded by the lookup semaphore of the resolver.
    flying: HashMap<HostName, Flight<T>>,
}

/// How a name is to be resolved.
pub(super) enum Begin<T> {
    /// It is in the cache.
    Known(T),
    /// Another task is looking it up: wait for that.
    Wait(Flight<T>),
    /// The caller has to look it up, for all that wait.
    Mine(Lookup<T>, Flight<T>),
}

/// The waiting side of a lookup in flight.
pub(super) struct Flight<T>(watch::Receiver<Option<T>>);

/// The running side of a lookup in flight. Dropping it without [`Lookup::end`] wakes the waiters with
/// none.
pub(super) struct Lookup<T> {
    single_flight: Arc<SingleFlight<T>>,
    name: HostName,
    waiting: watch::Sender<Option<T>>,
}

// === impl SingleFlight ===

impl<T> Default for SingleFlight<T> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                cache: Cache::default(),
                flying: HashMap::new(),
            }),
        }
    }
}

impl<T: Clone> SingleFlight<T> {
    /// The cached value and its expiry.
    pub(super) fn known(&self, name: &HostName, now: Instant) -> Option<(T, Instant)> {
        self.state().cache.get(name, now)
    }

    /// The lookup of this name that is in flight.
    pub(super) fn flying(&self, name: &HostName) -> Option<Flight<T>> {
        self.state().flying.get(name).cloned()
    }

    pub(super) fn begin(self: &Arc<Self>, name: &HostName) -> Begin<T> {
        let mut state = self.state();
        if let Some((known, _)) = state.cache.get(name, Instant::now()) {
            return Begin::Known(known);
        }
        if let Some(flight) = state.flying.get(name) {
            return Begin::Wait(flight.clone());
        }
        let (waiting, flight) = watch::channel(None);
        let flight = Flight(flight);
        state.flying.insert(name.clone(), flight.clone());
        let lookup = Lookup {
            single_flight: Arc::clone(self),
            name: name.clone(),
            waiting,
        };
        Begin::Mine(lookup, flight)
    }
}

impl<T> SingleFlight<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        // A panic while it was locked leaves valid maps.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Flight ===

impl<T> Clone for Flight<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone> Flight<T> {
    /// Waits for the result; none when the lookup was dropped.
    pub(super) async fn wait(mut self) -> Option<T> {
        self.0.wait_for(Option::is_some).await.ok()?.clone()
    }
}

// === impl Lookup ===

impl<T: Clone> Lookup<T> {
    pub(super) fn name(&self) -> &HostName {
        &self.name
    }

    /// Caches the result for `ttl` and wakes all waiters with it.
    pub(super) fn end(self, found: T, ttl: Duration) {
        let now = Instant::now();
        let mut state = self.single_flight.state();
        state
            .cache
            .put(self.name.clone(), found.clone(), now + ttl, now);
        drop(state);
        self.waiting.send_replace(Some(found));
    }
}

impl<T> Drop for Lookup<T> {
    fn drop(&mut self) {
        self.single_flight.state().flying.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> HostName {
        HostName::parse("example.com").unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn one_lookup_serves_all_waiters() {
        let single_flight = Arc::new(SingleFlight::default());
        let Begin::Mine(lookup, mine) = single_flight.begin(&name()) else {
            panic!("no lookup is in flight yet");
        };
        let Begin::Wait(other) = single_flight.begin(&name()) else {
            panic!("a lookup is in flight");
        };
        assert!(single_flight.flying(&name()).is_some());
        lookup.end(7, Duration::from_secs(5));
        assert_eq!((mine.wait().await, other.wait().await), (Some(7), Some(7)));
        assert!(matches!(single_flight.begin(&name()), Begin::Known(7)));
        assert!(single_flight.flying(&name()).is_none());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(single_flight.known(&name(), Instant::now()).is_none());
        assert!(matches!(single_flight.begin(&name()), Begin::Mine(..)));
    }

    #[tokio::test]
    async fn a_dropped_lookup_wakes_its_waiters() {
        let single_flight = Arc::new(SingleFlight::<u8>::default());
        let Begin::Mine(lookup, flight) = single_flight.begin(&name()) else {
            panic!("no lookup is in flight yet");
        };
        drop(lookup);
        assert_eq!(flight.wait().await, None);
        assert!(matches!(single_flight.begin(&name()), Begin::Mine(..)));
    }
}
