//! The door for those who watch the server: `/metrics`, `/healthz` and `/readyz` over plain HTTP.
//!
//! It knows nobody and shows nothing of a client's, so it is closed unless somebody asks for it.
//! A connection gets one answer and little time, and there are few of them, fewer from one source: a
//! flood costs the server no more than this door, and who watches from elsewhere does not notice.

use crate::connection_limit::{self, ConnectionLimits, Limited};
use crate::{Error, Metrics};
use futures::StreamExt as _;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8e_engine::Sessions;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// What a request's head may take, and the whole connection: an answer is some kilobytes.
const HEAD_WITHIN: Duration = Duration::from_secs(5);
const CONNECTION_WITHIN: Duration = Duration::from_secs(10);

/// A few who watch, and those who look by hand. Nobody authenticates here.
const LIMITS: ConnectionLimits = ConnectionLimits {
    listener: "metrics",
    unauthenticated_max: 32,
    unauthenticated_per_source_max: 16,
    authenticated_max: 0,
    authenticate_within: CONNECTION_WITHIN,
};

/// Of a request's head; hyper takes no less.
const HEAD_BYTES_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;

/// A store that needs longer than this does not answer.
const READY_WITHIN: Duration = Duration::from_secs(2);

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const PROMETHEUS: HeaderValue =
    HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// Where the door is, and what it shows.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it shows.
    pub metrics: Metrics,
}

/// The door, open but not served yet.
pub(crate) struct AdminDoor {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
    metrics: Metrics,
}

/// What an answer is made from.
#[derive(Clone)]
struct View {
    sessions: Sessions,
    metrics: Metrics,
    stopping: watch::Receiver<bool>,
}

// === impl AdminDoor ===

impl AdminDoor {
    pub(crate) fn open(admin: Admin, listener: std::net::TcpListener) -> Result<Self, Error> {
        let Admin { address, metrics } = admin;
        let listener = TcpListener::from_std(listener).map_err(Error::Reactor)?;
        Ok(Self {
            address: listener.local_addr().unwrap_or(address),
            listener,
            metrics,
        })
    }

    /// Serves until it is dropped.
    pub(crate) async fn serve(self, sessions: Sessions, stopping: watch::Receiver<bool>) {
        let view = View {
            sessions,
            metrics: self.metrics.clone(),
            stopping,
        };
        let mut incoming = pin!(connection_limit::accept(self.listener, LIMITS));
        let mut connections = JoinSet::new();
        let mut upkeep = pin!(self.metrics.upkeep());
        loop {
            tokio::select! {
                Some(stream) = incoming.next() => {
                    connections.spawn(serve_one(stream, view.clone()));
                }
                Some(_) = connections.join_next() => {}
                () = &mut upkeep => {}
            }
        }
    }
}

async fn serve_one(stream: Limited, view: View) {
    let service = service_fn(|request| {
        let view = view.clone();
        async move { Ok::<_, Infallible>(view.answer(&request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(CONNECTION_WITHIN, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("a request for metrics ended: {error}"),
        Err(_) => tracing::debug!("a request for metrics took too long"),
    }
}

// === impl View ===

impl View {
    /// What a request asks for. Its body, if there is one, is not read.
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "use GET\n".to_owned());
            let allowed = HeaderValue::from_static("GET, HEAD");
            answer.headers_mut().insert(ALLOW, allowed);
            return answer;
        }
        match request.uri().path() {
            "/metrics" => {
                let mut answer = text(StatusCode::OK, self.metrics.render(&self.sessions));
                answer.headers_mut().insert(CONTENT_TYPE, PROMETHEUS);
                answer
            }
            "/healthz" => text(StatusCode::OK, "ok\n".to_owned()),
            "/readyz" => match self.ready().await {
                Ok(()) => text(StatusCode::OK, "ok\n".to_owned()),
                Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            },
            _ => text(
                StatusCode::NOT_FOUND,
                "there are /metrics, /healthz and /readyz\n".to_owned(),
            ),
        }
    }

    /// Whether sessions can be made, or why not.
    async fn ready(&self) -> Result<(), String> {
        if *self.stopping.borrow() {
            return Err("the server is stopping".to_owned());
        }
        match timeout(READY_WITHIN, self.sessions.ready()).await {
            Ok(ready) => ready.map_err(|error| error.to_string()),
            Err(_) => Err(format!("the store did not answer within {READY_WITHIN:?}")),
        }
    }
}

fn text(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, TEXT);
    let fresh = HeaderValue::from_static("no-store");
    answer.headers_mut().insert(CACHE_CONTROL, fresh);
    answer
}
