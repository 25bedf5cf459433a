//! Admin HTTP server: `/metrics` for Prometheus, `/healthz` and `/readyz` for health and readiness probes.
//!
//! Plain HTTP/1.1 without authentication, so nothing that belongs to a client is shown. A connection gets one answer and
//! has a deadline; how many there may be is the listener's limit. A flood costs the process no more than this server.

use crate::accept::ConnectionLimit;
use futures::future::BoxFuture;
use futures::{Stream, StreamExt as _};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::PrometheusHandle;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Connections at once: some Prometheus servers, the kubelet, and people who look by hand.
pub const CONNECTIONS_MAX: usize = 32;

/// For a whole connection: a request and an answer of some kilobytes.
pub const CONNECTION_WITHIN: Duration = Duration::from_secs(10);

/// For the head of a request.
const HEAD_WITHIN: Duration = Duration::from_secs(5);

/// Of a request's head; hyper takes no less.
const HEAD_BYTES_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;

/// Between sums of the samples of histograms. Until then each sample is kept, and where nobody scrapes nothing else would
/// sum them.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const PROMETHEUS: HeaderValue =
    HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// What is served: metrics, probes, or both.
#[derive(Clone, Default)]
pub struct AdminHttp {
    metrics: Option<Arc<Render>>,
    readiness: Option<Arc<Readiness>>,
}

/// Makes the text of `/metrics`.
type Render = dyn Fn() -> String + Send + Sync;

/// Whether the process is ready, or why not.
type Readiness = dyn Fn() -> BoxFuture<'static, Result<(), String>> + Send + Sync;

/// Keeps the samples of histograms small. Never ends.
pub async fn upkeep(metrics: PrometheusHandle) {
    loop {
        tokio::time::sleep(UPKEEP_EVERY).await;
        metrics.run_upkeep();
    }
}

// === impl AdminHttp ===

impl AdminHttp {
    /// Serves `/metrics`: what `render` returns, in Prometheus' text format.
    #[must_use]
    pub fn metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.metrics = Some(Arc::new(render));
        self
    }

    /// Serves `/healthz`, which is always `ok`, and `/readyz`: `ok`, or why `ready` says that the process is not.
    #[must_use]
    pub fn probes<F>(mut self, ready: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        self.readiness = Some(Arc::new(move || Box::pin(ready())));
        self
    }

    /// Serves the connections of `listener`, at most [`CONNECTIONS_MAX`] at once, until this is dropped.
    pub async fn listen(self, listener: TcpListener) {
        let limit = ConnectionLimit::new(CONNECTIONS_MAX);
        self.serve(limit.incoming(listener)).await;
    }

    /// Serves connections, each with what is to be dropped when it is closed, until `incoming` ends or this is dropped.
    pub async fn serve<S, P>(self, incoming: impl Stream<Item = (S, P)>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        P: Send + 'static,
    {
        let mut incoming = pin!(incoming);
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = incoming.next() => {
                    let Some((stream, permit)) = accepted else { return };
                    let this = self.clone();
                    connections.spawn(async move {
                        this.serve_one(stream).await;
                        drop(permit);
                    });
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }

    async fn serve_one(&self, stream: impl AsyncRead + AsyncWrite + Unpin) {
        let service =
            service_fn(
                move |request| async move { Ok::<_, Infallible>(self.answer(&request).await) },
            );
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_WITHIN)
            .max_buf_size(HEAD_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        match timeout(CONNECTION_WITHIN, connection).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!("a request for metrics or a probe failed: {error}"),
            Err(_) => tracing::debug!("a request for metrics or a probe took too long"),
        }
    }

    /// The body of a request, if there is one, is not read.
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
            let allowed = HeaderValue::from_static("GET, HEAD");
            answer.headers_mut().insert(ALLOW, allowed);
            return answer;
        }
        match (request.uri().path(), &self.metrics, &self.readiness) {
            ("/metrics", Some(render), _) => {
                let mut answer = text(StatusCode::OK, render());
                answer.headers_mut().insert(CONTENT_TYPE, PROMETHEUS);
                answer
            }
            ("/healthz", _, Some(_)) => text(StatusCode::OK, "ok\n"),
            ("/readyz", _, Some(ready)) => match ready().await {
                Ok(()) => text(StatusCode::OK, "ok\n"),
                Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            },
            _ => text(StatusCode::NOT_FOUND, self.paths()),
        }
    }

    fn paths(&self) -> &'static str {
        match (&self.metrics, &self.readiness) {
            (Some(_), Some(_)) => "there are /metrics, /healthz and /readyz\n",
            (Some(_), None) => "there is /metrics; probes have a port of their own\n",
            (None, Some(_)) => "there are /healthz and /readyz; metrics have a port of their own\n",
            (None, None) => "there is nothing\n",
        }
    }
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(text.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, TEXT);
    let fresh = HeaderValue::from_static("no-store");
    answer.headers_mut().insert(CACHE_CONTROL, fresh);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    async fn asked(server: &AdminHttp, request: &str) -> String {
        let (mut client, stream) = tokio::io::duplex(4096);
        let served = server.serve_one(stream);
        let asked = async {
            client.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let ((), answer) = tokio::join!(served, asked);
        answer
    }

    async fn get(server: &AdminHttp, path: &str) -> String {
        asked(server, &format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await
    }

    #[tokio::test]
    async fn each_path_has_its_answer() {
        let server = AdminHttp::default()
            .metrics(|| "a_total 1\n".to_owned())
            .probes(async || Err("starting".to_owned()));
        let metrics = get(&server, "/metrics").await;
        assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
        assert!(metrics.contains("version=0.0.4") && metrics.ends_with("a_total 1\n"));
        assert!(get(&server, "/healthz").await.ends_with("ok\n"));
        let not_ready = get(&server, "/readyz").await;
        assert!(
            not_ready.starts_with("HTTP/1.1 503") && not_ready.ends_with("starting\n"),
            "{not_ready}"
        );
        assert!(get(&server, "/x").await.starts_with("HTTP/1.1 404"));
        let posted = asked(&server, "POST /metrics HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(posted.starts_with("HTTP/1.1 405"), "{posted}");
    }

    #[tokio::test]
    async fn what_is_not_served_is_not_found() {
        let metrics = AdminHttp::default().metrics(String::new);
        assert!(get(&metrics, "/readyz").await.starts_with("HTTP/1.1 404"));
        let probes = AdminHttp::default().probes(async || Ok(()));
        assert!(get(&probes, "/metrics").await.starts_with("HTTP/1.1 404"));
        assert!(get(&probes, "/readyz").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_closed_and_its_permit_dropped() {
        let (mut client, stream): (DuplexStream, _) = tokio::io::duplex(64);
        let (permit, dropped) = tokio::sync::oneshot::channel::<()>();
        let incoming = futures::stream::iter([(stream, permit)]).chain(futures::stream::pending());
        let served = AdminHttp::default().serve(incoming);
        let closed = async {
            let mut rest = Vec::new();
            client.read_to_end(&mut rest).await.unwrap();
            dropped.await.unwrap_err();
        };
        tokio::select! {
            () = served => panic!("the server ended"),
            () = closed => {}
        }
    }
}
