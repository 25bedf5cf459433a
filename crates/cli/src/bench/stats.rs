//! What a series of measurements comes to.

use std::time::Duration;

/// The measurements of one subject.
#[derive(Clone, Debug, Default)]
pub(super) struct Times(Vec<Duration>);

// === impl Times ===

impl Times {
    pub(super) fn add(&mut self, took: Duration) {
        self.0.push(took);
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The smallest measurement that `percent` of them do not exceed, in milliseconds.
    pub(super) fn percentile_ms(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted
            .get(rank - 1)
            .map_or(0.0, |time| time.as_secs_f64() * 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measurements() {
        let times = Times((1..=100).rev().map(Duration::from_millis).collect());
        assert_eq!(times.percentile_ms(50), 50.0);
        assert_eq!(times.percentile_ms(95), 95.0);
        assert_eq!(times.percentile_ms(99), 99.0);
        let mut one = Times::default();
        assert_eq!(one.percentile_ms(50), 0.0);
        one.add(Duration::from_millis(7));
        assert_eq!((one.percentile_ms(50), one.percentile_ms(99)), (7.0, 7.0));
        assert_eq!(one.count(), 1);
    }
}
