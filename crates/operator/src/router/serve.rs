//! Accepting callers: plain or over TLS, HTTP/1.1 or HTTP/2, so many at once and none for nothing.

use super::Error;
use super::body::Answer;
use super::index::Index;
use super::options::Options;
use super::proxy::{Caller, Proxy};
use super::tls::Certificate;
use crate::side_door;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use metrics_exporter_prometheus::PrometheusHandle;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;

/// All headers of a request: what nginx and Go's servers allow by default is 32 KiB to 1 MiB.
pub(super) const HEAD_BYTES_MAX: usize = 64 * 1024;
pub(super) const HEADERS_MAX: usize = 128;
/// What a TLS handshake may take.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Requests at once on one HTTP/2 connection.
const STREAMS_MAX: u32 = 32;
/// The same as `HEAD_BYTES_MAX`, for HTTP/2, where each of `STREAMS_MAX` requests may have that much.
const HTTP2_HEAD_BYTES_MAX: u32 = 32 * 1024;
/// What one HTTP/2 connection may have sent that nobody has read: all its requests share the connection's window.
const STREAM_WINDOW_BYTES: u32 = 64 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 64 * 1024;
/// Of one answer that its caller does not read. With the above, the worst that one HTTP/2 connection can make us hold
/// is about STREAMS_MAX * (32 + 64) + 64 KiB, 3 MiB; that times --max-connections is the worst of all.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Between the end of --proxy-timeout and the end of the connection: time for asking who may (which comes before the
/// timeout begins) and for the last words. Only a caller who reads nothing needs it.
const OVERDUE_GRACE: Duration = Duration::from_secs(20);
/// A peer that is gone without a word is noticed by this.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(20);
/// Between looks at whether a connection is in use.
const IDLE_CHECK_EVERY: Duration = Duration::from_secs(5);
/// No descriptors left, most likely: others must close theirs first.
const ACCEPT_FAILED_PAUSE: Duration = Duration::from_millis(50);

/// What the side doors show.
pub(super) struct Side {
    metrics: PrometheusHandle,
    index: Arc<Index>,
    stopping: watch::Receiver<bool>,
}

/// Everywhere we listen.
pub(super) struct Doors {
    proxy: Vec<Door>,
    metrics: Option<TcpListener>,
    probes: Option<TcpListener>,
    certificate: Option<Arc<Certificate>>,
}

/// One place where requests come in.
pub(super) struct Door {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
}

/// One connection's place among all of them, and whether it is in use. Whoever uses it holds it.
pub(super) struct Place {
    usage: Mutex<Usage>,
    _permit: OwnedSemaphorePermit,
}

struct Usage {
    requests: usize,
    /// The latest of them.
    begun: Instant,
    idle_since: Instant,
}

/// A request that is under way on a connection.
pub(super) struct InUse(Arc<Place>);

// === impl Doors ===

impl Doors {
    pub(super) async fn open(options: &Options) -> Result<Self, Error> {
        let mut proxy = Vec::new();
        if let Some(listener) = options.http_bind_address.listen("requests").await? {
            proxy.push(Door {
                listener,
                tls: None,
            });
        }
        let files = options
            .tls_cert_file
            .clone()
            .zip(options.tls_key_file.clone());
        let certificate = files
            .map(|(cert, key)| Certificate::load(cert, key))
            .transpose()?;
        if let Some(certificate) = &certificate
            && let Some(listener) = options
                .https_bind_address
                .listen("requests over TLS")
                .await?
        {
            let tls = TlsAcceptor::from(Arc::new(certificate.config()?));
            proxy.push(Door {
                listener,
                tls: Some(tls),
            });
        }
        Ok(Self {
            proxy,
            metrics: options.metrics_bind_address.listen("metrics").await?,
            probes: options.health_probe_bind_address.listen("probes").await?,
            certificate,
        })
    }

    /// Serves until it is told to stop, and then until what is under way is over.
    pub(super) async fn serve(
        self,
        proxy: Arc<Proxy>,
        side: Side,
        stopping: watch::Receiver<bool>,
    ) {
        let mut others = JoinSet::new();
        others.spawn(side_door::upkeep(side.metrics.clone()));
        others.spawn(Arc::clone(proxy.pool()).upkeep());
        if let Some(listener) = self.metrics {
            let answer = side_door::metrics(side.metrics.clone(), || {});
            others.spawn(side_door::serve(listener, answer));
        }
        if let Some(listener) = self.probes {
            let answer = side_door::probes(move || side.ready());
            others.spawn(side_door::serve(listener, answer));
        }
        if let Some(certificate) = self.certificate {
            others.spawn(certificate.follow());
        }
        let room = Arc::new(Semaphore::new(proxy.options().max_connections as usize));
        let mut doors = JoinSet::new();
        for door in self.proxy {
            doors.spawn(door.serve(Arc::clone(&proxy), Arc::clone(&room), stopping.clone()));
        }
        while doors.join_next().await.is_some() {}
    }
}

// === impl Door ===

impl Door {
    #[cfg(test)]
    pub(super) fn new(listener: TcpListener, tls: Option<TlsAcceptor>) -> Self {
        Self { listener, tls }
    }

