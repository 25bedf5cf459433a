//! The doors: who may connect, how many, and for how long they may be silent.

use crate::http::{Body, json};
use crate::process::{FILE_DESCRIPTOR_SET, Processes, proto};
use crate::shared::{Phase, Shared};
use crate::{deadline, legacy, origin, rest};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::header::AUTHORIZATION;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use proto::process_service_server::ProcessServiceServer;
use serde_json::json;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tonic::Status;
use tonic::service::Routes;
use tower::ServiceExt as _;

/// Connections of one door at once. More wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 256;

/// How many of those may come from inside the pod, so that what runs there cannot keep others out. A
/// tunnel of `kubectl port-forward` comes from inside too.
const INSIDE_MAX: usize = 192;

/// A request line and headers: a path of the longest kind with every byte escaped, and room.
const HEADER_BYTES_MAX: usize = 32 * 1024;

/// Headers of one request.
const HEADERS_MAX: usize = 64;

/// What is held of a connection that is read or written slowly.
const BUFFER_BYTES_MAX: usize = 256 * 1024;

/// Calls at once on one gRPC connection.
const STREAMS_MAX: u32 = 128;

/// How often a silent gRPC connection is asked whether it is there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG_WITHIN: Duration = Duration::from_secs(20);

/// How long a peer may take nothing of what is sent to it.
const STALL_MAX: Duration = Duration::from_secs(300);

/// How long a gRPC client may take to read the last words when the end has come.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);

/// Pause after a failed accept: out of descriptors or memory, which passes.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

const TOKEN_WANTED: &str = "show the sandbox's token (authorization: Bearer and the token)";

const HOST_WANTED: &str = "the Host header has no name of this sandbox: use its address, its service's name, or allow the name with -allowed-hosts (SANDBOXD_ALLOWED_HOSTS)";

/// Room for connections of one door.
struct Room {
    all: Arc<Semaphore>,
    inside: Arc<Semaphore>,
}

/// What a connection holds while it lasts.
type Permits = [Option<OwnedSemaphorePermit>; 2];

/// A call that is under way on a gRPC connection.
struct Counted(Arc<watch::Sender<usize>>);

/// What is behind a door.
#[derive(Clone)]
pub(crate) enum Door {
    Legacy,
    Rest,
    Grpc(Routes),
}

// === impl Door ===

impl Door {
    /// The door for gRPC, with reflection.
    pub(crate) fn grpc(shared: &Arc<Shared>) -> Result<Self, tonic_reflection::server::Error> {
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        };
        let processes = ProcessServiceServer::new(Processes::new(Arc::clone(shared)));
        // Both versions: of the tools that ask, half know only the older.
        let routes = Routes::new(processes)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?);
        Ok(Self::Grpc(routes.prepare()))
    }
}

