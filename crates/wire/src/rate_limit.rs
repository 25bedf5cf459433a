//! Rate limit (token bucket) of the replies of one guest, over all its calls.
//!
//! CPU time that the host spends for a sandbox is not charged to the sandbox's cgroup, and a reply with
//! one byte costs nearly as much as one with a hundred thousand. So replies have a rate limit, and small
//! chunks of one stream that have arrived are coalesced ([`crate::Replies::next`]). Over the limit the
//! host reads later: chunks accumulate and are coalesced, then the guest blocks (backpressure).

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Sustained units of work per second: 5,000 small chunks, or some 500 MB in large ones.
const WORK_PER_SECOND: u64 = 160_000;

/// Units of work of one chunk: waking a reader, recording, and sending to a client.
const CHUNK_COST: u64 = 32;

/// Units of work of decoding one frame.
const FRAME_COST: u64 = 1;

/// Bytes that cost one unit of work.
const BYTES_PER_WORK: usize = 16 * 1024;

/// Bucket size, as time at the full rate: enough that an ordinary command never waits.
const BURST: Duration = Duration::from_millis(250);

/// The token bucket of one guest.
///
/// It stores the time at which all tokens taken so far are refilled (GCRA).
#[derive(Debug, Default)]
pub struct RateLimit(Mutex<Option<Instant>>);

// === impl RateLimit ===

impl RateLimit {
    /// Takes the tokens of one chunk; returns the time until which to wait, none when there is no wait.
    pub(crate) fn take(&self, frames: u64, bytes: usize) -> Option<Instant> {
        let bytes = u64::try_from(bytes / BYTES_PER_WORK).unwrap_or(u64::MAX);
        let work = CHUNK_COST + (frames * FRAME_COST).saturating_add(bytes);
        let cost = Duration::from_nanos(work.saturating_mul(1_000_000_000 / WORK_PER_SECOND));
        let now = Instant::now();
        // A panic while it was locked leaves a valid time.
        let mut paid_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let full = now.checked_sub(BURST).unwrap_or(now);
        let until = paid_at.map_or(full, |at| at.max(full)) + cost;
        *paid_at = Some(until);
        (until > now).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep_until;

    /// How long this many chunks take.
    async fn time_of(chunks: u64, frames: u64, bytes: usize) -> Duration {
        let (rate_limit, start) = (RateLimit::default(), Instant::now());
        for _ in 0..chunks {
            if let Some(until) = rate_limit.take(frames, bytes) {
                sleep_until(until).await;
            }
        }
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn small_chunks_are_limited_and_an_ordinary_command_never_waits() {
        assert_eq!(time_of(1000, 1, 80).await, Duration::ZERO);
        let took = time_of(50_000, 1, 1).await;
        assert!((9_900..=10_400).contains(&took.as_millis()), "{took:?}");
        // A hundred megabytes of output, in the largest chunks.
        let chunks = (100 << 20) / crate::CHUNK_BYTES as u64;
        assert_eq!(time_of(chunks, 1, crate::CHUNK_BYTES).await, Duration::ZERO);
    }
}
