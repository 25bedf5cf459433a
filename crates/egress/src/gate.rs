//! [`Gate`]: the egress proxy of one sandbox. [`Egress`]: what all gates share.

use crate::dns::{self, Resolver};
use crate::fd_budget::Budget;
use crate::flow_log::{FlowMark, FlowStream};
use crate::netns::Sockets;
use crate::sandbox_net::{Limits, Policy, SandboxNet};
use crate::{EgressError, metrics, tcp, udp};
use k8e_model::UnixMillis;
use k8e_model::egress::{Flow, HostName};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

/// Configuration of the egress proxy, for all sandboxes of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Upstream DNS resolvers, in order of preference.
    pub upstreams: Vec<SocketAddr>,
    /// Open connections per sandbox.
    pub connections_max: usize,
    /// Bytes per second and sandbox, both directions together; none is unlimited.
    pub bandwidth: Option<u64>,
    /// File descriptor budget: descriptors that connections of all sandboxes together may have
    /// open. One sandbox gets half of them at most, less when others have some.
    pub descriptors_max: usize,
}

/// State that the gates of all sandboxes share: resolver, limits, file descriptor budget.
pub struct Egress {
    resolver: Arc<Resolver>,
    limits: Limits,
    descriptors: Arc<Budget>,
}

/// The egress proxy of one sandbox. Dropping it closes its sockets and every open connection.
pub struct Gate {
    sandbox: Arc<SandboxNet>,
    _tasks: JoinSet<()>,
}

// === impl Egress ===

impl std::fmt::Debug for Egress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Egress").finish_non_exhaustive()
    }
}

impl Egress {
    /// Registers the metrics and starts with an empty DNS cache.
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

    /// The addresses of a name, as the gates look them up: for connections of the server's own.
    ///
    /// # Errors
    ///
    /// When it has none, or no upstream answers.
    pub async fn resolve(&self, name: &HostName) -> std::io::Result<Vec<Ipv4Addr>> {
        let resolved = self.resolver.resolve(name).await;
        resolved
            .map(|resolved| resolved.addresses)
            .map_err(std::io::Error::other)
    }

    /// Serves the sockets in the network namespace of a sandbox ([`crate::tproxy`]). The policy is
    /// deny-all until [`Gate::set_policy`] is called.
    ///
    /// # Errors
    ///
    /// When the sockets cannot be registered with the reactor.
    pub fn attach(&self, sockets: Sockets) -> Result<Gate, EgressError> {
        let (resolver, descriptors) = (Arc::clone(&self.resolver), Arc::clone(&self.descriptors));
        let sandbox = Arc::new(SandboxNet::new(resolver, self.limits, descriptors));
        let step = || EgressError::step("watch the sandbox's sockets");
        let dns_udp = UdpSocket::from_std(sockets.dns_udp).map_err(step())?;
        let dns_tcp = TcpListener::from_std(sockets.dns_tcp).map_err(step())?;
        let tcp = TcpListener::from_std(sockets.tcp).map_err(step())?;
        let udp = UdpSocket::from_std(sockets.udp).map_err(step())?;
        let mut tasks = JoinSet::new();
        tasks.spawn(dns::serve_udp(Arc::clone(&sandbox), dns_udp));
        tasks.spawn(dns::serve_tcp(Arc::clone(&sandbox), dns_tcp));
        tasks.spawn(tcp::serve(Arc::clone(&sandbox), tcp));
        tasks.spawn(udp::serve(Arc::clone(&sandbox), udp));
        Ok(Gate {
            sandbox,
            _tasks: tasks,
        })
    }
}

// === impl Gate ===

impl Gate {
    /// Replaces the policy. Open connections are checked again and closed if it denies them.
    pub fn set_policy(&self, policy: Policy) {
        self.sandbox.set_policy(policy);
    }

    /// The flow log so far and, with `follow`, new entries as they come.
    #[must_use]
    pub fn flows(&self, follow: bool) -> FlowStream {
        self.sandbox.flow_log().read(follow)
    }

    /// The current position in the flow log, for [`Self::denied_since`].
    #[must_use]
    pub fn mark(&self) -> FlowMark {
        self.sandbox.flow_log().mark()
    }

    /// Flows that the policy denied since `mark`: each name once, at most 16.
    #[must_use]
    pub fn denied_since(&self, mark: FlowMark) -> Vec<Flow> {
        self.sandbox.flow_log().denied_since(mark)
    }
}

pub(crate) fn now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    })
}
