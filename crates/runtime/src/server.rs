//! HTTP and gRPC servers: bounded accept loops, connection limits, idle timeouts, and the checks before a request is
//! routed (bearer token, Host header, origin, gRPC deadline).

use crate::http::{Body, json};
use crate::process::{FILE_DESCRIPTOR_SET, Processes, proto};
use crate::shared::{Phase, Shared};
use crate::{legacy, origin, rest};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::header::AUTHORIZATION;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use k8e_net::accept::{ConnectionLimit, ConnectionPermit};
use k8e_net::grpc_timeout;
use proto::process_service_server::ProcessServiceServer;
use serde_json::json;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::Status;
use tonic::service::Routes;
use tower::ServiceExt as _;

/// Open connections of one API. Further ones wait in the kernel's accept queue.
const CONNECTIONS_MAX: usize = 256;

/// Of these, connections from inside the pod: a command there cannot use up all of them. A tunnel of
/// `kubectl port-forward` counts as inside, too.
const INSIDE_MAX: usize = 192;

/// Size of a request line with all headers: the longest path (4 KiB) with every byte percent-encoded, and as much
/// again.
const HEADER_BYTES_MAX: usize = 32 * 1024;

/// Number of headers of one request.
const HEADERS_MAX: usize = 64;

/// Buffer of a connection whose peer sends or reads slowly.
const BUFFER_BYTES_MAX: usize = 256 * 1024;

/// Concurrent streams (calls) on one gRPC connection.
const STREAMS_MAX: u32 = 128;

/// HTTP/2 keep-alive of a gRPC connection: interval of pings, and timeout of their answer.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG_WITHIN: Duration = Duration::from_secs(20);

/// `TCP_USER_TIMEOUT`: how long a peer may leave sent bytes unacknowledged, or its window closed.
const STALL_MAX: Duration = Duration::from_secs(300);

/// How long a gRPC connection may take to close after GOAWAY.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);

const TOKEN_REQUIRED: &str =
    "a token is required: send the header authorization: Bearer <the token of this sandbox>";

const HOST_NOT_ALLOWED: &str = "the Host header names another host: use the address or the service name of this sandbox, or allow the name with -allowed-hosts (SANDBOXD_ALLOWED_HOSTS)";

/// Connection limits of one API.
struct Limits {
    all: ConnectionLimit,
    /// For peers inside the pod.
    inside: ConnectionLimit,
}

/// Permits of one connection, released when it ends: one of all, and one of `inside` where it comes from there.
type Permits = (ConnectionPermit, Option<ConnectionPermit>);

/// Counts a call on a gRPC connection until it is dropped.
struct ActiveCall(Arc<watch::Sender<usize>>);

/// Which API a listener serves.
#[derive(Clone)]
pub(crate) enum Api {
    Legacy,
    Rest,
    Grpc(Routes),
}

// === impl Api ===

impl Api {
    /// The gRPC API, with server reflection.
    pub(crate) fn grpc(shared: &Arc<Shared>) -> Result<Self, tonic_reflection::server::Error> {
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        };
        let processes = ProcessServiceServer::new(Processes::new(Arc::clone(shared)));
        // Both versions of the reflection service: many tools know only v1alpha.
        let routes = Routes::new(processes)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?);
        Ok(Self::Grpc(routes.prepare()))
    }
}

