//! TLS listener: concurrent handshakes, each with a timeout.
//!
//! A client without a certificate may connect too, as it may send an API key. It counts as unauthenticated
//! ([`crate::connection_limit`]) from the accept until a call of it was authenticated.

use crate::auth::{Authenticator, loopback, tls};
use crate::connection::{Attached, Connection};
use crate::connection_limit::{self, ConnectionLimits, LimitReached, Limited, Slot};
use futures::{Stream, StreamExt as _};
use k8e_engine::Certificate;
use rustls::ServerConfig;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

/// A handshake is two round trips; a connection that has not finished it by then is closed.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// Each connection costs a descriptor and some buffers, about 50 KiB at most before it has authenticated. A source may
/// have half of the unauthenticated ones: an office behind one address starts many clients at once.
const LIMITS: ConnectionLimits = ConnectionLimits {
    listener: "tls",
    unauthenticated_max: 1024,
    unauthenticated_per_source_max: 512,
    authenticated_max: 1024,
    // Long enough for a person who is asked for a key.
    authenticate_within: Duration::from_secs(30),
};

/// A connection whose handshake is over.
pub(crate) type Secured = Connection<TlsStream<Limited>, TlsPeer>;

/// The client, as far as the connection identifies it.
#[derive(Clone, Debug)]
pub(crate) struct TlsPeer {
    /// Its address.
    pub(crate) address: IpAddr,
    /// The client's certificate, if it has one; an error is one without a name.
    pub(crate) certificate: Option<Result<Arc<Certificate>, Nameless>>,
    /// What the kernel says about its owner.
    pub(crate) kernel: KernelIdentity,
    slot: Arc<Slot>,
}

/// What the kernel says about the owner of a connection that comes without a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelIdentity {
    /// It was not asked: it comes from another machine, with a certificate, or the server does not trust loopback.
    NotAsked,
    /// On loopback, and not known to be of root or a member of the group.
    Refused,
    /// Root, or a member of the group.
    Trusted,
}

/// A client certificate without a usable common name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nameless;

/// Connections whose handshake is done. Never ends. With `trust_loopback` the kernel is asked who owns those
/// that come from this machine without a certificate.
pub(crate) fn accept(
    listener: TcpListener,
    config: ServerConfig,
    authenticator: Authenticator,
    trust_loopback: bool,
) -> impl Stream<Item = io::Result<Secured>> + Send {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    connection_limit::accept(listener, LIMITS)
        .map(move |stream| {
            let (acceptor, authenticator) = (acceptor.clone(), authenticator.clone());
            // In a task: a slow handshake does not delay others.
            tokio::spawn(
                async move { secure(stream, acceptor, authenticator, trust_loopback).await },
            )
        })
        .buffer_unordered(LIMITS.open_max())
        .filter_map(|done| async { done.ok().flatten().map(Ok) })
}

async fn secure(
    stream: Limited,
    acceptor: TlsAcceptor,
    authenticator: Authenticator,
    trust_loopback: bool,
) -> Option<Secured> {
    let (peer, slot) = (stream.peer(), Arc::clone(stream.slot()));
    let handshake = tokio::time::timeout(HANDSHAKE_WITHIN, acceptor.accept(stream)).await;
    let stream = match handshake {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::debug!("a TLS handshake with {peer} failed: {error}");
            return None;
        }
        Err(_) => {
            tracing::debug!("a TLS handshake with {peer} took too long");
            return None;
        }
    };
    let chain = stream.get_ref().1.peer_certificates();
    let certificate = chain.and_then(|chain| chain.first()).map(|der| {
        let certificate = tls::certificate(der).ok_or(Nameless);
        certificate.map(Arc::new)
    });
    let kernel = if trust_loopback && certificate.is_none() {
        ask_kernel(&stream.get_ref().0.stream, &authenticator)
    } else {
        KernelIdentity::NotAsked
    };
    let known = match &certificate {
        Some(Ok(certificate)) => authenticator.is_valid(certificate),
        Some(Err(Nameless)) => false,
        None => kernel == KernelIdentity::Trusted,
    };
    let peer = TlsPeer {
        address: peer.ip(),
        certificate,
        kernel,
        slot,
    };
    if known && let Err(LimitReached { authenticated_max }) = peer.authenticated() {
        // Its calls are refused with the same reason, unless the limit has room again by then.
        tracing::debug!("there are {authenticated_max} authenticated connections already");
    }
    Some(Secured {
        stream,
        attached: peer,
    })
}

fn ask_kernel(stream: &TcpStream, authenticator: &Authenticator) -> KernelIdentity {
    match loopback::peer_uid(stream) {
        Ok(uid) if authenticator.user_may_enter(uid) => KernelIdentity::Trusted,
        Ok(uid) => {
            tracing::debug!("user {uid} has no key and may not be trusted on loopback");
            KernelIdentity::Refused
        }
        Err(loopback::Unknown::NotLoopback) => KernelIdentity::NotAsked,
        Err(unknown) => {
            tracing::debug!("the owner of a connection on loopback is not known: {unknown}");
            KernelIdentity::Refused
        }
    }
}

// === impl TlsPeer ===

impl TlsPeer {
    /// The client has proved who it is: its connection gives its slot among the unauthenticated ones back.
    pub(crate) fn authenticated(&self) -> Result<(), LimitReached> {
        self.slot.authenticate()
    }
}

impl Attached for TlsPeer {}

// === impl Secured ===

impl Connected for Secured {
    type ConnectInfo = TlsPeer;
    fn connect_info(&self) -> TlsPeer {
        self.attached.clone()
    }
}
