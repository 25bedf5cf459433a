//! Names to addresses, for all sandboxes: asks the upstreams, follows aliases, remembers.
//!
//! Nothing of who asks gets here: a name in its one spelling comes in, and only its addresses (A)
//! are ever asked for. Whether a name may be asked for, and what of the answer may be told, is
//! decided in [`super::look_up()`].

use super::answer::{self, Answer, CHAIN_MAX, Record};
use super::exchange;
use super::flights::{Begin, Flights, Lookup};
use k8e_model::egress::HostName;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// An answer is kept at least this long, also one with a TTL of 0: between a question and the
/// connection that follows it, which is checked against the same name, nothing may change.
pub(super) const TTL_MIN: Duration = Duration::from_secs(5);

/// And at most this long: who moves a service expects the world to follow within minutes.
pub(super) const TTL_MAX: Duration = Duration::from_secs(300);

/// How long a name has no address. Short: it may just have been made.
const NEGATIVE_TTL: Duration = Duration::from_secs(5);

/// How long nobody asks again after all upstreams failed. Clients repeat at once, several times.
const FAILED_TTL: Duration = Duration::from_secs(1);

/// Lookups at the same time, of all sandboxes together; each has a socket. One sandbox has
/// [`super::questions::LOOKUPS_MAX`] of them at most.
const LOOKUPS_MAX: usize = 512;

/// Tries for one question, over all upstreams.
const TRIES_MIN: usize = 3;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// One question to one upstream. Three of them fit the whole.
    pub(super) once: Duration,
    /// All of a lookup. Clients give up after 5 seconds: before that they are told.
    pub(super) whole: Duration,
}

/// The server's resolver. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Resolver {
    shared: Arc<Shared>,
}

/// The addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// The aliases after the asked name; the last has the addresses.
    pub(crate) names: Vec<HostName>,
    /// At least one.
    pub(crate) addresses: Vec<Ipv4Addr>,
    /// How long that holds, from now.
    pub(crate) ttl: Duration,
}

/// Why a name has no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum ResolveError {
    /// The upstreams say so.
    #[error("there is no such name")]
    NoName,
    /// It exists, without an IPv4 address.
    #[error("the name has no IPv4 address")]
    NoAddress,
    /// Its aliases have no end, or not one at a host.
    #[error("the name's aliases lead to no host")]
    LeadsNowhere,
    /// No upstream answered in time.
    #[error("no upstream resolver answered")]
    Failed,
}

/// How a lookup ended; the TTL is as of then.
type Outcome = Result<Arc<Resolved>, ResolveError>;

struct Shared {
    upstreams: Vec<SocketAddr>,
    /// The one that answered last: the first that is asked.
    first: AtomicUsize,
    timing: Timing,
    lookups: Arc<Semaphore>,
    flights: Arc<Flights<Outcome>>,
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
    /// One that asks these, in this order.
    pub(crate) fn new(upstreams: Vec<SocketAddr>) -> Self {
        Self::with_timing(upstreams, Timing::default())
    }

    pub(super) fn with_timing(upstreams: Vec<SocketAddr>, timing: Timing) -> Self {
        let shared = Shared {
            upstreams,
            first: AtomicUsize::new(0),
            timing,
            lookups: Arc::new(Semaphore::new(LOOKUPS_MAX)),
            flights: Arc::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// The addresses of a name: what is known already, or what an upstream says now.
    ///
    /// Whoever asks for a name that is being asked for gets that answer. Dropping this loses
    /// nothing: the lookup goes on for those who come next.
    pub(crate) async fn resolve(&self, name: &HostName) -> Result<Resolved, ResolveError> {
        if let Some(known) = self.known(name) {
            return known;
        }
        let looked = timeout(self.shared.timing.whole, self.look(name)).await;
        let resolved = looked.unwrap_or(Err(ResolveError::Failed))?;
        Ok(Resolved::clone(&resolved))
    }

    /// What is known already.
    pub(super) fn known(&self, name: &HostName) -> Option<Result<Resolved, ResolveError>> {
        let now = Instant::now();
        let (outcome, end) = self.shared.flights.known(name, now)?;
        Some(outcome.map(|resolved| Resolved {
            ttl: end.duration_since(now),
            ..Resolved::clone(&resolved)
        }))
    }

    async fn look(&self, name: &HostName) -> Outcome {
        let flights = &self.shared.flights;
        let flight = match flights.flying(name) {
            Some(flight) => flight,
            None => {
                // Waiting in turn here, and not in a task, bounds the tasks.
                let permit = Arc::clone(&self.shared.lookups).acquire_owned().await;
                let permit = permit.map_err(|_| ResolveError::Failed)?;
                match flights.begin(name) {
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
            Err(ResolveError::NoName | ResolveError::NoAddress | ResolveError::LeadsNowhere) => {
                NEGATIVE_TTL
            }
        };
        lookup.end(outcome, ttl);
    }

    /// From the name to its addresses, over as many questions as that takes.
    async fn walk(&self, name: &HostName) -> Result<Resolved, ResolveError> {
        let mut names: Vec<HostName> = Vec::new();
        let mut ttl = u32::MAX;
        // Each question takes one step at least, or is the last.
        loop {
            let records = self.ask(names.last().unwrap_or(name)).await?;
            let steps = CHAIN_MAX - names.len();
            let led = answer::follow(&records, names.last().unwrap_or(name), steps)
                .map_err(|_| ResolveError::LeadsNowhere)?;
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

    /// Asks one upstream after the other, from the one that answered last.
    async fn ask(&self, name: &HostName) -> Result<Vec<Record>, ResolveError> {
        let count = self.upstreams.len();
        let first = self.first.load(Ordering::Relaxed);
        let tries = match count {
            0 => 0,
            count => count.max(TRIES_MIN),
        };
        for at in (first..).take(tries).map(|at| at % count) {
            let upstream = self.upstreams[at];
            match timeout(self.timing.once, exchange::ask(upstream, name)).await {
                Ok(Ok(Answer::Records(records))) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Ok(records);
                }
                Ok(Ok(Answer::NoName)) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Err(ResolveError::NoName);
                }
                Ok(Ok(Answer::Failed | Answer::Truncated)) | Err(_) => {}
                Ok(Err(error)) => tracing::debug!(%upstream, %error, "no answer to a DNS question"),
            }
        }
        Err(ResolveError::Failed)
    }
}

#[cfg(test)]
mod tests;
