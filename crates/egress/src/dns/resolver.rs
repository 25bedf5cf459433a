//! Caching stub resolver for all sandboxes: queries upstreams, follows CNAMEs, caches.
//!
//! Nothing about the client gets here: its input is a lower case name, and it queries A records only.
//! Whether a name may be resolved, and which addresses may be returned, is decided in
//! [`super::lookup()`].

use super::reply::{self, CHAIN_MAX, Record, Reply};
use super::single_flight::{Begin, Lookup, SingleFlight};
use super::upstream;
use k8e_model::egress::HostName;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// Minimum cache time, even for a TTL of 0: the connection that follows a query is checked against
/// the same resolution.
pub(super) const TTL_MIN: Duration = Duration::from_secs(5);

/// Maximum cache time: operators who move a service expect clients to follow within minutes.
pub(super) const TTL_MAX: Duration = Duration::from_secs(300);

/// Negative cache time (NXDOMAIN, no A record). Short: the name may just have been created.
const NEGATIVE_TTL: Duration = Duration::from_secs(5);

/// Cache time of a failure of all upstreams. Clients retry at once, several times.
const FAILED_TTL: Duration = Duration::from_secs(1);

/// Concurrent lookups of all sandboxes together; each uses a socket. One sandbox may have
/// [`super::query_limits::LOOKUPS_MAX`] of them.
const LOOKUPS_MAX: usize = 512;

/// Minimum number of attempts for one query, over all upstreams.
const TRIES_MIN: usize = 3;

/// Timeouts of a lookup.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Per attempt: one query to one upstream. Three of them fit the total.
    pub(super) once: Duration,
    /// Total of a lookup. Less than the 5 seconds after which clients give up.
    pub(super) whole: Duration,
}

/// The resolver of the server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Resolver {
    shared: Arc<Shared>,
}

/// The addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// The CNAME chain after the queried name; the last has the addresses.
    pub(crate) names: Vec<HostName>,
    /// At least one, at most [`reply::ADDRESSES_MAX`].
    pub(crate) addresses: Vec<Ipv4Addr>,
    /// Remaining time to live.
    pub(crate) ttl: Duration,
}

/// Why a name has no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum ResolveError {
    /// NXDOMAIN.
    #[error("there is no such name")]
    NoName,
    /// The name exists, without an A record.
    #[error("the name has no IPv4 address")]
    NoAddress,
    /// The CNAME chain is too long, a loop, or ends at an invalid host name.
    #[error("the name's aliases lead to no host")]
    BadAliasChain,
    /// No upstream replied in time.
    #[error("no upstream resolver answered")]
    Failed,
}

/// Result of a lookup; the TTL counts from its end.
type Outcome = Result<Arc<Resolved>, ResolveError>;

struct Shared {
    upstreams: Vec<SocketAddr>,
    /// Index of the upstream that replied last: it is queried first.
    first: AtomicUsize,
    timing: Timing,
    lookups: Arc<Semaphore>,
    single_flight: Arc<SingleFlight<Outcome>>,
}

// === impl Timing ===

impl Default for Timing {
    fn default() -> Self {
        Self {
            once: Duration::from_millis(1500),
            whole: Duration::from_millis(4500),
        }
    }
}

// === impl Resolver ===

impl Resolver {
    /// A resolver with these upstreams, in order of preference, and an empty cache.
    pub(crate) fn new(upstreams: Vec<SocketAddr>) -> Self {
        Self::with_timing(upstreams, Timing::default())
    }

