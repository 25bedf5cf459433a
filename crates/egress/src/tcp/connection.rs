//! One proxied connection of a sandbox: its original destination, policy check, upstream connection and
//! flow log entries.

use super::hello_retry::Prefix;
use super::policy_check::{self, AddressVerdict, Denial, Grant, RequestedName};
use super::relay::{self, End, Endpoint};
use super::socket;
use crate::gate;
use crate::sandbox_net::{Policy, SandboxNet};
use k8e_model::egress::{DenyReason, Flow, FlowProtocol, FlowVerdict};
use std::net::{SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

/// Connect timeout of the upstream. Clients rarely give up earlier, and while it waits it holds a
/// connection permit of the sandbox.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How original destinations are found and upstreams are dialled.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dialer {
    /// TPROXY gives the original destination, and exactly that is dialled.
    Real,
    /// A test sets the original destination and dials a server on loopback.
    #[cfg(test)]
    Test {
        to: SocketAddrV4,
        server: SocketAddr,
    },
}

/// One connection of a sandbox, from `accept` to its end.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) sandbox: Arc<SandboxNet>,
    /// Original destination: the address and port that the sandbox connected to.
    pub(super) to: SocketAddrV4,
    pub(super) dialer: Dialer,
}

// === impl Dialer ===

impl Dialer {
    /// The original destination.
    pub(super) fn destination(self, client: &TcpStream) -> Option<SocketAddrV4> {
        match self {
            Self::Real => match client.local_addr() {
                Ok(SocketAddr::V4(to)) => Some(to),
                Ok(SocketAddr::V6(_)) | Err(_) => None,
            },
            #[cfg(test)]
            Self::Test { to, .. } => Some(to),
        }
    }

    fn server(self, to: SocketAddrV4) -> SocketAddr {
        match self {
            Self::Real => to.into(),
            #[cfg(test)]
            Self::Test { server, .. } => server,
        }
    }
}

// === impl Connection ===

impl Connection {
    /// The policy check by address, before a byte is read.
    pub(super) fn address_verdict(&self, policy: &Policy) -> Result<AddressVerdict, Denial> {
        policy_check::by_address(policy, self.to, |address| {
            self.sandbox.is_host_address(address)
        })
    }

    /// The policy check by the name that the client requests (SNI or `Host`).
    pub(super) async fn by_requested_name(
        &self,
        policy: &Policy,
        requested: &RequestedName,
    ) -> Result<Grant, Denial> {
        policy_check::by_requested_name(&self.sandbox, policy, self.to, requested).await
    }

    /// The policy check for protocols without a name, by the DNS replies that were sent.
    pub(super) async fn by_sent_replies(&self, policy: &Policy) -> Result<Grant, Denial> {
        policy_check::by_sent_replies(&self.sandbox, policy, self.to).await
    }

    /// Opens the upstream connection, to the address that was checked: nothing is resolved here.
    pub(super) async fn connect(&self, grant: &Grant) -> Result<TcpStream, Denial> {
        let connecting = TcpStream::connect(self.dialer.server(self.to));
        match timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(stream)) => {
                socket::prepare(&stream);
                Ok(stream)
            }
            Ok(Err(_)) | Err(_) => Err(Denial {
                name: grant.name.clone(),
                ..Denial::by(DenyReason::Unreachable)
            }),
        }
    }

    /// Connects, forwards what was read already, and relays the rest, for as long as the policy allows.
    pub(super) async fn relay(
        &self,
        client: &TcpStream,
        changes: &mut watch::Receiver<Arc<Policy>>,
        grant: &Grant,
        prefix: Prefix,
    ) -> Result<End, Denial> {
        let relayed = async {
            let upstream = self.connect(grant).await?;
            self.note_allowed(grant);
            let Some(prefix) = prefix.forward(client, &upstream).await? else {
                return Ok(End::Broken);
            };
            let client = Endpoint {
                stream: client,
                pending: &prefix.from_client,
            };
            let upstream = Endpoint {
                stream: &upstream,
                pending: &prefix.from_server,
            };
            Ok(relay::relay(client, upstream, self.sandbox.rate_limit()).await)
        };
        tokio::select! {
            biased;
            denial = self.revoked(changes, || Some(grant.clone())) => Err(denial),
            end = relayed => end,
        }
    }

    /// Waits for a policy change that denies the connection.
    pub(super) async fn revoked(
        &self,
        changes: &mut watch::Receiver<Arc<Policy>>,
        grant: impl Fn() -> Option<Grant>,
    ) -> Denial {
        loop {
            if changes.changed().await.is_err() {
                // The sender is gone: the policy does not change any more.
                return std::future::pending().await;
            }
            let policy = Arc::clone(&changes.borrow_and_update());
            let Some(grant) = grant() else { continue };
            if let Err(denial) =
                policy_check::recheck(&self.sandbox, &policy, self.to, &grant).await
            {
                return denial;
            }
        }
    }

    pub(super) fn note_allowed(&self, grant: &Grant) {
        self.sandbox.note(Flow {
            verdict: FlowVerdict::Allowed,
            name: grant.name.as_ref().map(ToString::to_string),
            rule: Some(grant.rule.clone()),
            ..self.flow()
        });
    }

    pub(super) fn note_denied(&self, denial: &Denial) {
        self.sandbox.note(Flow {
            name: denial.name.as_ref().map(ToString::to_string),
            rule: denial.rule.clone(),
            reason: Some(denial.reason),
            ..self.flow()
        });
    }

    fn flow(&self) -> Flow {
        Flow {
            at: gate::now(),
            verdict: FlowVerdict::Denied,
            protocol: FlowProtocol::Tcp,
            name: None,
            address: Some(*self.to.ip()),
            port: Some(self.to.port()),
            rule: None,
            reason: None,
            count: 1,
        }
    }
}
