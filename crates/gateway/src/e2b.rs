//! The E2B API: a control API, the daemon that E2B's clients expect in each sandbox (`envd`), and its ports, on one
//! plain-HTTP origin. E2B's official clients use it by environment variables alone ([docs/e2b.md]).
//!
//! Requests with the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, or with a host name of a port, are for a sandbox and
//! have its access token; all others are for the control API and have an API key. Like every door it parses, renders and
//! authenticates; sessions, commands and files are the engine's.
//!
//! [docs/e2b.md]: https://github.com/k8e/k8e/blob/main/docs/e2b.md

mod body;
mod connect;
mod control;
mod create;
mod entry;
mod envd;
mod error;
mod files;
mod filesystem;
mod fork;
mod interpreter;
mod metrics;
mod ports;
mod process;
mod query;
mod signature;
mod target;
mod time;
mod user;

/// For the crate `fuzz`.
pub(crate) mod fuzzing {
    pub use super::connect::fuzzing::*;
}

use crate::Error;
use crate::auth::Authenticator;
use crate::connection_limit::{self, ConnectionLimits, Limited, Slot};
use body::Answer;
use error::Failure;
use futures::StreamExt as _;
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONNECTION, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8e_engine::Sessions;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use target::Target;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Wait for the next request on a connection: E2B's Python client uses a connection again after up to 300 seconds.
/// Connections that have not authenticated have the shorter deadline of [`LIMITS`].
const IDLE_WITHIN: Duration = Duration::from_secs(620);

/// E2B's clients have up to 200 connections each, and all of one machine are one source.
const LIMITS: ConnectionLimits = ConnectionLimits {
    listener: "e2b",
    unauthenticated_max: 1024,
    unauthenticated_per_source_max: 512,
    authenticated_max: 4096,
    authenticate_within: Duration::from_secs(15),
};

/// Bytes and headers of a head.
pub(crate) const HEAD_BYTES_MAX: usize = 64 * 1024;
pub(crate) const HEADERS_MAX: usize = 128;

/// Where the E2B API listens.
#[derive(Clone, Debug)]
pub struct E2b {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether failing to bind is an error. A default address may be in use by another program.
    pub required: bool,
    /// Domain of the host names of ports, `<port>-<sandbox>.<domain>`, with a port if it is not 80 [default: localhost
    /// and the port of the address]
    pub domain: Option<String>,
}

/// The E2B API, listening but not served yet.
pub(crate) struct E2bServer {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
    domain: String,
}

/// State shared by all connections.
pub(crate) struct Api {
    sessions: Sessions,
    authenticator: Authenticator,
    domain: String,
    watchers: filesystem::watch::Watchers,
}

/// A client's connection.
#[derive(Clone)]
struct Client {
    address: IpAddr,
    slot: Arc<Slot>,
}

// === impl E2bServer ===

impl E2bServer {
    pub(crate) fn open(config: &E2b, listener: std::net::TcpListener) -> Result<Self, Error> {
        let listener = TcpListener::from_std(listener).map_err(Error::Reactor)?;
        let address = listener.local_addr().unwrap_or(config.address);
        if !address.ip().is_loopback() {
            tracing::warn!(
                "the E2B API is on {address} without TLS: API keys and tokens can be read on the way. Put a proxy with TLS in front"
            );
        }
        let local = || format!("localhost:{}", address.port());
        Ok(Self {
            listener,
            address,
            domain: config.domain.clone().unwrap_or_else(local),
        })
    }

    /// Serves until it is dropped, and closes all connections then: streams of commands have no end.
    pub(crate) async fn serve(self, authenticator: Authenticator) {
        let api = Arc::new(Api {
            sessions: authenticator.sessions().clone(),
            authenticator,
            domain: self.domain,
            watchers: filesystem::watch::Watchers::default(),
        });
        let mut incoming = pin!(connection_limit::accept(self.listener, LIMITS));
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                Some(stream) = incoming.next() => {
                    connections.spawn(serve_one(stream, Arc::clone(&api)));
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }
}

async fn serve_one(stream: Limited, api: Arc<Api>) {
    let client = Client {
        address: stream.peer().ip(),
        slot: Arc::clone(stream.slot()),
    };
    let service = service_fn(|request| {
        let (api, client) = (Arc::clone(&api), client.clone());
        async move { Ok::<_, Infallible>(api.answer(request, client).await) }
    });
    // An output event is one small write: it must not wait for the client's acknowledgement.
    if let Err(error) = stream.stream.set_nodelay(true) {
        tracing::debug!("a connection of an E2B client: {error}");
    }
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_WITHIN)
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = connection.await {
        tracing::debug!("a connection of an E2B client ended: {error}");
    }
}

// === impl Api ===

impl Api {
    async fn answer(self: Arc<Self>, request: Request<Incoming>, client: Client) -> Answer {
        let preflight = request.method() == Method::OPTIONS
            && request
                .headers()
                .contains_key("access-control-request-method");
        let slot = Arc::clone(&client.slot);
        let has_body = !request.body().is_end_stream();
        let mut answer = match preflight {
            true => body::empty(StatusCode::NO_CONTENT),
            // In its own task: a panic in one call is an answer to that call.
            false => match tokio::spawn(self.route(request, client)).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(failure)) => failure.answer(),
                Err(_) => Failure::internal("the call failed; the server's log says why").answer(),
            },
        };
        // It is closed soon: a client that used it for its next call might find it closed in the middle of that. Not while
        // a body is on its way: a client that cannot send it does not read the answer.
        if !slot.is_authenticated() && !has_body {
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(CONNECTION, close);
        }
        for (name, value) in CORS {
            let name = HeaderName::from_static(name);
            answer
                .headers_mut()
                .insert(name, HeaderValue::from_static(value));
        }
        answer
    }

    async fn route(
        self: Arc<Self>,
        request: Request<Incoming>,
        client: Client,
    ) -> Result<Answer, Failure> {
        match Target::of(&request, &self.domain)? {
            Some(target) => envd::serve(&self, target, request, &client).await,
            None if request.uri().path() == "/files" => {
                files::serve_signed(&self, request, &client).await
            }
            None => control::serve(&self, request, &client).await,
        }
    }
}

/// Pages of any origin may call: every call needs a key or a token, which is never in a cookie.
const CORS: [(&str, &str); 5] = [
    ("access-control-allow-origin", "*"),
    ("access-control-allow-headers", "*"),
    (
        "access-control-allow-methods",
        "GET, POST, PUT, PATCH, DELETE, OPTIONS",
    ),
    (
        "access-control-expose-headers",
        "X-Next-Token, X-Total-Running, Retry-After, Content-Disposition",
    ),
    ("access-control-max-age", "7200"),
];
