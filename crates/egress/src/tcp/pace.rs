//! How much of the server one sandbox may use, all its connections together: bytes, and work.
//!
//! What the server does for a sandbox is not counted against the sandbox's CPU. So it has a rate:
//! who sends bytes one by one, or requests without end, waits, and what waits is read at once then.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Work a second, in the long run. One is about what a read, a write and being woken for them cost:
/// some 5 to 10 microseconds, so that one sandbox has about a third of a CPU for small pieces.
const WORK_PER_SECOND: u64 = 50_000;

/// Something was read, and is written on.
pub(crate) const OF_READ: usize = 1;

/// A request: its head is parsed, checked and written anew, and so is that of its answer. So there
/// are 2,000 a second.
pub(crate) const OF_REQUEST: usize = 25;

/// What may go at once after a silence: enough that a page or an API call never waits.
const BURST: Duration = Duration::from_millis(250);

/// What should be taken at once is what passes in this time: more would come in fits and starts.
const PIECE: Duration = Duration::from_millis(50);

/// At least this, however slow: less is only work.
const PIECE_BYTES_MIN: u128 = 16 * 1024;

/// As long as one `take` can make the next one wait, whatever was asked for: a rate so small that
/// this matters was not meant.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What one sandbox may use of the server.
pub(crate) struct Pace {
    bytes: Option<Rate>,
    work: Rate,
}

/// A token bucket that fills by the second: bytes, units of work, or whatever a sandbox may have so
/// many of. A quarter of a second's worth is there at once.
///
/// It keeps one number: the moment at which all that was taken so far is paid for. Who takes adds
/// to it and waits until then, so each waits in the order of asking and nobody is passed over.
#[derive(Debug)]
pub(crate) struct Rate {
    per_second: u64,
    paid_at: Mutex<Option<Instant>>,
}

// === impl Pace ===

impl Pace {
    /// So many bytes a second, or as many as there are.
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            bytes: bytes_per_second.map(Rate::new),
            work: Rate::new(WORK_PER_SECOND),
        }
    }

    /// Takes it, and waits until that is paid for. Who stops waiting has taken it all the same.
    pub(crate) async fn take(&self, bytes: usize, work: usize) {
        if let Some(until) = self.book(bytes, work) {
            sleep_until(until).await;
        }
    }

    /// Takes it, and says when it is paid for; none when it is already.
    pub(crate) fn book(&self, bytes: usize, work: usize) -> Option<Instant> {
        let now = Instant::now();
        let worked = self.work.book(work, now);
        let sent = self.bytes.as_ref().map(|rate| rate.book(bytes, now));
        let until = sent.map_or(worked, |sent| sent.max(worked));
        (until > now).then_some(until)
    }

    /// How many bytes should be taken at once, at most.
    pub(crate) fn piece(&self) -> usize {
        self.bytes.as_ref().map_or(usize::MAX, Rate::piece)
    }
}

// === impl Rate ===

impl Rate {
    /// So many a second; 0 counts as 1.
    #[must_use]
    pub(crate) fn new(per_second: u64) -> Self {
        Self {
            per_second: per_second.max(1),
            paid_at: Mutex::new(None),
        }
    }

    /// Waits until `count` more are paid for. Who stops waiting has taken them all the same.
    pub(crate) async fn take(&self, count: usize) {
        let now = Instant::now();
        let until = self.book(count, now);
        if until > now {
            sleep_until(until).await;
        }
    }

    fn piece(&self) -> usize {
        let bytes = u128::from(self.per_second) * PIECE.as_millis() / 1000;
        let bytes = bytes.max(PIECE_BYTES_MIN);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    fn book(&self, count: usize, now: Instant) -> Instant {
        // A panic in between leaves a moment that is still a moment.
        let mut paid_at = self.paid_at.lock().unwrap_or_else(PoisonError::into_inner);
        let full = now.checked_sub(BURST).unwrap_or(now);
        let from = paid_at.map_or(full, |at| at.max(full));
        let until = from + self.cost(count).min(WAIT_MAX);
        *paid_at = Some(until);
        until
    }

    fn cost(&self, count: usize) -> Duration {
        let nanos = count as u128 * 1_000_000_000 / u128::from(self.per_second);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const KIB: usize = 1024;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_free_and_then_it_costs() {
        let rate = Rate::new(100 * KIB as u64);
        let start = Instant::now();
        rate.take(25 * KIB).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        rate.take(100 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1000);
        rate.take(50 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1500);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_silence_saves_no_more_than_a_burst() {
        let rate = Rate::new(100 * KIB as u64);
        rate.take(KIB).await;
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let start = Instant::now();
        rate.take(125 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn all_together_get_the_rate_and_each_gets_a_share() {
        let rate = Arc::new(Rate::new(1000 * KIB as u64));
        let start = Instant::now();
        let mut takers = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let rate = Arc::clone(&rate);
            takers.spawn(async move {
                for _ in 0..10 {
                    rate.take(100 * KIB).await;
                }
                Instant::now()
            });
        }
        let ends = takers.join_all().await;
        let total = start.elapsed();
        assert!((9_700..=9_800).contains(&total.as_millis()), "{total:?}");
        let first = ends.into_iter().min().unwrap() - start;
        assert!(
            first.as_millis() > 6_500,
            "one was served before others: {first:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn work_has_a_rate_whatever_bytes_have() {
        for bytes_per_second in [None, Some(1 << 30)] {
            let pace = Pace::new(bytes_per_second);
            let start = Instant::now();
            // Five seconds of one byte at a time, of which a quarter of a second is free.
            for _ in 0..5 * WORK_PER_SECOND {
                pace.take(1, OF_READ).await;
            }
            let took = start.elapsed().as_millis();
            assert!((4_700..=4_800).contains(&took), "{took}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_number_is_too_large_or_too_small() {
        let slow = Rate::new(0);
        let start = Instant::now();
        slow.take(usize::MAX).await;
        assert!(start.elapsed() <= WAIT_MAX);
        Rate::new(u64::MAX).take(usize::MAX).await;
        assert_eq!(slow.piece(), 16 * KIB);
        assert_eq!(Rate::new(10_000_000).piece(), 500_000);
        assert!(Rate::new(u64::MAX).piece() > 0);
    }
}
