//! Connection pool of the proxy: keep-alive connections to sandboxes, with a limit.
//!
//! The key has the UID of the pod and not only its address: an address may be reused by another pod.

use super::headers::Kind;
use crate::router::body::AnyBody;
use crate::router::serve::{HEAD_BYTES_MAX, HEADERS_MAX};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

/// Idle timeout of HTTP/1.1 connections. Less than the usual keep-alive timeout of servers (5 s): a request on a
/// connection that the server is just closing would be lost.
const IDLE_MAX: Duration = Duration::from_secs(3);
/// Idle timeout of HTTP/2 connections, where the server announces the close and no request is lost.
const IDLE_HTTP2_MAX: Duration = Duration::from_secs(60);
/// Idle connections per pod and protocol.
pub(super) const IDLE_PER_POD_MAX: usize = 16;
/// Pods (and protocols) with idle connections.
const IDLE_ALL_MAX: usize = 2048;
/// Interval at which idle connections are checked.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long a connection may take to become reusable after its response. When the response was read to its end, that
/// is at once.
const FREE_WITHIN: Duration = Duration::from_millis(500);
/// How long a request waits for a permit at the connection limit. Idle connections, and those whose response was not
/// read to its end, are closed by then.
const PERMIT_WITHIN: Duration = Duration::from_secs(1);
/// HTTP/2 keep-alive: interval of pings, and timeout of their answer. Detects dead sandboxes.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(20);
/// HTTP/2 flow control (backpressure): bytes that a sandbox may send before its client has read them.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;

/// UID of the pod (or DNS name), address, and whether it is gRPC (HTTP/2).
type Key = (Box<str>, SocketAddr, bool);

/// The connection pool; see the module.
pub(in crate::router) struct Pool {
    idle: Mutex<HashMap<Key, Vec<Idle>>>,
    /// Connection limit, with idle ones: each needs a file descriptor and buffers.
    permits: Arc<Semaphore>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("the limit of connections to sandboxes is reached")]
    Full,
    #[error(transparent)]
    Dial(#[from] io::Error),
}

struct Idle {
    sender: Sender,
    since: Instant,
}

/// A connection to a sandbox, in use for one request.
pub(super) struct Upstream {
    key: Key,
    sender: Sender,
}

enum Sender {
    Http1(http1::SendRequest<AnyBody>, ConnectionGuard),
    /// For concurrent requests; the connection ends when the last clone is dropped.
    Http2(http2::SendRequest<AnyBody>),
}

/// A connection for one request.
pub(super) struct Connected {
    pub(super) upstream: Upstream,
    /// Whether it comes from the pool: then the sandbox may have closed it already.
    pub(super) reused: bool,
}

/// Guard of an HTTP/1.1 connection: dropping it aborts the connection's task and releases its permit, also after an
/// upgrade.
struct ConnectionGuard {
    task: AbortHandle,
    _permit: OwnedSemaphorePermit,
}

/// Returns a connection to the pool when dropped, if it can be reused.
pub(super) struct ReturnToPool {
    pool: Arc<Pool>,
    upstream: Option<Upstream>,
}

/// The error of a request, and the request itself if no byte of it was sent.
type Unsent = (hyper::Error, Option<Request<AnyBody>>);

// === impl Pool ===

impl Pool {
    pub(super) fn new(connections_max: usize) -> Self {
        Self {
            idle: Mutex::default(),
            permits: Arc::new(Semaphore::new(connections_max)),
        }
    }

