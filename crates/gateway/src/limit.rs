//! How often one principal may call: reads and writes are counted apart, and each principal for itself.
//!
//! Counted after it is known who calls, so that nobody uses up what is another's. Those who run the
//! server are not counted.

use crate::metrics::RATE_LIMITED;
use k8e_api::status::to_status;
use k8e_model::{Code, Principal};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tonic::Status;

/// Principals that are counted before those who have been quiet are forgotten. It bounds memory, not
/// people: there are at most as many as there are keys.
const COUNTED_KEPT: usize = 1024;

/// How often, and how many at once after a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// In the long run.
    pub per_second: u32,
    /// At once, after a pause.
    pub burst: u32,
}

/// What one principal may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimits {
    /// Calls that only look.
    pub reads: Rate,
    /// Calls that change something, and all others.
    pub writes: Rate,
}

/// What a call is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Read,
    Write,
}

/// Everybody's calls.
pub(crate) struct Limiter {
    limits: RateLimits,
    counted: Mutex<HashMap<String, Counted>>,
}

struct Counted {
    reads: Bucket,
    writes: Bucket,
}

/// A bucket of tokens, as the moment at which it is full again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    full_at: Instant,
}

// === impl Rate ===

impl Rate {
    fn interval(self) -> Duration {
        Duration::from_secs(1) / self.per_second.max(1)
    }
}

// === impl RateLimits ===

impl Default for RateLimits {
    /// More than a person or an agent needs, less than what slows a small machine down.
    fn default() -> Self {
        Self {
            reads: Rate {
                per_second: 500,
                burst: 1000,
            },
            writes: Rate {
                per_second: 100,
                burst: 200,
            },
        }
    }
}

// === impl Class ===

impl Class {
    /// By the method's name, as in `/k8e.v1.Sandboxes/GetSession`. What is not known to only look
    /// counts as a write.
    pub(crate) fn of(path: &str) -> Self {
        let method = path.rsplit('/').next().unwrap_or_default();
        let looks = [
            "Find",
            "Get",
            "List",
            "Read",
            "Stat",
            "Watch",
            "Wait",
            "Attach",
            "TerminalForeground",
            "TerminalStream",
            "PollRun",
            "SnapshotGet",
            "SnapshotList",
            "Check",
            "ServerReflection",
        ];
        if looks.iter().any(|word| method.starts_with(word)) {
            Self::Read
        } else {
            Self::Write
        }
    }
}

// === impl Limiter ===

impl Limiter {
    pub(crate) fn new(limits: RateLimits) -> Self {
        Self {
            limits,
            counted: Mutex::default(),
        }
    }

    /// Counts a call, or refuses it.
    pub(crate) fn check(&self, who: &Principal, class: Class) -> Result<(), Status> {
        if who.is_operator() || self.take(who.name(), class, Instant::now()) {
            return Ok(());
        }
        let (what, rate) = match class {
            Class::Read => ("reads", self.limits.reads),
            Class::Write => ("writes", self.limits.writes),
        };
        metrics::counter!(RATE_LIMITED, "class" => what).increment(1);
        let message = format!(
            "rate limit exceeded: this server takes {} {what} a second from you, {} at once; slow down and retry",
            rate.per_second, rate.burst
        );
        Err(to_status(Code::Exhausted, &message))
    }

    fn take(&self, name: &str, class: Class, now: Instant) -> bool {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if !counted.contains_key(name) {
            if counted.len() >= COUNTED_KEPT {
                counted.retain(|_, one| !one.reads.is_full(now) || !one.writes.is_full(now));
            }
            let fresh = Counted {
                reads: Bucket::full(now),
                writes: Bucket::full(now),
            };
            counted.insert(name.to_owned(), fresh);
        }
        let Some(one) = counted.get_mut(name) else {
            return false;
        };
        match class {
            Class::Read => one.reads.take(self.limits.reads, now),
            Class::Write => one.writes.take(self.limits.writes, now),
        }
    }
}

