//! The router's HTTP server: bounded accept loop, with or without TLS, HTTP/1.1 and HTTP/2, connection limit, idle
//! timeout and graceful shutdown.

use super::Error;
use super::body::BoxResponse;
use super::index::Index;
use super::options::Options;
use super::proxy::{Caller, Proxy};
use super::tls::Certificate;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use k8e_net::accept::{ConnectionLimit, ConnectionPermit};
use k8e_net::admin_http::{self, AdminHttp};
use metrics_exporter_prometheus::PrometheusHandle;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;

/// Size of the head of a request. The defaults of nginx and Go are 32 KiB and 1 MiB.
pub(super) const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Number of headers of a request.
pub(super) const HEADERS_MAX: usize = 128;
/// Timeout of a TLS handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Concurrent streams (requests) on one HTTP/2 connection.
const STREAMS_MAX: u32 = 32;
/// As `HEAD_BYTES_MAX`, for HTTP/2: each of `STREAMS_MAX` concurrent requests may have this much.
const HTTP2_HEAD_BYTES_MAX: u32 = 32 * 1024;
/// HTTP/2 flow control (backpressure): bytes that a client may send before they are read. All requests share the window
/// of their connection.
const STREAM_WINDOW_BYTES: u32 = 64 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 64 * 1024;
/// Buffer of one HTTP/2 response that its client does not read. With the limits above, one HTTP/2 connection can occupy
/// at most about STREAMS_MAX * (32 + 64) + 64 KiB, 3 MiB; the process that times --max-connections.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Added to --proxy-timeout before a connection is closed: authorization (which comes before that timeout starts) and
/// the end of the response need time. Only a client that does not read its response gets so far.
const OVERDUE_GRACE: Duration = Duration::from_secs(20);
/// HTTP/2 keep-alive: interval of pings, and timeout of their answer. Detects dead peers.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_WITHIN: Duration = Duration::from_secs(20);
/// Interval of the idle check of a connection.
const IDLE_CHECK_EVERY: Duration = Duration::from_secs(5);

/// State behind the admin server: metrics and readiness.
pub(super) struct AdminState {
    metrics: PrometheusHandle,
    index: Arc<Index>,
    stopping: watch::Receiver<bool>,
}

/// All bound listeners of the router, and the certificate that they use.
pub(super) struct Listeners {
    proxy: Vec<ProxyListener>,
    metrics: Option<TcpListener>,
    probes: Option<TcpListener>,
    certificate: Option<Arc<Certificate>>,
}

/// A listener for requests to sandboxes.
pub(super) struct ProxyListener {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
}

/// A connection's permit of --max-connections, and whether the connection is idle. Requests keep it alive.
pub(super) struct ConnectionSlot {
    usage: Mutex<Usage>,
    _permit: ConnectionPermit,
}

struct Usage {
    /// Requests in flight.
    requests: usize,
    /// When the latest request began.
    begun: Instant,
    idle_since: Instant,
}

/// Guard of a request in flight on a connection.
pub(super) struct ActiveRequest(Arc<ConnectionSlot>);

// === impl Listeners ===

