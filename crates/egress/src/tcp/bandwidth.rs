//! How fast a sandbox may be, all its connections together.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// What may go at once after a silence: enough that a page or an API call never waits.
const BURST: Duration = Duration::from_millis(250);

/// What should be taken at once is what passes in this time: more would come in fits and starts.
const PIECE: Duration = Duration::from_millis(50);

/// At least this, however slow: less is only work.
const PIECE_BYTES_MIN: u128 = 16 * 1024;

/// As long as one `take` can make the next one wait, whatever was asked for: a rate so small that
/// this matters was not meant.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A bucket of bytes that fills by the second.
///
/// It keeps one number: the moment at which all that was taken so far is paid for. Who takes adds
/// to it and waits until then, so each waits in the order of asking and nobody is passed over.
pub(crate) struct Bandwidth {
    bytes_per_second: u64,
    paid_at: Mutex<Option<Instant>>,
}

// === impl Bandwidth ===

impl Bandwidth {
    /// So many bytes a second; 0 counts as 1.
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(1),
            paid_at: Mutex::new(None),
        }
    }

    /// Waits until `bytes` more may pass. Who stops waiting has taken them all the same.
    pub(crate) async fn take(&self, bytes: usize) {
        let until = self.book(bytes, Instant::now());
        sleep_until(until).await;
    }

    /// How many bytes should be taken at once, at most.
    pub(crate) fn piece(&self) -> usize {
        let bytes = u128::from(self.bytes_per_second) * PIECE.as_millis() / 1000;
        let bytes = bytes.max(PIECE_BYTES_MIN);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    fn book(&self, bytes: usize, now: Instant) -> Instant {
        // A panic in between leaves a moment that is still a moment.
        let mut paid_at = self.paid_at.lock().unwrap_or_else(PoisonError::into_inner);
        let full = now.checked_sub(BURST).unwrap_or(now);
        let from = paid_at.map_or(full, |at| at.max(full));
        let until = from + self.cost(bytes).min(WAIT_MAX);
        *paid_at = Some(until);
        until
    }

    fn cost(&self, bytes: usize) -> Duration {
        let nanos = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second);
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
        let bandwidth = Bandwidth::new(100 * KIB as u64);
        let start = Instant::now();
        bandwidth.take(25 * KIB).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        bandwidth.take(100 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1000);
        bandwidth.take(50 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1500);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_silence_saves_no_more_than_a_burst() {
        let bandwidth = Bandwidth::new(100 * KIB as u64);
        bandwidth.take(KIB).await;
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let start = Instant::now();
        bandwidth.take(125 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn all_together_get_the_rate_and_each_gets_a_share() {
        let bandwidth = Arc::new(Bandwidth::new(1000 * KIB as u64));
        let start = Instant::now();
        let mut takers = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let bandwidth = Arc::clone(&bandwidth);
            takers.spawn(async move {
                for _ in 0..10 {
                    bandwidth.take(100 * KIB).await;
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
    async fn no_number_is_too_large_or_too_small() {
        let slow = Bandwidth::new(0);
        let start = Instant::now();
        slow.take(usize::MAX).await;
        assert!(start.elapsed() <= WAIT_MAX);
        Bandwidth::new(u64::MAX).take(usize::MAX).await;
        assert_eq!(slow.piece(), 16 * KIB);
        assert_eq!(Bandwidth::new(10_000_000).piece(), 500_000);
        assert!(Bandwidth::new(u64::MAX).piece() > 0);
    }
}
