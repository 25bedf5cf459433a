//! One connection of a sandbox: whom it was for, and what became of it.

use super::check::{self, Denial, Ground, Pass, Said};
use super::opening::Opening;
use super::relay::{self, End, Side};
use super::socket;
use crate::gate;
use crate::ward::{Policy, Ward};
use k8e_model::egress::{DenyReason, Flow, FlowProtocol, FlowVerdict};
use std::net::{SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

/// For the real connection to be made. Clients give up after a while that is seldom shorter, and
/// one that waits holds one of the sandbox's connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Whom connections are for, and where the real ones go.
#[derive(Clone, Copy, Debug)]
pub(super) enum World {
    /// The kernel says whom it was for, and there it goes and nowhere else.
    Real,
    /// Addresses that may be reached are not a test's to reach: it says whom it was for, and a
    /// server of its own takes it.
    #[cfg(test)]
    Scripted {
        to: SocketAddrV4,
        server: SocketAddr,
    },
}

/// One connection, from the sandbox's hands to its end.
#[derive(Clone)]
pub(super) struct Visit {
    pub(super) ward: Arc<Ward>,
    /// The address and port that the sandbox connected to.
    pub(super) to: SocketAddrV4,
    pub(super) world: World,
}

// === impl World ===

impl World {
    /// The address that the sandbox connected to.
    pub(super) fn destination(self, client: &TcpStream) -> Option<SocketAddrV4> {
        match self {
            Self::Real => match client.local_addr() {
                Ok(SocketAddr::V4(to)) => Some(to),
                Ok(SocketAddr::V6(_)) | Err(_) => None,
            },
            #[cfg(test)]
            Self::Scripted { to, .. } => Some(to),
        }
    }

    fn server(self, to: SocketAddrV4) -> SocketAddr {
        match self {
            Self::Real => to.into(),
            #[cfg(test)]
            Self::Scripted { server, .. } => server,
        }
    }
}

// === impl Visit ===

impl Visit {
    /// What the address alone says.
    pub(super) fn ground(&self, policy: &Policy) -> Result<Ground, Denial> {
        check::by_address(policy, self.to, |address| {
            self.ward.is_this_machine(address)
        })
    }

    /// The decision by what the client says.
    pub(super) async fn by_said(&self, policy: &Policy, said: &Said) -> Result<Pass, Denial> {
        check::by_said(&self.ward, policy, self.to, said).await
    }

    /// The decision where clients say nothing.
    pub(super) async fn by_told(&self, policy: &Policy) -> Result<Pass, Denial> {
        check::by_told(&self.ward, policy, self.to).await
    }

    /// The real connection. The address is the one that the decision saw: nothing is resolved here.
    pub(super) async fn connect(&self, pass: &Pass) -> Result<TcpStream, Denial> {
        let connecting = TcpStream::connect(self.world.server(self.to));
        match timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(stream)) => {
                socket::prepare(&stream);
                Ok(stream)
            }
            Ok(Err(_)) | Err(_) => Err(Denial {
                name: pass.name.clone(),
                ..Denial::by(DenyReason::Unreachable)
            }),
        }
    }

    /// Connects, says what the client has said already, and carries the rest, for as long as the
    /// policy allows.
    pub(super) async fn carry(
        &self,
        client: &TcpStream,
        changes: &mut watch::Receiver<Arc<Policy>>,
        pass: &Pass,
        opening: Opening,
    ) -> Result<End, Denial> {
        let carried = async {
            let upstream = self.connect(pass).await?;
            self.note_allowed(pass);
            let Some(opening) = opening.pass_on(client, &upstream).await? else {
                return Ok(End::Broken);
            };
            let client = Side {
                stream: client,
                said: &opening.by_client,
            };
            let upstream = Side {
                stream: &upstream,
                said: &opening.by_server,
            };
            Ok(relay::relay(client, upstream, self.ward.pace()).await)
        };
        tokio::select! {
            biased;
            denial = self.revoked(changes, || Some(pass.clone())) => Err(denial),
            end = carried => end,
        }
    }

    /// Waits for a policy that does not allow what has a pass now.
    pub(super) async fn revoked(
        &self,
        changes: &mut watch::Receiver<Arc<Policy>>,
        pass: impl Fn() -> Option<Pass>,
    ) -> Denial {
        loop {
            if changes.changed().await.is_err() {
                // Nobody is left to change it.
                return std::future::pending().await;
            }
            let policy = Arc::clone(&changes.borrow_and_update());
            let Some(pass) = pass() else { continue };
            if let Err(denial) = check::still(&self.ward, &policy, self.to, &pass).await {
                return denial;
            }
        }
    }

    pub(super) fn note_allowed(&self, pass: &Pass) {
        self.ward.note(Flow {
            verdict: FlowVerdict::Allowed,
            name: pass.name.as_ref().map(ToString::to_string),
            rule: Some(pass.rule.clone()),
            ..self.flow()
        });
    }

    pub(super) fn note_denied(&self, denial: &Denial) {
        self.ward.note(Flow {
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