    pub(super) async fn serve(
        self,
        proxy: Arc<Proxy>,
        room: Arc<Semaphore>,
        mut stopping: watch::Receiver<bool>,
    ) {
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = accept(&self.listener, &room) => accepted,
                Some(_) = connections.join_next() => continue,
                _ = stopping.wait_for(|stop| *stop) => break,
            };
            let Some((stream, place)) = accepted else {
                continue;
            };
            let (proxy, tls, stopping) = (Arc::clone(&proxy), self.tls.clone(), stopping.clone());
            connections.spawn(serve_one(proxy, stream, tls, place, stopping));
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
    }
}

async fn accept(listener: &TcpListener, room: &Arc<Semaphore>) -> Option<(TcpStream, Arc<Place>)> {
    let permit = Arc::clone(room).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, Arc::new(Place::new(permit)))),
        Err(error) => {
            tracing::warn!("cannot accept a connection: {error}");
            tokio::time::sleep(ACCEPT_FAILED_PAUSE).await;
            None
        }
    }
}

async fn serve_one(
    proxy: Arc<Proxy>,
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    place: Arc<Place>,
    stopping: watch::Receiver<bool>,
) {
    // Answers are small and waited for.
    let _ = stream.set_nodelay(true);
    let Ok(peer) = stream.peer_addr() else { return };
    let caller = Caller {
        address: peer.ip().to_canonical(),
        tls: tls.is_some(),
    };
    match tls {
        None => converse(proxy, stream, caller, place, stopping).await,
        Some(tls) => match timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await {
            Ok(Ok(stream)) => converse(proxy, stream, caller, place, stopping).await,
            Ok(Err(error)) => tracing::debug!("a TLS handshake with {peer} failed: {error}"),
            Err(_) => tracing::debug!("a TLS handshake with {peer} took too long"),
        },
    }
}

/// Serves one connection until it is closed, idle for too long, or we stop. Or until its requests should long be over:
/// the timeout of a body does not end one whose caller stopped reading, for then nobody asks the body for more.
async fn converse<S>(
    proxy: Arc<Proxy>,
    stream: S,
    caller: Caller,
    place: Arc<Place>,
    mut stopping: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let idle = proxy.options().idle_timeout;
    let request_max = proxy.options().proxy_timeout.saturating_add(OVERDUE_GRACE);
    let used = Arc::clone(&place);
    let service = service_fn(move |request: Request<Incoming>| {
        let (proxy, in_use) = (Arc::clone(&proxy), InUse::new(&used));
        async move { Ok::<Answer, Infallible>(proxy.handle(request, caller, in_use).await) }
    });
    let builder = builder();
    let mut connection =
        pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let mut closing = false;
    loop {
        let close = tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!("a connection of {} ended: {error}", caller.address);
                }
                return;
            }
            () = tokio::time::sleep(IDLE_CHECK_EVERY.min(idle)) => place.is_idle_for(idle),
            _ = stopping.wait_for(|stop| *stop), if !closing => true,
        };
        if close && closing && place.is_idle_for(idle) {
            return;
        }
        if place.is_overdue(request_max) {
            tracing::debug!("{} does not read its answers", caller.address);
            return;
        }
        if close {
            closing = true;
            connection.as_mut().graceful_shutdown();
        }
    }
}

fn builder() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // It would count from the last answer on, and so close what is merely idle. --idle-timeout is for both.
        .header_read_timeout(None)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(HTTP2_HEAD_BYTES_MAX)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_WITHIN);
    builder
}

// === impl Side ===

impl Side {
    pub(super) fn new(
        metrics: PrometheusHandle,
        index: Arc<Index>,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        Self {
            metrics,
            index,
            stopping,
        }
    }

    /// Whether requests find their sandboxes here.
    fn ready(&self) -> Result<(), &'static str> {
        if *self.stopping.borrow() {
            return Err("stopping");
        }
        if !self.index.is_ready() {
            return Err("the pods of sandboxes are not known yet");
        }
        Ok(())
    }
}

// === impl Place ===

impl Place {
    fn new(permit: OwnedSemaphorePermit) -> Self {
        let now = Instant::now();
        let usage = Usage {
            requests: 0,
            begun: now,
            idle_since: now,
        };
        Self {
            usage: Mutex::new(usage),
            _permit: permit,
        }
    }

    fn is_idle_for(&self, time: Duration) -> bool {
        let usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.requests == 0 && usage.idle_since.elapsed() >= time
    }

    /// Whether requests are under way, and even the latest of them began so long ago.
    fn is_overdue(&self, time: Duration) -> bool {
        let usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.requests > 0 && usage.begun.elapsed() >= time
    }
}

// === impl InUse ===

impl InUse {
    fn new(place: &Arc<Place>) -> Self {
        let mut usage = place.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.requests += 1;
        usage.begun = Instant::now();
        Self(Arc::clone(place))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut usage = self.0.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.requests -= 1;
        usage.idle_since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_what_is_under_way_is_overdue() {
        let room = Arc::new(Semaphore::new(1));
        let place = Arc::new(Place::new(room.acquire_owned().await.unwrap()));
        assert!(!place.is_overdue(Duration::ZERO));
        let first = InUse::new(&place);
        assert!(place.is_overdue(Duration::ZERO));
        assert!(!place.is_overdue(Duration::from_secs(3600)));
        drop(first);
        assert!(!place.is_overdue(Duration::ZERO));
    }
}