impl Listeners {
    pub(super) async fn open(options: &Options) -> Result<Self, Error> {
        let mut proxy = Vec::new();
        if let Some(listener) = options.http_bind_address.listen("requests").await? {
            proxy.push(ProxyListener {
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
            proxy.push(ProxyListener {
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

    /// Serves until `stopping` is true, then drains: returns when the requests in flight are done.
    pub(super) async fn serve(
        self,
        proxy: Arc<Proxy>,
        admin: AdminState,
        stopping: watch::Receiver<bool>,
    ) {
        let mut others = JoinSet::new();
        others.spawn(admin_http::upkeep(admin.metrics.clone()));
        others.spawn(Arc::clone(proxy.pool()).upkeep());
        if let Some(listener) = self.metrics {
            let metrics = admin.metrics.clone();
            let server = AdminHttp::default().metrics(move || metrics.render());
            others.spawn(server.listen(listener));
        }
        if let Some(listener) = self.probes {
            let server = AdminHttp::default()
                .probes(move || std::future::ready(admin.ready().map_err(ToOwned::to_owned)));
            others.spawn(server.listen(listener));
        }
        if let Some(certificate) = self.certificate {
            others.spawn(certificate.follow());
        }
        let limit = ConnectionLimit::new(proxy.options().max_connections as usize);
        let mut listeners = JoinSet::new();
        for listener in self.proxy {
            listeners.spawn(listener.serve(Arc::clone(&proxy), limit.clone(), stopping.clone()));
        }
        while listeners.join_next().await.is_some() {}
    }
}

// === impl ProxyListener ===

impl ProxyListener {
    #[cfg(test)]
    pub(super) fn new(listener: TcpListener, tls: Option<TlsAcceptor>) -> Self {
        Self { listener, tls }
    }

    pub(super) async fn serve(
        self,
        proxy: Arc<Proxy>,
        limit: ConnectionLimit,
        mut stopping: watch::Receiver<bool>,
    ) {
        let mut connections = JoinSet::new();
        loop {
            let (stream, permit) = tokio::select! {
                accepted = limit.accept(&self.listener) => accepted,
                Some(_) = connections.join_next() => continue,
                _ = stopping.wait_for(|stop| *stop) => break,
            };
            let slot = Arc::new(ConnectionSlot::new(permit));
            let (proxy, tls, stopping) = (Arc::clone(&proxy), self.tls.clone(), stopping.clone());
            connections.spawn(serve_one(proxy, stream, tls, slot, stopping));
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
    }
}

async fn serve_one(
    proxy: Arc<Proxy>,
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    slot: Arc<ConnectionSlot>,
    stopping: watch::Receiver<bool>,
) {
    let Ok(peer) = stream.peer_addr() else { return };
    let caller = Caller {
        address: peer.ip().to_canonical(),
        tls: tls.is_some(),
    };
    match tls {
        None => serve_connection(proxy, stream, caller, slot, stopping).await,
        Some(tls) => match timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await {
            Ok(Ok(stream)) => serve_connection(proxy, stream, caller, slot, stopping).await,
            Ok(Err(error)) => tracing::debug!("a TLS handshake with {peer} failed: {error}"),
            Err(_) => tracing::debug!("a TLS handshake with {peer} took too long"),
        },
    }
}

/// Serves one connection until it is closed, idle for too long, or the router stops; or until its requests are overdue:
/// when a client stops reading, the response body is not polled any more, so its own deadline cannot end it.
async fn serve_connection<S>(
    proxy: Arc<Proxy>,
    stream: S,
    caller: Caller,
    slot: Arc<ConnectionSlot>,
    mut stopping: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let idle = proxy.options().idle_timeout;
    let request_max = proxy.options().proxy_timeout.saturating_add(OVERDUE_GRACE);
    let used = Arc::clone(&slot);
    let service = service_fn(move |request: Request<Incoming>| {
        let (proxy, active) = (Arc::clone(&proxy), ActiveRequest::new(&used));
        async move { Ok::<BoxResponse, Infallible>(proxy.handle(request, caller, active).await) }
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
            () = tokio::time::sleep(IDLE_CHECK_EVERY.min(idle)) => slot.is_idle_for(idle),
            _ = stopping.wait_for(|stop| *stop), if !closing => true,
        };
        if close && closing && slot.is_idle_for(idle) {
            return;
        }
        if slot.is_overdue(request_max) {
            tracing::debug!(
                "closing a connection of {}: it does not read responses",
                caller.address
            );
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
        // hyper would count from the last response, and so close idle connections. --idle-timeout covers both.
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

// === impl AdminState ===

impl AdminState {
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

    /// Readiness: the informer cache is synced and the router is not shutting down.
    fn ready(&self) -> Result<(), &'static str> {
        if *self.stopping.borrow() {
            return Err("stopping");
        }
        if !self.index.is_ready() {
            return Err("initial cache sync of pods is not complete");
        }
        Ok(())
    }
}

// === impl ConnectionSlot ===

impl ConnectionSlot {
    fn new(permit: ConnectionPermit) -> Self {
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

    /// Whether there are requests in flight of which even the latest began that long ago.
    fn is_overdue(&self, time: Duration) -> bool {
        let usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.requests > 0 && usage.begun.elapsed() >= time
    }
}

// === impl ActiveRequest ===

impl ActiveRequest {
    fn new(slot: &Arc<ConnectionSlot>) -> Self {
        let mut usage = slot.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.requests += 1;
        usage.begun = Instant::now();
        Self(Arc::clone(slot))
    }
}

impl Drop for ActiveRequest {
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
    async fn only_requests_in_flight_are_overdue() {
        let permit = ConnectionLimit::new(1).acquire().await;
        let slot = Arc::new(ConnectionSlot::new(permit));
        assert!(!slot.is_overdue(Duration::ZERO));
        let first = ActiveRequest::new(&slot);
        assert!(slot.is_overdue(Duration::ZERO));
        assert!(!slot.is_overdue(Duration::from_secs(3600)));
        drop(first);
        assert!(!slot.is_overdue(Duration::ZERO));
    }
}
