//! Rate limits of one sandbox's DNS queries and upstream lookups (token buckets), over UDP and TCP
//! together, and limits of what is concurrent.

use k8e_net::token_bucket::{Rate, TokenBucket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Rate limit of queries, and of lookups. A browser that opens a page sends some twenty; a burst after idle time is an
/// installer or a test suite.
const RATE: Rate = Rate {
    per_second: 50,
    burst: 200,
};

/// Queries that wait for a lookup. More are dropped; clients retry by themselves.
const WAITING_MAX: usize = 64;

/// Concurrent upstream lookups per sandbox, so that a few sandboxes whose names are slow on purpose do
/// not use up those of the server ([`super::resolver`]).
pub(super) const LOOKUPS_MAX: usize = 16;

/// Concurrent DNS connections over TCP. Clients open one, for the rare truncated reply.
const CONNECTIONS_MAX: usize = 8;

/// Interval of flow log entries about dropped queries.
pub(super) const NOTED_EVERY: Duration = Duration::from_secs(1);

/// Limits of one sandbox, and the count of queries over them.
pub(crate) struct QueryLimits {
    state: Mutex<State>,
    waiting: Arc<Semaphore>,
    lookups: Semaphore,
    connections: Arc<Semaphore>,
}

struct State {
    asked: TokenBucket,
    looked_up: TokenBucket,
    dropped: Dropped,
}

/// Dropped queries that are not yet in the flow log.
#[derive(Debug, Default)]
struct Dropped {
    count: u64,
    noted: Option<Instant>,
}

// === impl QueryLimits ===

impl Default for QueryLimits {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            state: Mutex::new(State {
                asked: TokenBucket::full(now.into_std()),
                looked_up: TokenBucket::full(now.into_std()),
                dropped: Dropped::default(),
            }),
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
            lookups: Semaphore::new(LOOKUPS_MAX),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        }
    }
}

impl QueryLimits {
    /// Takes a token for one query. False, and counted as dropped, when there is none.
    pub(super) fn admit(&self) -> bool {
        let mut state = self.state();
        let admitted = state.asked.take(RATE, Instant::now().into_std());
        if !admitted {
            state.dropped.count += 1;
        }
        admitted
    }

    /// A permit to wait for a lookup; none, and counted as dropped, at the limit.
    pub(super) fn wait(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.waiting).try_acquire_owned().ok();
        if place.is_none() {
            self.state().dropped.count += 1;
        }
        place
    }

    /// A permit for a TCP connection; none, and counted as dropped, at the limit.
    pub(super) fn connect(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.connections).try_acquire_owned().ok();
        if place.is_none() {
            self.state().dropped.count += 1;
        }
        place
    }

    /// Takes a token for one upstream lookup. The name in an SNI or `Host` is looked up without a
    /// query, so lookups have a rate limit of their own.
    pub(super) fn may_look_up(&self) -> bool {
        self.state().looked_up.take(RATE, Instant::now().into_std())
    }

    /// Semaphore of concurrent upstream lookups.
    pub(super) fn lookups(&self) -> &Semaphore {
        &self.lookups
    }

    /// Takes the count of dropped queries for the flow log; none before the interval has passed.
    pub(super) fn to_note(&self) -> Option<u64> {
        self.state().dropped.take(Instant::now())
    }

    /// Whether dropped queries are to be logged, now or after the interval.
    pub(super) fn has_dropped(&self) -> bool {
        self.state().dropped.count > 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it was locked leaves valid numbers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Dropped ===

impl Dropped {
    fn take(&mut self, now: Instant) -> Option<u64> {
        let due = self.noted.is_none_or(|noted| now >= noted + NOTED_EVERY);
        if self.count == 0 || !due {
            return None;
        }
        self.noted = Some(now);
        Some(std::mem::take(&mut self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn dropped_queries_are_logged_once_a_second() {
        let query_limits = QueryLimits::default();
        let admitted = (0..1000).filter(|_| query_limits.admit()).count();
        assert_eq!(admitted as u64, RATE.burst);
        assert_eq!(query_limits.to_note(), Some(800));
        assert!(!query_limits.admit() && !query_limits.admit());
        assert!(query_limits.to_note().is_none() && query_limits.has_dropped());
        tokio::time::advance(NOTED_EVERY).await;
        assert_eq!(query_limits.to_note(), Some(2));
        assert!(query_limits.to_note().is_none() && !query_limits.has_dropped());
    }

    #[test]
    fn lookups_have_a_separate_rate_limit() {
        let query_limits = QueryLimits::default();
        let looked_up = (0..1000).filter(|_| query_limits.may_look_up()).count();
        assert_eq!(looked_up as u64, RATE.burst);
        assert!(query_limits.admit() && !query_limits.has_dropped());
    }

    #[test]
    fn concurrent_queries_and_connections_are_limited() {
        let query_limits = QueryLimits::default();
        let places: Vec<_> = (0..100).map_while(|_| query_limits.wait()).collect();
        assert_eq!(places.len(), WAITING_MAX);
        let connections: Vec<_> = (0..100).map_while(|_| query_limits.connect()).collect();
        assert_eq!(connections.len(), CONNECTIONS_MAX);
        assert_eq!(query_limits.to_note(), Some(2));
        drop(places);
        assert!(query_limits.wait().is_some());
    }
}