/// Serves one door until the end has come, and its connections until they have ended.
pub(crate) async fn serve(door: Door, listener: TcpListener, shared: Arc<Shared>) {
    let room = Room {
        all: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        inside: Arc::new(Semaphore::new(INSIDE_MAX)),
    };
    let mut phase = shared.phase.subscribe();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = phase.wait_for(|phase| *phase == Phase::Closing) => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            (stream, permits) = room.accept(&listener) => {
                let (door, shared) = (door.clone(), Arc::clone(&shared));
                connections.spawn(async move {
                    connection(door, stream, shared).await;
                    drop(permits);
                });
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

// === impl Room ===

impl Room {
    /// The next connection that there is room for. One too many from inside is closed.
    async fn accept(&self, listener: &TcpListener) -> (TcpStream, Permits) {
        // Never closed.
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        loop {
            let Ok((stream, peer)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            // On a socket for both families, IPv4 addresses come in the clothes of IPv6.
            let peer = peer.ip().to_canonical();
            let own = stream.local_addr().map(|own| own.ip().to_canonical());
            if !peer.is_loopback() && own.is_ok_and(|own| own != peer) {
                return (stream, [all, None]);
            }
            if let Ok(inside) = Arc::clone(&self.inside).try_acquire_owned() {
                return (stream, [all, Some(inside)]);
            }
        }
    }
}

async fn connection(door: Door, stream: TcpStream, shared: Arc<Shared>) {
    let stall_ms = u32::try_from(STALL_MAX.as_millis()).unwrap_or(u32::MAX);
    // It works without.
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, stall_ms);
    let _ = stream.set_nodelay(true);
    let mut phase = shared.phase.subscribe();
    match door {
        Door::Grpc(routes) => grpc_connection(routes, stream, shared, &mut phase).await,
        Door::Legacy | Door::Rest => http_connection(door, stream, shared, &mut phase).await,
    }
}

async fn http_connection(
    door: Door,
    stream: TcpStream,
    shared: Arc<Shared>,
    phase: &mut watch::Receiver<Phase>,
) {
    let idle = shared.config.http_idle_timeout;
    let answer = service_fn(move |request| {
        let (door, shared) = (door.clone(), Arc::clone(&shared));
        async move { Ok::<_, Infallible>(answer(&door, &shared, request).await) }
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

async fn answer(door: &Door, shared: &Shared, request: Request<Incoming>) -> Response<Body> {
    let is_legacy = matches!(door, Door::Legacy);
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
        return refused(status, "UNAUTHENTICATED", TOKEN_WANTED);
    }
    // A page has no token to show.
    let checks_host = shared.config.token.is_none() && !is_probe;
    if checks_host && !shared.config.allowed_hosts.serve(request.headers()) {
        return refused(StatusCode::FORBIDDEN, "PERMISSION_DENIED", HOST_WANTED);
    }
    if origin::is_foreign(&request) {
        let message = "a page of another origin may not change anything here";
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
        let counted = Counted::new(&calls);
        async move {
            let answer = grpc_answer(routes, &shared, request).await;
            // A call lasts as long as its answer.
            let answer = answer.map(|body| {
                let body = body.map_frame(move |frame| {
                    let _ = &counted;
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
    // If nobody called: a call that came just now is answered.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = phase.wait_for(|phase| *phase == Phase::Closing) => {}
        () = unused_for(GOODBYE_WITHIN, &mut under_way) => return,
    }
    // No command runs any more; a client that is not listening keeps nobody waiting.
    let _ = tokio::time::timeout(GOODBYE_WITHIN, connection).await;
}

/// Resolves when no call was under way for so long. Pings are no calls.
async fn unused_for(time: Duration, under_way: &mut watch::Receiver<usize>) {
    loop {
        let changed = if *under_way.borrow_and_update() == 0 {
            tokio::time::timeout(time, under_way.changed()).await
        } else {
            Ok(under_way.changed().await)
        };
        // Too long, or nobody is left who could call.
        if !matches!(changed, Ok(Ok(()))) {
            return;
        }
    }
}

// === impl Counted ===

impl Counted {
    fn new(calls: &Arc<watch::Sender<usize>>) -> Self {
        calls.send_modify(|count| *count += 1);
        Self(Arc::clone(calls))
    }
}

impl Drop for Counted {
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
        return Status::unauthenticated(TOKEN_WANTED).into_http();
    }
    let within = deadline::of(request.headers());
    let answered = routes.oneshot(request.map(tonic::body::Body::new));
    let Ok(answered) = deadline::within(within, answered).await else {
        return Status::deadline_exceeded("the deadline of the call has passed").into_http();
    };
    answered.unwrap_or_else(|never| match never {})
}

/// Whether a request shows the token, if there is one to show.
fn is_allowed(shared: &Shared, headers: &HeaderMap) -> bool {
    let Some(token) = &shared.config.token else {
        return true;
    };
    let shown = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
    let scheme_and_token = shown.and_then(|shown| shown.split_at_checked(b"Bearer ".len()));
    scheme_and_token
        .is_some_and(|(scheme, shown)| scheme.eq_ignore_ascii_case(b"Bearer ") && token.is(shown))
}
