//! Token bucket: how often something may happen in the long run, and how often at once after a pause.
//!
//! A caller either takes a token if there is one ([`TokenBucket::take`], rate limiting) or takes any number in advance and
//! waits until they have come ([`TokenBucket::reserve`], pacing).

use std::time::{Duration, Instant};

/// As long as one `reserve` can make the next one wait, whatever was asked for: a rate so small that this matters was not
/// meant.
const RESERVE_WAIT_MAX: Duration = Duration::from_secs(60);

const NANOS_PER_SECOND: u128 = 1_000_000_000;

/// How fast a bucket fills, and how much it holds. A number of 0 counts as 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Tokens a second, in the long run.
    pub per_second: u64,
    /// Tokens at once, after a pause.
    pub burst: u64,
}

/// The tokens of one bucket, kept as the moment at which it is full again. Its rate is kept by the caller: a table of
/// buckets has one rate for all.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    full_at: Instant,
}

// === impl Rate ===

impl Rate {
    /// How long `count` tokens take to come.
    fn time_of(self, count: u64) -> Duration {
        let nanos = u128::from(count) * NANOS_PER_SECOND / u128::from(self.per_second.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// How long an empty bucket takes to be full.
    fn fill_time(self) -> Duration {
        self.time_of(self.burst.max(1))
    }
}

// === impl TokenBucket ===

impl TokenBucket {
    /// A full bucket.
    #[must_use]
    pub fn full(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Takes a token, if there is one.
    pub fn take(&mut self, rate: Rate, now: Instant) -> bool {
        let empty = self.is_empty(rate, now);
        if !empty {
            self.full_at = self.full_at.max(now) + rate.time_of(1);
        }
        !empty
    }

    /// Takes `count` tokens, in advance if there are not so many. Returns when all of them will have come: `now` or later.
    /// Callers wait in the order of asking.
    pub fn reserve(&mut self, rate: Rate, count: u64, now: Instant) -> Instant {
        self.full_at = self.full_at.max(now) + rate.time_of(count).min(RESERVE_WAIT_MAX);
        let paid_at = self.full_at.checked_sub(rate.fill_time());
        paid_at.map_or(now, |paid_at| paid_at.max(now))
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self, rate: Rate, now: Instant) -> bool {
        let missing = self.full_at.saturating_duration_since(now);
        missing.saturating_add(rate.time_of(1)) > rate.fill_time()
    }

    /// Whether nothing was taken for so long that it can be forgotten: a new bucket is the same.
    #[must_use]
    pub fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Rate = Rate {
        per_second: 50,
        burst: 200,
    };

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(start);
        let mut taken = |now| (0..10_000).filter(|_| bucket.take(SLOW, now)).count();
        let second = Duration::from_secs(1);
        assert_eq!(taken(start), 200);
        assert_eq!(taken(start + second), 50);
        assert_eq!(taken(start + second), 0);
        assert_eq!(taken(start + 100 * second), 200);
        assert!(!bucket.is_full(start + 100 * second));
        assert!(bucket.is_full(start + 104 * second));
    }

    #[test]
    fn ten_seconds_of_asking_without_end() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(start);
        let tries = 0..100_000_u32;
        let times = tries.map(|n| start + Duration::from_micros(100) * n);
        let taken = times.filter(|now| bucket.take(SLOW, *now)).count();
        assert!((699..=700).contains(&taken), "{taken}");
    }

    #[test]
    fn what_is_reserved_is_paid_for_by_waiting() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(start);
        let second = Duration::from_secs(1);
        assert_eq!(bucket.reserve(SLOW, 200, start), start);
        assert_eq!(bucket.reserve(SLOW, 50, start), start + second);
        assert_eq!(bucket.reserve(SLOW, 25, start), start + second * 3 / 2);
        assert!(bucket.is_empty(SLOW, start));
        let later = start + 3600 * second;
        assert_eq!(bucket.reserve(SLOW, 250, later), later + second);
    }

    #[test]
    fn no_number_is_too_large_or_too_small() {
        let zero = Rate {
            per_second: 0,
            burst: 0,
        };
        let start = Instant::now();
        let mut bucket = TokenBucket::full(start);
        assert!(bucket.take(zero, start) && !bucket.take(zero, start));
        assert!(bucket.take(zero, start + Duration::from_secs(1)));
        let much_later = start + Duration::from_secs(3600);
        let paid_at = bucket.reserve(zero, u64::MAX, much_later);
        assert!(paid_at - much_later <= RESERVE_WAIT_MAX);
        let fast = Rate {
            per_second: u64::MAX,
            burst: u64::MAX,
        };
        let mut bucket = TokenBucket::full(start);
        assert_eq!(bucket.reserve(fast, u64::MAX, start), start);
        let slow = Rate {
            per_second: 1,
            burst: u64::MAX,
        };
        assert!(bucket.take(slow, start) && bucket.reserve(slow, 1, start) == start);
    }
}