// === impl Bucket ===

impl Bucket {
    pub(crate) fn full(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Takes a token, if there is one.
    pub(crate) fn take(&mut self, rate: Rate, now: Instant) -> bool {
        let empty = self.is_empty(rate, now);
        if !empty {
            self.full_at = self.full_at.max(now) + rate.interval();
        }
        !empty
    }

    pub(crate) fn is_empty(&self, rate: Rate, now: Instant) -> bool {
        let missing = self.full_at.saturating_duration_since(now);
        missing + rate.interval() > rate.interval() * rate.burst.max(1)
    }

    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Rate = Rate {
        per_second: 2,
        burst: 3,
    };

    fn limiter() -> Limiter {
        Limiter::new(RateLimits {
            reads: SLOW,
            writes: SLOW,
        })
    }

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let now = Instant::now();
        let mut bucket = Bucket::full(now);
        let burst = (0..10).filter(|_| bucket.take(SLOW, now)).count();
        assert_eq!(burst, 3);
        let later = now + Duration::from_millis(500);
        assert!(bucket.take(SLOW, later));
        assert!(!bucket.take(SLOW, later));
        let much_later = now + Duration::from_secs(60);
        assert!(bucket.is_full(much_later));
        assert_eq!((0..10).filter(|_| bucket.take(SLOW, much_later)).count(), 3);
    }

    #[test]
    fn reads_writes_and_principals_do_not_use_up_each_others() {
        let limiter = limiter();
        let now = Instant::now();
        let all = |name: &str, class| (0..10).filter(|_| limiter.take(name, class, now)).count();
        assert_eq!(all("ann", Class::Write), 3);
        assert_eq!(all("ann", Class::Read), 3);
        assert_eq!(all("bob", Class::Write), 3);
    }

    #[test]
    fn those_who_run_the_server_are_not_counted() {
        let limiter = limiter();
        let local = Principal::local();
        assert!((0..100).all(|_| limiter.check(&local, Class::Write).is_ok()));
        let user = Principal::certificate("x");
        let refused = (0..4).find_map(|_| limiter.check(&user, Class::Write).err());
        let refused = refused.unwrap();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(k8e_api::status::retry_after(&refused).is_some());
    }

    #[test]
    fn quiet_principals_are_forgotten() {
        let limiter = limiter();
        let now = Instant::now();
        for n in 0..COUNTED_KEPT {
            limiter.take(&n.to_string(), Class::Read, now);
        }
        limiter.take("late", Class::Read, now + Duration::from_secs(60));
        assert_eq!(limiter.counted.lock().unwrap().len(), 1);
    }

    #[test]
    fn what_is_not_known_to_look_is_a_write() {
        assert_eq!(Class::of("/k8e.v1.Sandboxes/GetSession"), Class::Read);
        assert_eq!(Class::of("/k8e.v1.Sandboxes/ListFiles"), Class::Read);
        assert_eq!(Class::of("/k8e.v1.Sandboxes/FindRunSession"), Class::Read);
        assert_eq!(Class::of("/grpc.health.v1.Health/Check"), Class::Read);
        assert_eq!(Class::of("/k8e.v1.Sandboxes/Run"), Class::Write);
        let k8e = |method: &str| Class::of(&format!("/sandbox.v1.SandboxService/{method}"));
        for method in ["GetSession", "PollRun", "TerminalStream", "SnapshotList"] {
            assert_eq!(k8e(method), Class::Read, "{method}");
        }
        for method in [
            "Exec",
            "ExecStream",
            "TerminalWrite",
            "SnapshotPut",
            "Login",
        ] {
            assert_eq!(k8e(method), Class::Write, "{method}");
        }
        assert_eq!(Class::of("/k8e.v1.Identity/Login"), Class::Write);
        assert_eq!(Class::of("/"), Class::Write);
    }
}
