//! `/metrics`, `/healthz` and `/readyz`.

use crate::error::{Error, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Connections at the same time; a scraper and a kubelet need two.
const CONNECTIONS: usize = 64;
/// How long a request's head may take to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// What answers a path: a status and a text, or `None` for a path that is not there.
pub(crate) type Answer = Arc<dyn Fn(&str) -> Option<(StatusCode, String)> + Send + Sync>;

/// Listens on `address` and answers in the background.
pub(crate) async fn serve(
    address: SocketAddr,
    answer: Answer,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|e| {
        Error::Start(format!(
            "cannot listen on {address}: {e}; choose another address, or 0 for none"
        ))
    })?;
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    tasks.spawn(async move {
        loop {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await; // out of descriptors, for example
                continue;
            };
            let answer = answer.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| respond(answer.clone(), request));
                let connection = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIMEOUT)
                    .serve_connection(TokioIo::new(stream), service);
                let _peer_went_away = connection.await;
                drop(place);
            });
        }
    });
    Ok(())
}

async fn respond<B>(
    answer: Answer,
    request: Request<B>,
) -> std::result::Result<Response<Full<Bytes>>, Infallible> {
    let (status, text) =
        answer(request.uri().path()).unwrap_or((StatusCode::NOT_FOUND, "not found\n".to_owned()));
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    Ok(response)
}
