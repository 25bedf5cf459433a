//! Percentiles of claim latency over the last claims.

use std::time::Duration;

/// Sample size: enough for a 99th percentile, small enough to sort on every status call.
const KEPT: usize = 1024;

/// Ring buffer of claim latencies.
#[derive(Default)]
pub(super) struct Latencies {
    micros: Vec<u64>,
    next: usize,
}

// === impl Latencies ===

impl Latencies {
    pub(super) fn add(&mut self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        if self.micros.len() < KEPT {
            self.micros.push(micros);
        } else {
            self.micros[self.next] = micros;
            self.next = (self.next + 1) % KEPT;
        }
    }

    /// Median and 99th percentile in microseconds; zeroes without samples.
    pub(super) fn percentiles_us(&self) -> (u64, u64) {
        let mut sorted = self.micros.clone();
        sorted.sort_unstable();
        let at = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100).max(1);
            sorted.get(rank - 1).copied().unwrap_or(0)
        };
        (at(50), at(99))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_last_ones() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.percentiles_us(), (0, 0));
        latencies.add(Duration::from_secs(1));
        assert_eq!(latencies.percentiles_us(), (1_000_000, 1_000_000));
        for i in 0..KEPT as u64 {
            latencies.add(Duration::from_micros(i + 1));
        }
        assert_eq!(latencies.percentiles_us(), (512, 1014));
    }
}
