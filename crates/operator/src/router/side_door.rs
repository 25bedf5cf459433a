//! The doors for those who watch the router: `/metrics`, and `/healthz` and `/readyz` for the kubelet.
//!
//! They know nobody and show nothing of a caller's. A connection gets one answer and little time, and there are few.

use super::index::Index;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::PrometheusHandle;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

/// The kubelet, a few who scrape, and those who look by hand.
const CONNECTIONS_MAX: usize = 32;
const HEAD_WITHIN: Duration = Duration::from_secs(5);
const CONNECTION_WITHIN: Duration = Duration::from_secs(10);
/// Of a request's head; hyper takes no less.
const HEAD_BYTES_MAX: usize = 8192;
/// No descriptors left, most likely: others must close theirs first.
const ACCEPT_FAILED_PAUSE: Duration = Duration::from_millis(50);
/// Between sums of what histograms were told: until then each sample is kept.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// What is shown.
#[derive(Clone)]
pub(super) struct View {
    metrics: PrometheusHandle,
    index: Arc<Index>,
    stopping: watch::Receiver<bool>,
}

/// Which of the two doors.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shows {
    Metrics,
    Probes,
}

// === impl View ===

impl View {
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

    /// Keeps what is measured small. Never ends.
    pub(super) async fn upkeep(self) {
        loop {
            tokio::time::sleep(UPKEEP_EVERY).await;
            self.metrics.run_upkeep();
        }
    }

    /// Serves until it is dropped.
    pub(super) async fn serve(self, listener: TcpListener, shows: Shows) {
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(place) = Arc::clone(&room).acquire_owned().await else {
                return;
            };
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_FAILED_PAUSE).await;
                continue;
            };
            let view = self.clone();
            tokio::spawn(async move {
                let _place = place;
                let service = service_fn(|request: Request<Incoming>| {
                    let answer = view.answer(shows, request.uri().path());
                    async move { Ok::<_, Infallible>(answer) }
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_WITHIN)
                    .max_buf_size(HEAD_BYTES_MAX)
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(stream), service);
                let _ = timeout(CONNECTION_WITHIN, connection).await;
            });
        }
    }

    fn answer(&self, shows: Shows, path: &str) -> Response<Full<Bytes>> {
        let (status, text) = match (shows, path) {
            (Shows::Metrics, "/metrics") => (StatusCode::OK, self.metrics.render()),
            (Shows::Probes, "/healthz") => (StatusCode::OK, "ok\n".to_owned()),
            (Shows::Probes, "/readyz") => self.ready(),
            (Shows::Metrics, _) => (StatusCode::NOT_FOUND, "there is /metrics\n".to_owned()),
            (Shows::Probes, _) => (
                StatusCode::NOT_FOUND,
                "there are /healthz and /readyz\n".to_owned(),
            ),
        };
        let mut answer = Response::new(Full::new(Bytes::from(text)));
        *answer.status_mut() = status;
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        answer.headers_mut().insert(CONTENT_TYPE, kind);
        answer
    }

    /// Whether requests find their sandboxes here.
    fn ready(&self) -> (StatusCode, String) {
        let why = if *self.stopping.borrow() {
            "stopping\n"
        } else if !self.index.is_ready() {
            "the pods of sandboxes are not known yet\n"
        } else {
            return (StatusCode::OK, "ok\n".to_owned());
        };
        (StatusCode::SERVICE_UNAVAILABLE, why.to_owned())
    }
}
