//! What the sockets that serve one sandbox share: its policy, what it was told, what it did.

use crate::descriptors::{Budget, Descriptors, OF_CONNECTION, OF_DNS_CONNECTION, Share};
use crate::dns::{Answers, Questions, Resolver};
use crate::journal::Journal;
use crate::machine;
use crate::metrics;
use crate::tcp::Pace;
use k8e_model::egress::{DenyList, EgressPolicy, Flow};
use std::net::Ipv4Addr;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// What one sandbox may reach, and what nobody of its kind may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Its own rules.
    pub allow: EgressPolicy,
    /// The server's and its tenant's; they win.
    pub deny: DenyList,
    /// The session whose rules these are: named in the hint of a refused request, so that the
    /// hint works as it is written. Empty when there is none.
    pub session: String,
}

/// What a sandbox may use of the network, whatever it may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Open at the same time.
    pub(crate) connections: usize,
    /// Bytes a second, both directions together.
    pub(crate) bandwidth: Option<u64>,
}

/// The sandbox that a gate guards.
pub(crate) struct Ward {
    policy: watch::Sender<Arc<Policy>>,
    resolver: Arc<Resolver>,
    answers: Answers,
    questions: Questions,
    journal: Journal,
    connections: Arc<Semaphore>,
    descriptors: Arc<Share>,
    pace: Pace,
}

/// A connection that it may have. Dropping it makes room for another.
pub(crate) struct Connection {
    _permit: OwnedSemaphorePermit,
    _descriptors: Descriptors,
}

// === impl Policy ===

impl Policy {
    /// Before a session has said what it wants.
    pub(crate) fn closed() -> Self {
        Self {
            allow: EgressPolicy::None,
            deny: DenyList::default(),
            session: String::new(),
        }
    }
}

// === impl Ward ===

impl Ward {
    /// One that may reach nothing yet.
    pub(crate) fn new(resolver: Arc<Resolver>, limits: Limits, budget: Arc<Budget>) -> Self {
        Self {
            policy: watch::Sender::new(Arc::new(Policy::closed())),
            resolver,
            answers: Answers::default(),
            questions: Questions::default(),
            journal: Journal::default(),
            connections: Arc::new(Semaphore::new(limits.connections)),
            descriptors: Arc::new(Share::new(budget)),
            pace: Pace::new(limits.bandwidth),
        }
    }

    pub(crate) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.borrow())
    }

    pub(crate) fn policy_changes(&self) -> watch::Receiver<Arc<Policy>> {
        self.policy.subscribe()
    }

    pub(crate) fn set_policy(&self, policy: Policy) {
        let denied = policy.deny.clone();
        let before = self.policy.send_replace(Arc::new(policy));
        // What it was told may rest on an alias that is denied now. Its own rules are asked about
        // each connection anyway, so a change of those leaves clients what they know.
        if before.deny != denied {
            self.answers.clear();
        }
    }

    pub(crate) fn resolver(&self) -> &Resolver {
        &self.resolver
    }

    /// What it was told of names.
    pub(crate) fn answers(&self) -> &Answers {
        &self.answers
    }

    /// What it may ask.
    pub(crate) fn questions(&self) -> &Questions {
        &self.questions
    }

    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Writes down what it tried and what became of that.
    pub(crate) fn note(&self, flow: Flow) {
        metrics::flow(&flow);
        self.journal.add(flow);
    }

    /// One of the connections it may have; none when it has them all, or as many as the server can
    /// spare.
    pub(crate) fn connection(&self) -> Option<Connection> {
        let permit = Arc::clone(&self.connections).try_acquire_owned().ok()?;
        let descriptors = self.descriptors.take(OF_CONNECTION)?;
        Some(Connection {
            _permit: permit,
            _descriptors: descriptors,
        })
    }

    /// The descriptor of a connection to its resolver; none when the server can spare none.
    pub(crate) fn dns_connection(&self) -> Option<Descriptors> {
        self.descriptors.take(OF_DNS_CONNECTION)
    }

    /// What it may use of the server.
    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Whether an address is one of the host's own, which nobody may reach.
    pub(crate) fn is_this_machine(&self, address: Ipv4Addr) -> bool {
        machine::is_local(address)
    }
}
