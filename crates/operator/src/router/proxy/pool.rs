//! Connections to sandboxes, used again while a sandbox keeps them open.
//!
//! They are kept by the UID of the pod, not by address alone: addresses pass from pod to pod.

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

/// Less than what servers commonly allow (5 s): a connection that its server closes just as it is used loses a request.
const IDLE_MAX: Duration = Duration::from_secs(3);
/// Of HTTP/2, where closing is announced and nothing is lost.
const IDLE_HTTP2_MAX: Duration = Duration::from_secs(60);
pub(super) const IDLE_PER_POD_MAX: usize = 16;
const IDLE_ALL_MAX: usize = 2048;
/// Between looks at what is idle.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// When all of an answer has been read, its connection is free at once, or never.
const FREE_WITHIN: Duration = Duration::from_millis(500);
/// How long a request waits when all connections are taken: those whose answer was not read to the end, and idle ones,
/// are given back by then.
const ROOM_WITHIN: Duration = Duration::from_secs(1);
/// A sandbox that is gone without a word is noticed by this.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(20);
/// What one sandbox may have sent that its caller has not read.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;

type Key = (Box<str>, SocketAddr, bool);

/// See the module.
pub(in crate::router) struct Pool {
    idle: Mutex<HashMap<Key, Vec<Idle>>>,
    /// For all connections, idle ones too: each costs a descriptor and buffers.
    room: Arc<Semaphore>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoConnection {
    #[error("there are as many connections to sandboxes as there may be")]
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
    One(http1::SendRequest<AnyBody>, Held),
    /// For many requests at once; ends with the last of them.
    Many(http2::SendRequest<AnyBody>),
}

/// A connection that can be used.
pub(super) struct Dialled {
    pub(super) upstream: Upstream,
    /// Whether it was there before: then it may be gone already.
    pub(super) reused: bool,
}

/// Ends a connection with whoever holds this, and gives its place back; also that of one that became a tunnel.
struct Held {
    carried: AbortHandle,
    _place: OwnedSemaphorePermit,
}

/// Puts a connection back when it is dropped, if it is still good.
pub(super) struct Returning {
    pool: Arc<Pool>,
    upstream: Option<Upstream>,
}

/// Why a request has no answer, and the request if nothing of it was sent.
type Unsent = (hyper::Error, Option<Request<AnyBody>>);

// === impl Pool ===

impl Pool {
    pub(super) fn new(connections_max: usize) -> Self {
        Self {
            idle: Mutex::default(),
            room: Arc::new(Semaphore::new(connections_max)),
        }
    }

    /// Closes what nobody uses. Never ends.
    pub(in crate::router) async fn upkeep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
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
    ) -> Result<Dialled, NoConnection> {
        let key = (Box::from(pod), address, kind == Kind::Grpc);
        // What is switched to another protocol never comes back: it gets a connection of its own.
        if kind != Kind::Upgrade
            && let Some(sender) = self.take(&key)
        {
            let upstream = Upstream { key, sender };
            return Ok(Dialled {
                upstream,
                reused: true,
            });
        }
        let place = self.place().await?;
        let dialled = timeout(within, dial(address, kind, place)).await;
        let sender = dialled.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        if let Sender::Many(sender) = &sender {
            self.put(key.clone(), Sender::Many(sender.clone()));
        }
        let upstream = Upstream { key, sender };
        Ok(Dialled {
            upstream,
            reused: false,
        })
    }

    /// A place for one more connection; idle ones make room.
    async fn place(&self) -> Result<OwnedSemaphorePermit, NoConnection> {
        if let Ok(place) = Arc::clone(&self.room).try_acquire_owned() {
            return Ok(place);
        }
        self.drop_idle();
        let place = timeout(ROOM_WITHIN, Arc::clone(&self.room).acquire_owned()).await;
        place.ok().and_then(Result::ok).ok_or(NoConnection::Full)
    }

    /// Those that nobody has used lately. Of HTTP/2 one cannot see more than that.
    fn drop_idle(&self) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|_, connections| {
            connections.retain(|idle| match idle.sender {
                Sender::One(..) => false,
                Sender::Many(_) => idle.is_good() && idle.since.elapsed() < IDLE_MAX,
            });
            !connections.is_empty()
        });
    }

    /// Takes it back when what it returns is dropped.
    pub(super) fn returning(self: &Arc<Self>, upstream: Upstream) -> Returning {
        Returning {
            pool: Arc::clone(self),
            upstream: Some(upstream),
        }
    }

    fn take(&self, key: &Key) -> Option<Sender> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let connections = idle.get_mut(key)?;
        connections.retain(Idle::is_good);
        // The last one put there: the others may end.
        let taken = match connections.last_mut() {
            Some(Idle {
                sender: Sender::Many(sender),
                since,
            }) => {
                *since = Instant::now();
                Some(Sender::Many(sender.clone()))
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
        // Somebody may wait for the place of a connection that only one can use.
        let wanted = matches!(sender, Sender::One(..)) && self.room.available_permits() == 0;
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
            Sender::One(sender, _) => sender.is_ready() && self.since.elapsed() < IDLE_MAX,
            Sender::Many(sender) => !sender.is_closed() && self.since.elapsed() < IDLE_HTTP2_MAX,
        }
    }
}

// === impl Upstream ===

impl Upstream {
    pub(super) fn address(&self) -> SocketAddr {
        self.key.1
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(
        &mut self,
        request: Request<AnyBody>,
    ) -> Result<Response<Incoming>, Unsent> {
        let sent = match &mut self.sender {
            Sender::One(sender, _) => sender.try_send_request(request).await,
            Sender::Many(sender) => sender.try_send_request(request).await,
        };
        sent.map_err(|mut error| {
            let unsent = error.take_message();
            (error.into_error(), unsent)
        })
    }
}

// === impl Returning ===

impl Drop for Returning {
    fn drop(&mut self) {
        let Some(Upstream { key, sender }) = self.upstream.take() else {
            return;
        };
        let Sender::One(mut sender, held) = sender else {
            return;
        };
        let pool = Arc::clone(&self.pool);
        // It becomes free in its own task. One whose answer was not read to the end does not.
        tokio::spawn(async move {
            if let Ok(Ok(())) = timeout(FREE_WITHIN, sender.ready()).await {
                pool.put(key, Sender::One(sender, held));
            }
        });
    }
}

// === impl Held ===

impl Drop for Held {
    fn drop(&mut self) {
        self.carried.abort();
    }
}

async fn dial(address: SocketAddr, kind: Kind, place: OwnedSemaphorePermit) -> io::Result<Sender> {
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
            drop(place);
        });
        return Ok(Sender::Many(sender));
    }
    let (sender, connection) = http1::Builder::new()
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .handshake(stream)
        .await
        .map_err(io::Error::other)?;
    let carried = tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!("a connection to a sandbox ended: {error}");
        }
    });
    let held = Held {
        carried: carried.abort_handle(),
        _place: place,
    };
    Ok(Sender::One(sender, held))
}
