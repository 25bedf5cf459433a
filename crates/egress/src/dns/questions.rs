//! How much one sandbox may ask, over UDP and TCP together, and how much may be asked for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Questions a second, in the long run. A browser that opens a page asks some twenty.
const RATE: u32 = 50;

/// Questions at once, after some quiet: an installer that starts, or a test suite.
const BURST: u32 = 200;

/// Questions that wait for a lookup. Whoever asks more at once waits for nothing: it is dropped,
/// and clients ask again by themselves.
const WAITING_MAX: usize = 64;

/// Lookups at upstreams at the same time. So a few sandboxes whose names are slow on purpose do not
/// take all that the server has ([`super::resolver`]).
pub(super) const LOOKUPS_MAX: usize = 16;

/// Connections for DNS at the same time. Clients have one, for the rare reply that is too long.
const CONNECTIONS_MAX: usize = 8;

/// How often what was dropped is written down.
pub(super) const NOTED_EVERY: Duration = Duration::from_secs(1);

/// What one sandbox may ask, and what it has asked too much.
pub(crate) struct Questions {
    state: Mutex<State>,
    waiting: Arc<Semaphore>,
    lookups: Semaphore,
    connections: Arc<Semaphore>,
}

struct State {
    asked: Bucket,
    looked_up: Bucket,
    dropped: Dropped,
}

/// A token bucket; a token is one question. It counts in the time that tokens take to come.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// When it was, or will be, empty.
    empty_at: Instant,
}

/// What was dropped and not yet written down.
#[derive(Debug, Default)]
struct Dropped {
    count: u64,
    noted: Option<Instant>,
}

// === impl Questions ===

impl Default for Questions {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            state: Mutex::new(State {
                asked: Bucket::full(now),
                looked_up: Bucket::full(now),
                dropped: Dropped::default(),
            }),
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
            lookups: Semaphore::new(LOOKUPS_MAX),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        }
    }
}

impl Questions {
    /// Whether a question may be looked at. One that may not is counted.
    pub(super) fn admit(&self) -> bool {
        let mut state = self.state();
        let admitted = state.asked.take(Instant::now());
        if !admitted {
            state.dropped.count += 1;
        }
        admitted
    }

    /// A place among those who wait for a lookup; none when there is none, which is counted.
    pub(super) fn wait(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.waiting).try_acquire_owned().ok();
        if place.is_none() {
            self.state().dropped.count += 1;
        }
        place
    }

    /// A place for a connection; none when there is none, which is counted.
    pub(super) fn connect(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.connections).try_acquire_owned().ok();
        if place.is_none() {
            self.state().dropped.count += 1;
        }
        place
    }

    /// Whether upstreams may be asked once more. A name that a connection shows is looked up
    /// without a question, so questions are not all that has to have a rate.
    pub(super) fn may_look_up(&self) -> bool {
        self.state().looked_up.take(Instant::now())
    }

    /// One of the sandbox's lookups at upstreams, when it is its turn.
    pub(super) fn lookups(&self) -> &Semaphore {
        &self.lookups
    }

    /// How many were dropped that nobody has written down, if it is time to.
    pub(super) fn to_note(&self) -> Option<u64> {
        self.state().dropped.take(Instant::now())
    }

    /// Whether there is something to write down, now or soon.
    pub(super) fn has_dropped(&self) -> bool {
        self.state().dropped.count > 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in between leaves numbers that are still numbers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Bucket ===

impl Bucket {
    /// How long one token takes to come.
    const TOKEN: Duration = Duration::from_nanos(1_000_000_000 / RATE as u64);

    fn full(now: Instant) -> Self {
        Self { empty_at: now }
    }

    /// `empty_at` is at most `BURST` tokens ahead: each that is taken moves it, time catches up.
    fn take(&mut self, now: Instant) -> bool {
        let after = self.empty_at.max(now) + Self::TOKEN;
        let fits = after <= now + Self::TOKEN * BURST;
        if fits {
            self.empty_at = after;
        }
        fits
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

    #[test]
    fn a_burst_and_then_a_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::full(start);
        let taken = |bucket: &mut Bucket, now| (0..10_000).filter(|_| bucket.take(now)).count();
        assert_eq!(taken(&mut bucket, start), BURST as usize);
        let second = Duration::from_secs(1);
        assert_eq!(taken(&mut bucket, start + second), RATE as usize);
        assert_eq!(taken(&mut bucket, start + second), 0);
        assert_eq!(taken(&mut bucket, start + 100 * second), BURST as usize);
    }

    #[test]
    fn ten_seconds_of_asking_without_end() {
        let start = Instant::now();
        let mut bucket = Bucket::full(start);
        let tries = 0..100_000_u32;
        let times = tries.map(|n| start + Duration::from_micros(100) * n);
        let taken = times.filter(|now| bucket.take(*now)).count();
        let most = (BURST + 10 * RATE) as usize;
        assert!((most - 1..=most).contains(&taken), "{taken}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_dropped_is_noted_once_a_second() {
        let questions = Questions::default();
        let admitted = (0..1000).filter(|_| questions.admit()).count();
        assert_eq!(admitted, BURST as usize);
        assert_eq!(questions.to_note(), Some(800));
        assert!(!questions.admit() && !questions.admit());
        assert!(questions.to_note().is_none() && questions.has_dropped());
        tokio::time::advance(NOTED_EVERY).await;
        assert_eq!(questions.to_note(), Some(2));
        assert!(questions.to_note().is_none() && !questions.has_dropped());
    }

    #[test]
    fn lookups_have_a_rate_of_their_own() {
        let questions = Questions::default();
        let looked_up = (0..1000).filter(|_| questions.may_look_up()).count();
        assert_eq!(looked_up, BURST as usize);
        assert!(questions.admit() && !questions.has_dropped());
    }

    #[test]
    fn places_are_counted() {
        let questions = Questions::default();
        let places: Vec<_> = (0..100).map_while(|_| questions.wait()).collect();
        assert_eq!(places.len(), WAITING_MAX);
        let connections: Vec<_> = (0..100).map_while(|_| questions.connect()).collect();
        assert_eq!(connections.len(), CONNECTIONS_MAX);
        assert_eq!(questions.to_note(), Some(2));
        drop(places);
        assert!(questions.wait().is_some());
    }
}