    /// Closes connections at their idle timeout. Never returns.
    pub(in crate::router) async fn upkeep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(CHECK_EVERY).await;
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.retain(|_, connections| {
                connections.retain(Idle::is_good);
                !connections.is_empty()
            });
        }
    }

    pub(super) async fn connect(
        &self,
        pod: &str,
        address: SocketAddr,
        kind: Kind,
        within: Duration,
    ) -> Result<Connected, ConnectError> {
        let key = (Box::from(pod), address, kind == Kind::Grpc);
        // An upgraded connection is never returned to the pool.
        if kind != Kind::Upgrade
            && let Some(sender) = self.take(&key)
        {
            let upstream = Upstream { key, sender };
            return Ok(Connected {
                upstream,
                reused: true,
            });
        }
        let permit = self.permit().await?;
        let dialled = timeout(within, dial(address, kind, permit)).await;
        let sender = dialled.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        if let Sender::Http2(sender) = &sender {
            self.put(key.clone(), Sender::Http2(sender.clone()));
        }
        let upstream = Upstream { key, sender };
        Ok(Connected {
            upstream,
            reused: false,
        })
    }

    /// A permit for one more connection. At the limit, idle connections are closed first.
    async fn permit(&self) -> Result<OwnedSemaphorePermit, ConnectError> {
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return Ok(permit);
        }
        self.drop_idle();
        let permit = timeout(PERMIT_WITHIN, Arc::clone(&self.permits).acquire_owned()).await;
        permit.ok().and_then(Result::ok).ok_or(ConnectError::Full)
    }

    /// Closes idle HTTP/1.1 connections, and HTTP/2 connections without a recent request: whether those are idle is not
    /// known.
    fn drop_idle(&self) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|_, connections| {
            connections.retain(|idle| match idle.sender {
                Sender::Http1(..) => false,
                Sender::Http2(_) => idle.is_good() && idle.since.elapsed() < IDLE_MAX,
            });
            !connections.is_empty()
        });
    }

    /// A guard that returns the connection to the pool when dropped.
    pub(super) fn return_on_drop(self: &Arc<Self>, upstream: Upstream) -> ReturnToPool {
        ReturnToPool {
            pool: Arc::clone(self),
            upstream: Some(upstream),
        }
    }

    fn take(&self, key: &Key) -> Option<Sender> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = idle.get_mut(key)?;
        connections.retain(Idle::is_good);
        // The most recently used one, so that surplus connections reach their idle timeout.
        let taken = match connections.last_mut() {
            Some(Idle {
                sender: Sender::Http2(sender),
                since,
            }) => {
                *since = Instant::now();
                Some(Sender::Http2(sender.clone()))
            }
            Some(_) => connections.pop().map(|idle| idle.sender),
            None => None,
        };
        if connections.is_empty() {
            idle.remove(key);
        }
        taken
    }

    fn put(&self, key: Key, sender: Sender) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let full = idle.len() >= IDLE_ALL_MAX && !idle.contains_key(&key);
        // At the limit, the permit is released for a waiting request instead.
        let wanted = matches!(sender, Sender::Http1(..)) && self.permits.available_permits() == 0;
        if full || wanted {
            return;
        }
        let connections = idle.entry(key).or_default();
        let since = Instant::now();
        if connections.len() < IDLE_PER_POD_MAX {
            connections.push(Idle { sender, since });
        }
    }
}

// === impl Idle ===

impl Idle {
    fn is_good(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender, _) => sender.is_ready() && self.since.elapsed() < IDLE_MAX,
            Sender::Http2(sender) => !sender.is_closed() && self.since.elapsed() < IDLE_HTTP2_MAX,
        }
    }
}

// === impl Upstream ===

impl Upstream {
    pub(super) fn address(&self) -> SocketAddr {
        self.key.1
    }

    /// Sends a request and waits for the head of the response.
    pub(super) async fn send(
        &mut self,
        request: Request<AnyBody>,
    ) -> Result<Response<Incoming>, Unsent> {
        let sent = match &mut self.sender {
            Sender::Http1(sender, _) => sender.try_send_request(request).await,
            Sender::Http2(sender) => sender.try_send_request(request).await,
        };
        sent.map_err(|mut error| {
            let unsent = error.take_message();
            (error.into_error(), unsent)
        })
    }
}

// === impl ReturnToPool ===

impl Drop for ReturnToPool {
    fn drop(&mut self) {
        let Some(Upstream { key, sender }) = self.upstream.take() else {
            return;
        };
        let Sender::Http1(mut sender, guard) = sender else {
            return;
        };
        let pool = Arc::clone(&self.pool);
        // The connection's task makes it ready again, unless the response was not read to its end.
        tokio::spawn(async move {
            if let Ok(Ok(())) = timeout(FREE_WITHIN, sender.ready()).await {
                pool.put(key, Sender::Http1(sender, guard));
            }
        });
    }
}

// === impl ConnectionGuard ===

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn dial(address: SocketAddr, kind: Kind, permit: OwnedSemaphorePermit) -> io::Result<Sender> {
    let stream = TcpStream::connect(address).await?;
    let _ = stream.set_nodelay(true);
    let stream = TokioIo::new(stream);
    if kind == Kind::Grpc {
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(HEAD_BYTES_MAX).expect("64 KiB"))
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_WITHIN)
            .handshake(stream)
            .await
            .map_err(io::Error::other)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!("a connection to a sandbox ended: {error}");
            }
            drop(permit);
        });
        return Ok(Sender::Http2(sender));
    }
    let (sender, connection) = http1::Builder::new()
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .handshake(stream)
        .await
        .map_err(io::Error::other)?;
    let task = tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!("a connection to a sandbox ended: {error}");
        }
    });
    let guard = ConnectionGuard {
        task: task.abort_handle(),
        _permit: permit,
    };
    Ok(Sender::Http1(sender, guard))
}
