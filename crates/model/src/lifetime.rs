//! How long a session lives.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A year: longer than any machine of ours is up, short enough that sums never overflow.
const SECONDS_MAX: i64 = 366 * 24 * 3600;

/// When a session ends without anybody ending it. None is never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifetime {
    /// From its creation.
    pub ttl: Option<Duration>,
    /// From the end of the last call that used it.
    pub idle: Option<Duration>,
}

// === impl Lifetime ===

impl Default for Lifetime {
    fn default() -> Self {
        Self {
            ttl: None,
            idle: Some(Duration::from_secs(3600)),
        }
    }
}

impl Lifetime {
    /// What a request asks for in seconds: 0 is the default, -1 is never.
    pub fn with_seconds(self, ttl: i64, idle: i64) -> Result<Self, Error> {
        Ok(Self {
            ttl: pick("ttl", ttl, self.ttl)?,
            idle: pick("idle timeout", idle, self.idle)?,
        })
    }

    /// When it ends, in Unix milliseconds, given when it was made and last used.
    pub fn ends_at_ms(&self, created_ms: i64, used_ms: i64) -> Option<i64> {
        let after = |start: i64, d: Option<Duration>| {
            d.map(|d| start.saturating_add(i64::try_from(d.as_millis()).unwrap_or(i64::MAX)))
        };
        [after(created_ms, self.ttl), after(used_ms, self.idle)]
            .into_iter()
            .flatten()
            .min()
    }
}

fn pick(noun: &str, seconds: i64, default: Option<Duration>) -> Result<Option<Duration>, Error> {
    match seconds {
        0 => Ok(default),
        -1 => Ok(None),
        1..=SECONDS_MAX => Ok(Some(Duration::from_secs(seconds.unsigned_abs()))),
        _ => Err(Error::invalid(format!(
            "{noun} of {seconds} seconds: use 1 to {SECONDS_MAX}, or -1 for never"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_read() {
        let base = Lifetime::default();
        assert_eq!(base.with_seconds(0, 0).unwrap(), base);
        assert_eq!(
            base.with_seconds(5, -1).unwrap(),
            Lifetime {
                ttl: Some(Duration::from_secs(5)),
                idle: None
            }
        );
        assert!(base.with_seconds(-2, 0).is_err());
        assert!(base.with_seconds(i64::MAX, 0).is_err());
    }

    #[test]
    fn the_nearer_end_counts() {
        let both = Lifetime {
            ttl: Some(Duration::from_secs(10)),
            idle: Some(Duration::from_secs(3)),
        };
        assert_eq!(both.ends_at_ms(1000, 2000), Some(5000));
        assert_eq!(both.ends_at_ms(1000, 10_000), Some(11_000));
        assert_eq!(
            Lifetime {
                ttl: None,
                idle: None
            }
            .ends_at_ms(0, 0),
            None
        );
    }
}
