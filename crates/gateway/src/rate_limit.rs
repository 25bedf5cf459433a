//! Per-principal rate limiter (token bucket): each principal has one bucket for reads and one for writes.
//!
//! It comes after authentication, so that no client uses up another's tokens. Operators of the server (root, the group)
//! are not limited.

use crate::metrics::RATE_LIMITED;
use k8e_api::status::to_status;
use k8e_model::{Code, Principal};
use k8e_net::token_bucket::{Rate, TokenBucket};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use tonic::Status;

/// Principals in the table before those with full buckets are dropped from it. It bounds memory; there are at most as many
/// principals as keys.
const COUNTED_KEPT: usize = 1024;

/// Rate limits of one principal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimits {
    /// Calls that only read.
    pub reads: Rate,
    /// Calls that change something, and all others.
    pub writes: Rate,
}

/// Which bucket a call is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Read,
    Write,
}

/// The buckets of all principals.
pub(crate) struct Limiter {
    limits: RateLimits,
    counted: Mutex<HashMap<String, Counted>>,
}

struct Counted {
    reads: TokenBucket,
    writes: TokenBucket,
}

// === impl RateLimits ===

impl Default for RateLimits {
    /// More than a person or an agent needs, less than what overloads a small machine.
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
    /// By the method's name, as in `/k8e.v1.Sandboxes/GetSession`. What is not known to only read is a write.
    pub(crate) fn of(path: &str) -> Self {
        let method = path.rsplit('/').next().unwrap_or_default();
        let reads = [
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
            "Export",
            "SnapshotGet",
            "SnapshotList",
            "Check",
            "ServerReflection",
        ];
        if reads.iter().any(|word| method.starts_with(word)) {
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

    /// Takes a token for a call, or refuses it with `RESOURCE_EXHAUSTED`.
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
                reads: TokenBucket::full(now),
                writes: TokenBucket::full(now),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
    fn reads_writes_and_principals_do_not_use_up_each_others() {
        let limiter = limiter();
        let now = Instant::now();
        let all = |name: &str, class| (0..10).filter(|_| limiter.take(name, class, now)).count();
        assert_eq!(all("ann", Class::Write), 3);
        assert_eq!(all("ann", Class::Read), 3);
        assert_eq!(all("bob", Class::Write), 3);
    }

    #[test]
    fn operators_are_not_limited() {
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
    fn what_is_not_known_to_read_is_a_write() {
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
