//! The doors for those who watch a process: `/metrics`, and `/healthz` and `/readyz` for the kubelet.
//!
//! They know nobody and show nothing of a caller's. A connection gets one answer and little time, and there are few.

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
use tokio::sync::Semaphore;
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

/// What a door says: a status and a text for a path, or nothing for a path that is not there.
pub(crate) type Answer = Arc<dyn Fn(&str) -> Option<(StatusCode, String)> + Send + Sync>;

/// Serves until it is dropped.
pub(crate) async fn serve(listener: TcpListener, answer: Answer) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_FAILED_PAUSE).await;
            continue;
        };
        let answer = Arc::clone(&answer);
        tokio::spawn(async move {
            let _place = place;
            let service = service_fn(|request: Request<Incoming>| {
                let answer = respond(answer(request.uri().path()));
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

/// Keeps what is measured small. Never ends.
pub(crate) async fn upkeep(metrics: PrometheusHandle) {
    loop {
        tokio::time::sleep(UPKEEP_EVERY).await;
        metrics.run_upkeep();
    }
}

/// The kubelet's questions. `ready`: why the process is not, if it is not.
pub(crate) fn probes(
    ready: impl Fn() -> Result<(), &'static str> + Send + Sync + 'static,
) -> Answer {
    Arc::new(move |path| match path {
        "/healthz" => Some((StatusCode::OK, "ok\n".to_owned())),
        "/readyz" => Some(match ready() {
            Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        }),
        _ => None,
    })
}

/// What is measured, after `measure` looked.
pub(crate) fn metrics(
    handle: PrometheusHandle,
    measure: impl Fn() + Send + Sync + 'static,
) -> Answer {
    Arc::new(move |path| {
        (path == "/metrics").then(|| {
            measure();
            (StatusCode::OK, handle.render())
        })
    })
}

fn respond(answer: Option<(StatusCode, String)>) -> Response<Full<Bytes>> {
    let nothing = (
        StatusCode::NOT_FOUND,
        "there are /metrics, /healthz and /readyz, each on its port\n".to_owned(),
    );
    let (status, text) = answer.unwrap_or(nothing);
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