/// Accept loop of one API. Ends in [`Phase::Closing`], after its connections have ended.
pub(crate) async fn serve(api: Api, listener: TcpListener, shared: Arc<Shared>) {
    let limits = Limits {
        all: ConnectionLimit::new(CONNECTIONS_MAX),
        inside: ConnectionLimit::new(INSIDE_MAX),
    };
    let mut phase = shared.phase.subscribe();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = phase.wait_for(|phase| *phase == Phase::Closing) => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            (stream, permits) = limits.accept(&listener) => {
                let (api, shared) = (api.clone(), Arc::clone(&shared));
                connections.spawn(async move {
                    connection(api, stream, shared).await;
                    drop(permits);
                });
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

// === impl Limits ===

impl Limits {
    /// Accepts the next connection within the limit. One from inside the pod beyond [`INSIDE_MAX`] is closed at once.
    async fn accept(&self, listener: &TcpListener) -> (TcpStream, Permits) {
        loop {
            let (stream, all) = self.all.accept(listener).await;
            // On a dual-stack socket, IPv4 peers have IPv4-mapped IPv6 addresses.
            let address = |address: io::Result<SocketAddr>| Some(address.ok()?.ip().to_canonical());
            let (peer, own) = (address(stream.peer_addr()), address(stream.local_addr()));
            // One whose address is not known, as it is closed already, counts as one from inside.
            if peer.is_some_and(|peer| !peer.is_loopback() && own.is_some_and(|own| own != peer)) {
                return (stream, (all, None));
            }
            if let Some(inside) = self.inside.try_acquire() {
                return (stream, (all, Some(inside)));
            }
        }
    }
}

async fn connection(api: Api, stream: TcpStream, shared: Arc<Shared>) {
    let stall_ms = u32::try_from(STALL_MAX.as_millis()).unwrap_or(u32::MAX);
    // Best effort: without these the connection works, too.
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, stall_ms);
    let mut phase = shared.phase.subscribe();
    match api {
        Api::Grpc(routes) => grpc_connection(routes, stream, shared, &mut phase).await,
        Api::Legacy | Api::Rest => http_connection(api, stream, shared, &mut phase).await,
    }
}

async fn http_connection(
    api: Api,
    stream: TcpStream,
    shared: Arc<Shared>,
    phase: &mut watch::Receiver<Phase>,
) {
    let idle = shared.config.http_idle_timeout;
    let answer = service_fn(move |request| {
        let (api, shared) = (api.clone(), Arc::clone(&shared));
        async move { Ok::<_, Infallible>(answer(&api, &shared, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_headers(HEADERS_MAX)
        .max_header_size(HEADER_BYTES_MAX)
        .max_buf_size(BUFFER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), answer);
    let mut connection = pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = phase.wait_for(|phase| *phase == Phase::Closing) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

async fn answer(api: &Api, shared: &Shared, request: Request<Incoming>) -> Response<Body> {
    let is_legacy = matches!(api, Api::Legacy);
    let refused = |status, code: &str, message: &str| {
        if is_legacy {
            json(status, &json!({"detail": message}))
        } else {
            json(status, &json!({"code": code, "message": message}))
        }
    };
    let is_probe = request.uri().path() == if is_legacy { "/" } else { "/v1/health" };
    if !is_probe && !is_allowed(shared, request.headers()) {
        let status = StatusCode::UNAUTHORIZED;
        return refused(status, "UNAUTHENTICATED", TOKEN_REQUIRED);
    }
    // With a token there is no DNS rebinding: a web page does not have it.
    let checks_host = shared.config.token.is_none() && !is_probe;
    if checks_host && !shared.config.allowed_hosts.serve(request.headers()) {
        return refused(StatusCode::FORBIDDEN, "PERMISSION_DENIED", HOST_NOT_ALLOWED);
    }
    if origin::is_foreign(&request) {
        let message = "cross-origin request: a web page of another origin may only read";
        return refused(StatusCode::FORBIDDEN, "PERMISSION_DENIED", message);
    }
    if is_legacy {
        legacy::answer(shared, request).await
    } else {
        rest::answer(shared, request).await
    }
}

async fn grpc_connection(
    routes: Routes,
    stream: TcpStream,
    shared: Arc<Shared>,
    phase: &mut watch::Receiver<Phase>,
) {
    let idle = shared.config.http_idle_timeout;
    let (calls, mut under_way) = watch::channel(0);
    let calls = Arc::new(calls);
    let answer = service_fn(move |request| {
        let (routes, shared) = (routes.clone(), Arc::clone(&shared));
        let active = ActiveCall::new(&calls);
        async move {
            let answer = grpc_answer(routes, &shared, request).await;
            // A call is active until the body of its response ends.
            let answer = answer.map(|body| {
                let body = body.map_frame(move |frame| {
                    let _ = &active;
                    frame
                });
                tonic::body::Body::new(body)
            });
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(u32::try_from(HEADER_BYTES_MAX).unwrap_or(u32::MAX))
        .max_send_buf_size(BUFFER_BYTES_MAX)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PONG_WITHIN)
        .serve_connection(TokioIo::new(stream), answer);
    let mut connection = pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = phase.wait_for(|phase| *phase == Phase::Closing) => {}
        () = unused_for(idle, &mut under_way) => {}
    }
    connection.as_mut().graceful_shutdown();
    // A call that came in just before GOAWAY is still served.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = phase.wait_for(|phase| *phase == Phase::Closing) => {}
        () = unused_for(GOODBYE_WITHIN, &mut under_way) => return,
    }
    // No command runs any more; a client that does not read must not delay the shutdown.
    let _ = tokio::time::timeout(GOODBYE_WITHIN, connection).await;
}

/// Resolves when there was no call for `time`. Pings do not count.
async fn unused_for(time: Duration, under_way: &mut watch::Receiver<usize>) {
    loop {
        let changed = if *under_way.borrow_and_update() == 0 {
            tokio::time::timeout(time, under_way.changed()).await
        } else {
            Ok(under_way.changed().await)
        };
        // The timeout ran out, or the connection is gone.
        if !matches!(changed, Ok(Ok(()))) {
            return;
        }
    }
}

// === impl ActiveCall ===

impl ActiveCall {
    fn new(calls: &Arc<watch::Sender<usize>>) -> Self {
        calls.send_modify(|count| *count += 1);
        Self(Arc::clone(calls))
    }
}

impl Drop for ActiveCall {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

async fn grpc_answer(
    routes: Routes,
    shared: &Shared,
    request: Request<Incoming>,
) -> Response<tonic::body::Body> {
    if !is_allowed(shared, request.headers()) {
        return Status::unauthenticated(TOKEN_REQUIRED).into_http();
    }
    let within = grpc_timeout::of(request.headers());
    let answered = routes.oneshot(request.map(tonic::body::Body::new));
    let Ok(answered) = grpc_timeout::within(within, answered).await else {
        return Status::deadline_exceeded("the deadline of the call has passed").into_http();
    };
    answered.unwrap_or_else(|never| match never {})
}

/// Checks the bearer token, where one is configured.
fn is_allowed(shared: &Shared, headers: &HeaderMap) -> bool {
    let Some(token) = &shared.config.token else {
        return true;
    };
    let shown = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
    let scheme_and_token = shown.and_then(|shown| shown.split_at_checked(b"Bearer ".len()));
    scheme_and_token
        .is_some_and(|(scheme, shown)| scheme.eq_ignore_ascii_case(b"Bearer ") && token.is(shown))
}