    pub(super) fn with_timing(upstreams: Vec<SocketAddr>, timing: Timing) -> Self {
        let shared = Shared {
            upstreams,
            first: AtomicUsize::new(0),
            timing,
            lookups: Arc::new(Semaphore::new(LOOKUPS_MAX)),
            single_flight: Arc::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// The addresses of a name, from the cache or from an upstream.
    ///
    /// Concurrent calls for one name share a lookup. Dropping the future does not cancel it: it goes on
    /// in a task and fills the cache.
    pub(crate) async fn resolve(&self, name: &HostName) -> Result<Resolved, ResolveError> {
        if let Some(known) = self.known(name) {
            return known;
        }
        let looked = timeout(self.shared.timing.whole, self.look(name)).await;
        let resolved = looked.unwrap_or(Err(ResolveError::Failed))?;
        Ok(Resolved::clone(&resolved))
    }

    /// The cached resolution.
    pub(super) fn known(&self, name: &HostName) -> Option<Result<Resolved, ResolveError>> {
        let now = Instant::now();
        let (outcome, end) = self.shared.single_flight.known(name, now)?;
        Some(outcome.map(|resolved| Resolved {
            ttl: end.duration_since(now),
            ..Resolved::clone(&resolved)
        }))
    }

    async fn look(&self, name: &HostName) -> Outcome {
        let single_flight = &self.shared.single_flight;
        let flight = match single_flight.flying(name) {
            Some(flight) => flight,
            None => {
                // Waiting for the permit here, and not in a task, bounds the number of tasks.
                let permit = Arc::clone(&self.shared.lookups).acquire_owned().await;
                let permit = permit.map_err(|_| ResolveError::Failed)?;
                match single_flight.begin(name) {
                    Begin::Known(outcome) => return outcome,
                    Begin::Wait(flight) => flight,
                    Begin::Mine(lookup, flight) => {
                        tokio::spawn(Arc::clone(&self.shared).run(lookup, permit));
                        flight
                    }
                }
            }
        };
        flight.wait().await.unwrap_or(Err(ResolveError::Failed))
    }
}

// === impl Shared ===

impl Shared {
    async fn run(self: Arc<Self>, lookup: Lookup<Outcome>, _permit: OwnedSemaphorePermit) {
        let walked = timeout(self.timing.whole, self.walk(lookup.name())).await;
        let outcome = walked.unwrap_or(Err(ResolveError::Failed)).map(Arc::new);
        let ttl = match &outcome {
            Ok(resolved) => resolved.ttl,
            Err(ResolveError::Failed) => FAILED_TTL,
            Err(ResolveError::NoName | ResolveError::NoAddress | ResolveError::BadAliasChain) => {
                NEGATIVE_TTL
            }
        };
        lookup.end(outcome, ttl);
    }

    /// Follows the CNAME chain to its addresses, with as many queries as that takes.
    async fn walk(&self, name: &HostName) -> Result<Resolved, ResolveError> {
        let mut names: Vec<HostName> = Vec::new();
        let mut ttl = u32::MAX;
        // Each query extends the chain by at least one name, or is the last.
        loop {
            let records = self.query(names.last().unwrap_or(name)).await?;
            let steps = CHAIN_MAX - names.len();
            let led = reply::follow(&records, names.last().unwrap_or(name), steps)
                .map_err(|_| ResolveError::BadAliasChain)?;
            ttl = ttl.min(led.ttl);
            let end = led.chain.is_empty();
            names.extend(led.chain);
            if !led.addresses.is_empty() {
                return Ok(Resolved {
                    names,
                    addresses: led.addresses,
                    ttl: Duration::from_secs(ttl.into()).clamp(TTL_MIN, TTL_MAX),
                });
            }
            if end {
                return Err(ResolveError::NoAddress);
            }
        }
    }

    /// Queries one upstream after the other, starting with the one that replied last.
    async fn query(&self, name: &HostName) -> Result<Vec<Record>, ResolveError> {
        let count = self.upstreams.len();
        let first = self.first.load(Ordering::Relaxed);
        let tries = match count {
            0 => 0,
            count => count.max(TRIES_MIN),
        };
        for at in (first..).take(tries).map(|at| at % count) {
            let upstream = self.upstreams[at];
            match timeout(self.timing.once, upstream::query(upstream, name)).await {
                Ok(Ok(Reply::Records(records))) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Ok(records);
                }
                Ok(Ok(Reply::NoName)) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Err(ResolveError::NoName);
                }
                Ok(Ok(Reply::Failed | Reply::Truncated)) | Err(_) => {}
                Ok(Err(error)) => tracing::debug!(%upstream, %error, "upstream DNS query failed"),
            }
        }
        Err(ResolveError::Failed)
    }
}

#[cfg(test)]
mod tests;
