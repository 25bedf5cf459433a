//! Reverse proxy to services in sandboxes ("exposed services"): plain HTTP, each request with its service's token.
//!
//! Its clients ("visitors") have no account and services are hostile, so neither is trusted. A wrong token, a service
//! without a URL and a session that does not exist get the same answer in the same time. Headers of a service's answer
//! that would affect more than its own path (or host, where each has one) are removed or rewritten: otherwise all services
//! share one origin. Nothing is buffered: bodies and WebSockets are streamed.

mod base;
mod headers;
mod proxy;
mod token_auth;

pub use base::BaseUrl;

pub(crate) use proxy::{Failed, forward};

use crate::Error;
use crate::connection_limit::{self, ConnectionLimits, LimitReached, Limited, Slot};
use futures::StreamExt as _;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8e_engine::{ExposeBase, Sessions};
use metrics::{counter, describe_counter};
use rustix::net::sockopt;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Timeout of a request's head, and of the wait for the next request on a connection.
const HEAD_WITHIN: Duration = Duration::from_secs(15);

/// A connection is authenticated once a request of it had the right token. Each costs two descriptors then, and some
/// buffers; one session's services take at most 64 at once. A proxy in front is one source, so one source may have half.
const LIMITS: ConnectionLimits = ConnectionLimits {
    listener: "expose",
    unauthenticated_max: 1024,
    unauthenticated_per_source_max: 512,
    authenticated_max: 1024,
    authenticate_within: HEAD_WITHIN,
};

/// Bytes and headers of a head, of requests and answers. Bodies have no bound.
const HEAD_BYTES_MAX: usize = 64 * 1024;
const HEADERS_MAX: usize = 128;

/// TCP keepalive, so that a visitor whose machine is gone is noticed: idle time, interval and count of the probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_PROBES: u32 = 3;

const REQUESTS: &str = "k8e_expose_requests_total";

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const NO_SNIFF: HeaderName = HeaderName::from_static("x-content-type-options");

/// An answer: a service's, or one of our own.
type Answer = Response<BoxBody<Bytes, hyper::Error>>;

/// Where the reverse proxy listens, and its URL.
#[derive(Clone, Debug)]
pub struct Expose {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether failing to bind is an error. A default address may be in use by another program.
    pub required: bool,
    /// The URL that visitors use [default: the address]. With https, a proxy in front terminates TLS.
    pub base_url: Option<BaseUrl>,
}

/// The reverse proxy, listening but not served yet.
pub(crate) struct ExposeServer {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
    base: BaseUrl,
}

/// State shared by all connections.
struct View {
    sessions: Sessions,
    base: BaseUrl,
}

// === impl ExposeServer ===

impl ExposeServer {
    /// `name`: the host name that clients use for this machine.
    pub(crate) fn open(
        expose: &Expose,
        listener: std::net::TcpListener,
        name: Option<&str>,
    ) -> Result<Self, Error> {
        let listener = TcpListener::from_std(listener).map_err(Error::Reactor)?;
        let address = listener.local_addr().unwrap_or(expose.address);
        let base = match &expose.base_url {
            Some(base) => base.clone(),
            None => BaseUrl::of(address, name),
        };
        if !address.ip().is_loopback() && !base.is_https() {
            tracing::warn!(
                "exposed services are on {address} without TLS: tokens can be read on the way. Put a proxy with TLS in front and name it with --expose-base-url"
            );
        }
        Ok(Self {
            listener,
            address,
            base,
        })
    }

    /// What the URLs of services begin with.
    pub(crate) fn base(&self) -> ExposeBase {
        self.base.for_engine()
    }

    /// Serves until it is dropped, and closes all connections then: a stream of events has no end.
    pub(crate) async fn serve(self, sessions: Sessions) {
        describe_counter!(
            REQUESTS,
            "Requests for exposed services: the class of the service's answer, refused, or unreachable"
        );
        let view = Arc::new(View {
            sessions,
            base: self.base,
        });
        let mut incoming = pin!(connection_limit::accept(self.listener, LIMITS));
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                Some(stream) = incoming.next() => {
                    connections.spawn(serve_one(stream, Arc::clone(&view)));
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }
}

async fn serve_one(stream: Limited, view: Arc<View>) {
    let (visitor, slot) = (stream.peer(), Arc::clone(stream.slot()));
    if let Err(error) = keep_alive(&stream.stream) {
        tracing::debug!("a visitor's connection: {error}");
        return;
    }
    let service = service_fn(|request| {
        let (view, slot) = (Arc::clone(&view), Arc::clone(&slot));
        async move { Ok::<_, Infallible>(view.answer(request, visitor.ip(), &slot).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = connection.await {
        tracing::debug!("a visitor's connection ended: {error}");
    }
}

fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)
}

// === impl View ===

impl View {
    async fn answer(&self, request: Request<Incoming>, visitor: IpAddr, slot: &Slot) -> Answer {
        let Some((visit, port)) = token_auth::admit(&self.sessions, &self.base, &request) else {
            count("refused");
            return not_found();
        };
        if let Err(full) = slot.authenticate() {
            count("unreachable");
            return too_many(full);
        }
        if let Some(elsewhere) = visit.without_token(&self.base, &request) {
            count("3xx");
            return elsewhere;
        }
        let answered = proxy::relay(&self.base, &visit, &port, request, visitor).await;
        match answered {
            Ok(answer) => {
                count(class(answer.status()));
                answer
            }
            Err(proxy::Failed::Gone) => {
                count("refused");
                not_found()
            }
            Err(proxy::Failed::Unreachable(status, why)) => {
                count("unreachable");
                plain_text(status, &why)
            }
        }
    }
}

fn count(result: &'static str) {
    counter!(REQUESTS, "result" => result).increment(1);
}

fn class(status: StatusCode) -> &'static str {
    match status.as_u16() {
        ..=199 => "1xx",
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        500.. => "5xx",
    }
}

/// The one answer to requests without a right token; it does not say why. It closes the connection, so each guess costs one.
fn not_found() -> Answer {
    let text = "not found: no service is exposed here, or its token is missing or wrong; its owner gets the URL from `k8e sandbox exposed`";
    let mut answer = plain_text(StatusCode::NOT_FOUND, text);
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(CONNECTION, close);
    answer
}

fn too_many(LimitReached { authenticated_max }: LimitReached) -> Answer {
    let text = format!("{authenticated_max} visitors are connected already: try again");
    let mut answer = plain_text(StatusCode::SERVICE_UNAVAILABLE, &text);
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(CONNECTION, close);
    answer
}

/// An answer of our own, as plain text.
fn plain_text(status: StatusCode, text: &str) -> Answer {
    let body = Full::new(Bytes::from(format!("{text}\n")));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed());
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, TEXT);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(NO_SNIFF, HeaderValue::from_static("nosniff"));
    answer
}
