//! Per-sandbox network state: policy, DNS replies sent, limits and flow log, shared by all sockets
//! that serve one sandbox.

use crate::dns::{QueryLimits, Resolver, SentReplies};
use crate::fd_budget::{Budget, CONNECTION_FDS, DNS_CONNECTION_FDS, Descriptors, Share};
use crate::flow_log::FlowLog;
use crate::host_address;
use crate::metrics;
use crate::tcp::RateLimit;
use k8e_model::egress::{DenyList, EgressPolicy, Flow};
use std::net::Ipv4Addr;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The egress policy of one sandbox: allow list and deny list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The allow list of the session.
    pub allow: EgressPolicy,
    /// The deny lists of the server and of the tenant. They take precedence over `allow`.
    pub deny: DenyList,
    /// Id of the session, for the hint in the body of a 403 response: the command in it can be
    /// copied as it is. Empty for a sandbox without a session.
    pub session: String,
}

/// Per-sandbox resource limits of the network, the same for all sandboxes of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Connections that may be open at the same time.
    pub(crate) connections: usize,
    /// Bytes per second, both directions together; none is unlimited.
    pub(crate) bandwidth: Option<u64>,
}

/// The network state of one sandbox.
pub(crate) struct SandboxNet {
    policy: watch::Sender<Arc<Policy>>,
    resolver: Arc<Resolver>,
    sent_replies: SentReplies,
    query_limits: QueryLimits,
    flow_log: FlowLog,
    connections: Arc<Semaphore>,
    descriptors: Arc<Share>,
    rate_limit: RateLimit,
}

/// A permit for one open connection: counted against the sandbox's limit and the file descriptor
/// budget of the server. Dropping it gives both back.
pub(crate) struct ConnectionPermit {
    _permit: OwnedSemaphorePermit,
    _descriptors: Descriptors,
}

// === impl Policy ===

impl Policy {
    /// The policy before a session sets one: deny everything.
    pub(crate) fn closed() -> Self {
        Self {
            allow: EgressPolicy::None,
            deny: DenyList::default(),
            session: String::new(),
        }
    }
}

// === impl SandboxNet ===

impl SandboxNet {
    /// State of a new sandbox, with the policy [`Policy::closed`].
    pub(crate) fn new(resolver: Arc<Resolver>, limits: Limits, budget: Arc<Budget>) -> Self {
        Self {
            policy: watch::Sender::new(Arc::new(Policy::closed())),
            resolver,
            sent_replies: SentReplies::default(),
            query_limits: QueryLimits::default(),
            flow_log: FlowLog::default(),
            connections: Arc::new(Semaphore::new(limits.connections)),
            descriptors: Arc::new(Share::new(budget)),
            rate_limit: RateLimit::new(limits.bandwidth),
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
        // Replies that were sent may rest on a CNAME that is denied now. The allow list is checked
        // for each connection anyway, so after a change of it addresses in use stay valid.
        if before.deny != denied {
            self.sent_replies.clear();
        }
    }

    pub(crate) fn resolver(&self) -> &Resolver {
        &self.resolver
    }

    /// Names and addresses of the DNS replies that were sent to this sandbox.
    pub(crate) fn sent_replies(&self) -> &SentReplies {
        &self.sent_replies
    }

    /// Rate limits of its DNS queries.
    pub(crate) fn query_limits(&self) -> &QueryLimits {
        &self.query_limits
    }

    pub(crate) fn flow_log(&self) -> &FlowLog {
        &self.flow_log
    }

    /// Adds to the flow log and counts in the metrics.
    pub(crate) fn note(&self, flow: Flow) {
        metrics::flow(&flow);
        self.flow_log.add(flow);
    }

    /// A permit for one more connection; none at the sandbox's connection limit, or when the file
    /// descriptor budget of the server is used up.
    pub(crate) fn connection(&self) -> Option<ConnectionPermit> {
        let permit = Arc::clone(&self.connections).try_acquire_owned().ok()?;
        let descriptors = self.descriptors.take(CONNECTION_FDS)?;
        Some(ConnectionPermit {
            _permit: permit,
            _descriptors: descriptors,
        })
    }

    /// The file descriptor of a DNS connection over TCP; none when the budget is used up.
    pub(crate) fn dns_connection(&self) -> Option<Descriptors> {
        self.descriptors.take(DNS_CONNECTION_FDS)
    }

    /// Rate limit of bytes and CPU work that the server spends on this sandbox.
    pub(crate) fn rate_limit(&self) -> &RateLimit {
        &self.rate_limit
    }

    /// Whether an address belongs to the host, which no policy may allow.
    pub(crate) fn is_host_address(&self, address: Ipv4Addr) -> bool {
        host_address::is_host_address(address)
    }
}
