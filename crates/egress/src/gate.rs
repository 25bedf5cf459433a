//! The gates of all sandboxes, and one of them.

use crate::descriptors::Budget;
use crate::dns::{self, Resolver};
use crate::journal::{FlowMark, FlowStream};
use crate::netns::Sockets;
use crate::ward::{Limits, Policy, Ward};
use crate::{EgressError, metrics, tcp, udp};
use k8e_model::UnixMillis;
use k8e_model::egress::Flow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

/// What an operator decides for all sandboxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Who is asked for names, in this order.
    pub upstreams: Vec<SocketAddr>,
    /// Connections of one sandbox at the same time.
    pub connections_max: usize,
    /// Bytes a second of one sandbox, both directions together.
    pub bandwidth: Option<u64>,
    /// Descriptors that connections of all sandboxes together may have open. One sandbox gets half of
    /// them at most, less when others have some.
    pub descriptors_max: usize,
}

/// Makes gates.
pub struct Egress {
    resolver: Arc<Resolver>,
    limits: Limits,
    descriptors: Arc<Budget>,
}

/// The only way out of one sandbox. Dropping it closes it, with every connection.
pub struct Gate {
    ward: Arc<Ward>,
    _tasks: JoinSet<()>,
}

// === impl Egress ===

impl std::fmt::Debug for Egress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Egress").finish_non_exhaustive()
    }
}

impl Egress {
    /// Ready to make gates.
    #[must_use]
    pub fn start(config: Config) -> Self {
        metrics::describe();
        Self {
            resolver: Arc::new(Resolver::new(config.upstreams)),
            limits: Limits {
                connections: config.connections_max,
                bandwidth: config.bandwidth,
            },
            descriptors: Arc::new(Budget::new(config.descriptors_max)),
        }
    }

    /// Serves the sockets in the namespace of a sandbox that was wired for it ([`crate::wire`]).
    /// Nothing passes until the gate is told a policy.
    ///
    /// # Errors
    ///
    /// When the sockets cannot be watched.
    pub fn attach(&self, sockets: Sockets) -> Result<Gate, EgressError> {
        let (resolver, descriptors) = (Arc::clone(&self.resolver), Arc::clone(&self.descriptors));
        let ward = Arc::new(Ward::new(resolver, self.limits, descriptors));
        let step = || EgressError::step("watch the sandbox's network");
        let dns_udp = UdpSocket::from_std(sockets.dns_udp).map_err(step())?;
        let dns_tcp = TcpListener::from_std(sockets.dns_tcp).map_err(step())?;
        let tcp = TcpListener::from_std(sockets.tcp).map_err(step())?;
        let udp = UdpSocket::from_std(sockets.udp).map_err(step())?;
        let mut tasks = JoinSet::new();
        tasks.spawn(dns::serve_udp(Arc::clone(&ward), dns_udp));
        tasks.spawn(dns::serve_tcp(Arc::clone(&ward), dns_tcp));
        tasks.spawn(tcp::serve(Arc::clone(&ward), tcp));
        tasks.spawn(udp::serve(Arc::clone(&ward), udp));
        Ok(Gate {
            ward,
            _tasks: tasks,
        })
    }
}

// === impl Gate ===

impl Gate {
    /// From now on this holds: for new connections, and for those that are open.
    pub fn set_policy(&self, policy: Policy) {
        self.ward.set_policy(policy);
    }

    /// What the sandbox tried so far and, when asked to follow, what it will.
    #[must_use]
    pub fn flows(&self, follow: bool) -> FlowStream {
        self.ward.journal().read(follow)
    }

    /// Now, for [`Self::denied_since`].
    #[must_use]
    pub fn mark(&self) -> FlowMark {
        self.ward.journal().mark()
    }

    /// What rules denied the sandbox since then: each name once, at most 16.
    #[must_use]
    pub fn denied_since(&self, mark: FlowMark) -> Vec<Flow> {
        self.ward.journal().denied_since(mark)
    }
}

pub(crate) fn now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    })
}
