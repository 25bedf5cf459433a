//! Each name is looked up once at a time, however many wait for it, and then remembered.

use super::cache::Cache;
use k8e_model::egress::HostName;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// What is known of names, and what is being found out.
pub(super) struct Flights<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    cache: Cache<T>,
    /// Bounded by who may begin one.
    flying: HashMap<HostName, Flight<T>>,
}

/// What to do about a name.
pub(super) enum Begin<T> {
    /// Nothing.
    Known(T),
    /// Wait for somebody else's.
    Wait(Flight<T>),
    /// Look it up, for everybody who waits.
    Mine(Lookup<T>, Flight<T>),
}

/// A lookup under way, for those who wait for it.
pub(super) struct Flight<T>(watch::Receiver<Option<T>>);

/// A lookup under way, for the one who does it. Dropped without an end, nobody waits for it.
pub(super) struct Lookup<T> {
    flights: Arc<Flights<T>>,
    name: HostName,
    waiting: watch::Sender<Option<T>>,
}

// === impl Flights ===

impl<T> Default for Flights<T> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                cache: Cache::default(),
                flying: HashMap::new(),
            }),
        }
    }
}

impl<T: Clone> Flights<T> {
    /// What is known now, and until when.
    pub(super) fn known(&self, name: &HostName, now: Instant) -> Option<(T, Instant)> {
        self.state().cache.get(name, now)
    }

    /// The lookup that is under way.
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
            flights: Arc::clone(self),
            name: name.clone(),
            waiting,
        };
        Begin::Mine(lookup, flight)
    }
}

impl<T> Flights<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        // A panic in between leaves maps that are still maps.
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
    /// What was found; none when nobody looks any more.
    pub(super) async fn wait(mut self) -> Option<T> {
        self.0.wait_for(Option::is_some).await.ok()?.clone()
    }
}

// === impl Lookup ===

impl<T: Clone> Lookup<T> {
    pub(super) fn name(&self) -> &HostName {
        &self.name
    }

    /// Tells everybody, and remembers it.
    pub(super) fn end(self, found: T, ttl: Duration) {
        let now = Instant::now();
        let mut state = self.flights.state();
        state
            .cache
            .put(self.name.clone(), found.clone(), now + ttl, now);
        drop(state);
        self.waiting.send_replace(Some(found));
    }
}

impl<T> Drop for Lookup<T> {
    fn drop(&mut self) {
        self.flights.state().flying.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> HostName {
        HostName::parse("example.com").unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn one_looks_and_all_know() {
        let flights = Arc::new(Flights::default());
        let Begin::Mine(lookup, mine) = flights.begin(&name()) else {
            panic!("nobody looks yet");
        };
        let Begin::Wait(other) = flights.begin(&name()) else {
            panic!("somebody looks");
        };
        assert!(flights.flying(&name()).is_some());
        lookup.end(7, Duration::from_secs(5));
        assert_eq!((mine.wait().await, other.wait().await), (Some(7), Some(7)));
        assert!(matches!(flights.begin(&name()), Begin::Known(7)));
        assert!(flights.flying(&name()).is_none());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(flights.known(&name(), Instant::now()).is_none());
        assert!(matches!(flights.begin(&name()), Begin::Mine(..)));
    }

    #[tokio::test]
    async fn a_lookup_that_is_dropped_leaves_nobody_waiting() {
        let flights = Arc::new(Flights::<u8>::default());
        let Begin::Mine(lookup, flight) = flights.begin(&name()) else {
            panic!("nobody looks yet");
        };
        drop(lookup);
        assert_eq!(flight.wait().await, None);
        assert!(matches!(flights.begin(&name()), Begin::Mine(..)));
    }
}
