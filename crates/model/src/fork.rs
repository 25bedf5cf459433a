//! Forks: what one call makes from a session.

use crate::{Error, LifetimeSpec, TimeLimit};

/// Sessions that one fork makes at most: what E2B's API allows. Each is a launch.
const FORK_COUNT_MAX: u32 = 20;

/// Number of sessions that a fork makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkCount(u32);

/// What a fork is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForkSpec {
    /// How many sessions.
    pub count: ForkCount,
    /// TTL of each, from its creation; the default is that of the session.
    pub ttl: TimeLimit,
}

// === impl ForkSpec ===

impl ForkSpec {
    /// From a request: a count of 0 is one; a TTL of 0 seconds is that of the session, -1 is never.
    pub fn new(count: u32, ttl_s: i64) -> Result<Self, Error> {
        Ok(Self {
            count: ForkCount::new(count)?,
            ttl: LifetimeSpec::from_seconds(ttl_s, 0)?.ttl,
        })
    }
}

// === impl ForkCount ===

impl ForkCount {
    /// From a request: 0 is one.
    pub fn new(count: u32) -> Result<Self, Error> {
        match count {
            0 => Ok(Self(1)),
            1..=FORK_COUNT_MAX => Ok(Self(count)),
            _ => Err(Error::invalid(format!(
                "{count} forks at once: use 1 to {FORK_COUNT_MAX}, and fork again for more"
            ))),
        }
    }

    /// The number.
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_to_twenty() {
        assert_eq!(ForkCount::new(0).unwrap().get(), 1);
        assert_eq!(ForkCount::new(20).unwrap().get(), 20);
        assert!(
            ForkCount::new(21)
                .unwrap_err()
                .to_string()
                .contains("1 to 20")
        );
    }
}
