//! Connections over TLS: handshakes side by side, each with little time, and room for who is known.
//!
//! Who has no certificate comes in too, for an API key may follow. Until it does he is a stranger,
//! so strangers have a part of the door to themselves, each address a part of that, and all of them
//! little time.

use crate::auth::{loopback, peer, tls};
use crate::listen::{Bounded, Counted};
use futures::{Stream, StreamExt as _};
use k8e_engine::Certificate;
use rustls::ServerConfig;
use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

/// A stranger may hold a connection for this long before he must have finished his handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// Connections without a certificate, and those of one address: half of the door, and a part of
/// that. The other half is for certificates of ours.
const STRANGERS_MAX: usize = 512;
const STRANGERS_PER_ADDRESS_MAX: usize = 128;

/// A stranger must have sent a key that is right by then.
const KNOWN_WITHIN: Duration = Duration::from_secs(30);

/// A connection whose handshake is over.
pub(crate) struct Secured {
    stream: TlsStream<Counted<TcpStream>>,
    peer: TlsPeer,
    patience: Option<Patience>,
}

/// Who is at the other end, as far as the connection tells.
#[derive(Clone, Debug)]
pub(crate) struct TlsPeer {
    /// From where.
    pub(crate) address: IpAddr,
    /// His certificate, if he has one; an error is one without a name.
    pub(crate) certificate: Option<Result<Arc<Certificate>, Nameless>>,
    /// What the kernel says about its owner.
    pub(crate) kernel: KernelIdentity,
    /// While he is a stranger, his place among them.
    stranger: Place,
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

type Place = Arc<Mutex<Option<Stranger>>>;

/// Waits for a stranger to become known, not for ever.
struct Patience {
    stranger: Place,
    until: Pin<Box<Sleep>>,
}

/// A certificate that says of nobody that it is his.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nameless;

/// Connections without a certificate.
#[derive(Debug, Default)]
struct Strangers {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// One of them, counted until it is dropped.
#[derive(Debug)]
struct Stranger {
    strangers: Arc<Mutex<Strangers>>,
    address: IpAddr,
}

/// Connections as they come out of their handshakes, at most `connections_max` at once. Never ends. With a `trusted_group` its
/// members, and root, need no certificate on loopback.
pub(crate) fn accept(
    listener: TcpListener,
    connections_max: usize,
    config: ServerConfig,
    trusted_group: Option<String>,
) -> impl Stream<Item = io::Result<Secured>> + Send {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let strangers = Arc::new(Mutex::new(Strangers::default()));
    let trusted_group: Option<Arc<str>> = trusted_group.map(Into::into);
    Bounded::new(listener, connections_max)
        .stream()
        .filter_map(|accepted| async { accepted.ok() })
        .map(move |stream| {
            let (acceptor, strangers) = (acceptor.clone(), Arc::clone(&strangers));
            let trusted_group = trusted_group.clone();
            // In a task: nobody's handshake waits for somebody else's turn to be asked.
            tokio::spawn(async move { secure(stream, acceptor, strangers, trusted_group).await })
        })
        .buffer_unordered(connections_max)
        .filter_map(|done| async { done.ok().flatten().map(Ok) })
}

async fn secure(
    stream: Counted<TcpStream>,
    acceptor: TlsAcceptor,
    strangers: Arc<Mutex<Strangers>>,
    trusted_group: Option<Arc<str>>,
) -> Option<Secured> {
    let peer = stream.get_ref().peer_addr().ok()?;
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
    let kernel = match trusted_group {
        Some(group) if certificate.is_none() => ask_kernel(stream.get_ref().0.get_ref(), &group),
        _ => KernelIdentity::NotAsked,
    };
    let stranger = if certificate.is_none() && kernel != KernelIdentity::Trusted {
        let Some(stranger) = Stranger::enter(&strangers, peer.ip().to_canonical()) else {
            tracing::debug!("too many connections without a certificate: {peer} is sent away");
            return None;
        };
        Some(stranger)
    } else {
        None
    };
    let patience = stranger.is_some();
    let stranger = Arc::new(Mutex::new(stranger));
    Some(Secured {
        stream,
        patience: patience.then(|| Patience::new(&stranger)),
        peer: TlsPeer {
            address: peer.ip(),
            certificate,
            kernel,
            stranger,
        },
    })
}

fn ask_kernel(stream: &TcpStream, group: &str) -> KernelIdentity {
    match loopback::peer_uid(stream) {
        Ok(uid) if peer::user_may_enter(uid, group) => KernelIdentity::Trusted,
        Ok(uid) => {
            tracing::debug!("a connection on loopback is of user {uid}, who is not in {group}");
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
    /// He has sent a key that is right: his place among strangers is free, and his time his own.
    pub(crate) fn is_known(&self) {
        let place = self.stranger.lock();
        drop(place.unwrap_or_else(PoisonError::into_inner).take());
    }
}

// === impl Patience ===

impl Patience {
    fn new(stranger: &Place) -> Self {
        Self {
            stranger: Arc::clone(stranger),
            until: Box::pin(tokio::time::sleep(KNOWN_WITHIN)),
        }
    }

    /// None while there is nothing to say yet; then whether he is known.
    fn poll_known(&mut self, context: &mut Context<'_>) -> Option<bool> {
        let place = self.stranger.lock().unwrap_or_else(PoisonError::into_inner);
        if place.is_none() {
            return Some(true);
        }
        drop(place);
        self.until
            .as_mut()
            .poll(context)
            .is_ready()
            .then_some(false)
    }
}

// === impl Stranger ===

impl Stranger {
    /// None when there are too many.
    fn enter(strangers: &Arc<Mutex<Strangers>>, address: IpAddr) -> Option<Self> {
        let mut all = strangers.lock().unwrap_or_else(PoisonError::into_inner);
        let from_there = all.by_address.get(&address).copied().unwrap_or(0);
        if all.all >= STRANGERS_MAX || from_there >= STRANGERS_PER_ADDRESS_MAX {
            return None;
        }
        all.all += 1;
        all.by_address.insert(address, from_there + 1);
        Some(Self {
            strangers: Arc::clone(strangers),
            address,
        })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut all = self
            .strangers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.all -= 1;
        if let Some(from_there) = all.by_address.get_mut(&self.address) {
            *from_there -= 1;
            if *from_there == 0 {
                all.by_address.remove(&self.address);
            }
        }
    }
}

// === impl Secured ===

impl Connected for Secured {
    type ConnectInfo = TlsPeer;
    fn connect_info(&self) -> TlsPeer {
        self.peer.clone()
    }
}

impl AsyncRead for Secured {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(patience) = &mut self.patience {
            match patience.poll_known(context) {
                Some(true) => self.patience = None,
                Some(false) => return Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                None => {}
            }
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stranger_becomes_known_or_goes() {
        let strangers = Arc::default();
        let place = || {
            let address = IpAddr::V4(1.into());
            Arc::new(Mutex::new(Stranger::enter(&strangers, address)))
        };
        let known = async |stranger: &Place| {
            let mut patience = Patience::new(stranger);
            std::future::poll_fn(|context| match patience.poll_known(context) {
                Some(known) => Poll::Ready(known),
                None => Poll::Pending,
            })
            .await
        };
        assert!(!known(&place()).await, "time passes, and nothing comes");
        let stranger = place();
        drop(stranger.lock().unwrap().take());
        assert!(known(&stranger).await);
        assert_eq!(strangers.lock().unwrap().all, 0);
    }

    #[test]
    fn strangers_have_their_part_and_each_address_a_part_of_that() {
        let strangers = Arc::default();
        let enter = |n: u32| Stranger::enter(&strangers, IpAddr::V4(n.into()));
        let mut held: Vec<_> = (0..1000).map_while(|_| enter(1)).collect();
        assert_eq!(held.len(), STRANGERS_PER_ADDRESS_MAX);
        held.extend((2..1000).map_while(enter));
        assert_eq!(held.len(), STRANGERS_MAX);
        drop(held);
        let table = strangers.lock().unwrap();
        assert_eq!((table.all, table.by_address.len()), (0, 0));
    }
}
