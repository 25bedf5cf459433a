//! Lifetime of a session: TTL and idle timeout.

use crate::{Error, TimeLimit};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Longest TTL and idle timeout: a year, short enough that sums never overflow.
const SECONDS_MAX: i64 = 366 * 24 * 3600;

/// TTL and idle timeout of a session; `None` is never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifetime {
    /// From its creation.
    pub ttl: Option<Duration>,
    /// From the end of the last call that used it.
    pub idle: Option<Duration>,
}

/// Lifetime of a session in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LifetimeSpec {
    /// From its creation.
    pub ttl: TimeLimit,
    /// From the end of the last call that used it.
    pub idle: TimeLimit,
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
    /// Time of expiry in Unix milliseconds, from the times of creation and last use.
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

// === impl LifetimeSpec ===

impl LifetimeSpec {
    /// Times in seconds, as in a request: 0 is the server's default, -1 is never.
    pub fn from_seconds(ttl: i64, idle: i64) -> Result<Self, Error> {
        Ok(Self {
            ttl: time_limit("ttl", ttl)?,
            idle: time_limit("idle timeout", idle)?,
        })
    }

    /// The lifetime, with the server's defaults filled in.
    pub fn or(self, default: Lifetime) -> Lifetime {
        Lifetime {
            ttl: self.ttl.or(default.ttl),
            idle: self.idle.or(default.idle),
        }
    }
}

impl From<Lifetime> for LifetimeSpec {
    fn from(lifetime: Lifetime) -> Self {
        Self {
            ttl: lifetime.ttl.into(),
            idle: lifetime.idle.into(),
        }
    }
}

fn time_limit(noun: &str, seconds: i64) -> Result<TimeLimit, Error> {
    match seconds {
        0 => Ok(TimeLimit::Default),
        -1 => Ok(TimeLimit::Never),
        1..=SECONDS_MAX => Ok(TimeLimit::After(Duration::from_secs(
            seconds.unsigned_abs(),
        ))),
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
        assert_eq!(LifetimeSpec::from_seconds(0, 0).unwrap().or(base), base);
        assert_eq!(
            LifetimeSpec::from_seconds(5, -1).unwrap().or(base),
            Lifetime {
                ttl: Some(Duration::from_secs(5)),
                idle: None
            }
        );
        assert!(LifetimeSpec::from_seconds(-2, 0).is_err());
        assert!(LifetimeSpec::from_seconds(i64::MAX, 0).is_err());
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
