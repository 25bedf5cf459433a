//! Per-sandbox rate limit (token buckets) of bytes and of CPU work, over all its connections.
//!
//! CPU time that the proxy spends for a sandbox is not charged to the sandbox's cgroup. So the work has
//! a rate limit: a sandbox that sends single bytes, or endless requests, has to wait, and what has
//! accumulated meanwhile is read at once.

use k8e_net::token_bucket::{Rate, TokenBucket};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Sustained units of work per second. One unit is about a read, a write and the wake-up for them:
/// 5 to 10 microseconds, so that one sandbox gets about a third of a CPU for small reads.
const WORK_PER_SECOND: u64 = 50_000;

/// Units of work of one read with its write.
pub(crate) const READ_COST: usize = 1;

/// Units of work of one HTTP request: the heads of request and response are parsed, checked and written
/// again. That makes 2,000 requests per second.
pub(crate) const REQUEST_COST: usize = 25;

/// The bucket holds this part of a second's tokens: enough that a page or an API call never waits.
const BURSTS_PER_SECOND: u64 = 4;

/// A read should take no more bytes than pass in this time: more would make the stream bursty.
const CHUNK: Duration = Duration::from_millis(50);

/// Smallest bound of a read, however low the bandwidth: less is only overhead.
const CHUNK_BYTES_MIN: u128 = 16 * 1024;

/// The rate limit of one sandbox.
pub(crate) struct RateLimit {
    bytes: Option<Pacer>,
    work: Pacer,
}

/// Paces tasks by a token bucket: a task that takes tokens waits until they have come, so tasks are
/// served in order (FIFO).
#[derive(Debug)]
pub(crate) struct Pacer {
    rate: Rate,
    bucket: Mutex<TokenBucket>,
}

// === impl RateLimit ===

impl RateLimit {
    /// With this bandwidth; none is unlimited. The limit of work is always there.
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            bytes: bytes_per_second.map(Pacer::new),
            work: Pacer::new(WORK_PER_SECOND),
        }
    }

    /// Takes bytes and work, and waits until they are available. Dropping the future does not give
    /// them back.
    pub(crate) async fn take(&self, bytes: usize, work: usize) {
        if let Some(until) = self.reserve(bytes, work) {
            sleep_until(until).await;
        }
    }

    /// Takes bytes and work, and returns the time until which to wait; none when there is no wait.
    pub(crate) fn reserve(&self, bytes: usize, work: usize) -> Option<Instant> {
        let now = Instant::now();
        let worked = self.work.reserve(work, now);
        let sent = self.bytes.as_ref().map(|rate| rate.reserve(bytes, now));
        let until = sent.map_or(worked, |sent| sent.max(worked));
        (until > now).then_some(until)
    }

    /// Bound of a single read, in bytes.
    pub(crate) fn chunk_bytes_max(&self) -> usize {
        self.bytes
            .as_ref()
            .map_or(usize::MAX, Pacer::chunk_bytes_max)
    }
}

// === impl Pacer ===

impl Pacer {
    /// Tokens per second; 0 counts as 1.
    #[must_use]
    pub(crate) fn new(per_second: u64) -> Self {
        let rate = Rate {
            per_second: per_second.max(1),
            burst: per_second / BURSTS_PER_SECOND,
        };
        Self {
            rate,
            bucket: Mutex::new(TokenBucket::full(Instant::now().into_std())),
        }
    }

    /// Takes `count` tokens and waits until they are available. Dropping the future does not give them
    /// back.
    pub(crate) async fn take(&self, count: usize) {
        let now = Instant::now();
        let until = self.reserve(count, now);
        if until > now {
            sleep_until(until).await;
        }
    }

    fn chunk_bytes_max(&self) -> usize {
        let bytes = u128::from(self.rate.per_second) * CHUNK.as_millis() / 1000;
        let bytes = bytes.max(CHUNK_BYTES_MIN);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    fn reserve(&self, count: usize, now: Instant) -> Instant {
        // A panic while it was locked leaves a valid time.
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        Instant::from_std(bucket.reserve(self.rate, count, now.into_std()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const KIB: usize = 1024;

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_at_once_and_then_the_rate_holds() {
        let rate = Pacer::new(100 * KIB as u64);
        let start = Instant::now();
        rate.take(25 * KIB).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        rate.take(100 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1000);
        rate.take(50 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1500);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_time_saves_no_more_than_a_burst() {
        let rate = Pacer::new(100 * KIB as u64);
        rate.take(KIB).await;
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let start = Instant::now();
        rate.take(125 * KIB).await;
        assert_eq!(start.elapsed().as_millis(), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_takers_share_the_rate_fairly() {
        let rate = Arc::new(Pacer::new(1000 * KIB as u64));
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
    async fn work_has_a_rate_limit_of_its_own() {
        for bytes_per_second in [None, Some(1 << 30)] {
            let rate_limit = RateLimit::new(bytes_per_second);
            let start = Instant::now();
            // Five seconds of one byte at a time, of which a quarter of a second is free.
            for _ in 0..5 * WORK_PER_SECOND {
                rate_limit.take(1, READ_COST).await;
            }
            let took = start.elapsed().as_millis();
            assert!((4_700..=4_800).contains(&took), "{took}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn extreme_rates_and_counts_are_safe() {
        let slow = Pacer::new(0);
        let start = Instant::now();
        slow.take(usize::MAX).await;
        assert!(start.elapsed() <= Duration::from_secs(60));
        Pacer::new(u64::MAX).take(usize::MAX).await;
        assert_eq!(slow.chunk_bytes_max(), 16 * KIB);
        assert_eq!(Pacer::new(10_000_000).chunk_bytes_max(), 500_000);
        assert!(Pacer::new(u64::MAX).chunk_bytes_max() > 0);
    }
}
