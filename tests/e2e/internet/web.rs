//! Web servers: every name at every address, each answer telling who was asked for what.

mod site;
mod socket;

use super::log::{Log, Request};
use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, HOST, LOCATION, UPGRADE};
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_stream::wrappers::ReceiverStream;

/// How often `/drip` says something.
const DRIP: Duration = Duration::from_millis(50);

/// What `/bytes/N` is cut from.
static FILLER: [u8; 64 * 1024] = [b'k'; 64 * 1024];

type Body = BoxBody<Bytes, Infallible>;

/// A web server.
#[derive(Clone, Debug)]
pub(super) struct Web {
    pub(super) log: Log,
    /// A folder for each name that has files.
    pub(super) files: Arc<PathBuf>,
}

/// One connection to it.
#[derive(Clone, Debug)]
struct Visit {
    web: Web,
    local: SocketAddr,
    tls_name: Option<String>,
}

// === impl Web ===

impl Web {
    pub(super) async fn serve<S>(self, stream: S, local: SocketAddr, tls_name: Option<String>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let visit = Visit {
            web: self,
            local,
            tls_name,
        };
        let service = service_fn(move |request| {
            let visit = visit.clone();
            async move { Ok::<_, Infallible>(visit.answer(request).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        // Who goes away in the middle of something is not an error of ours.
        drop(connection.await);
    }
}

// === impl Visit ===

impl Visit {
    async fn answer(&self, request: hyper::Request<Incoming>) -> Response<Body> {
        let host = request.headers().get(HOST).map(|host| host.as_bytes());
        let host = String::from_utf8_lossy(host.unwrap_or_default()).into_owned();
        let seen = Request {
            at: Instant::now(),
            local: self.local,
            tls_name: self.tls_name.clone(),
            method: request.method().to_string(),
            target: request.uri().to_string(),
            host,
        };
        self.web.log.request(seen.clone());
        if request.method() == Method::CONNECT {
            tokio::spawn(socket::tunnel(hyper::upgrade::on(request)));
            return Response::new(empty());
        }
        if request.headers().contains_key(UPGRADE) {
            return socket::accept(request);
        }
        let (head, mut body) = request.into_parts();
        // All of it, or the connection could not be kept.
        while let Some(Ok(_)) = body.frame().await {}
        let path = head.uri.path();
        if let Some(bytes) = path.strip_prefix("/bytes/") {
            return bulk(bytes.parse().unwrap_or(0));
        }
        if path == "/drip" {
            return drip();
        }
        if path == "/redirect" {
            return redirect(head.uri.query().unwrap_or_default());
        }
        let name = seen.host.split(':').next().unwrap_or_default();
        match site::read(&self.web.files, name, path) {
            site::Found::File { kind, data } => {
                let mut response = Response::new(full(data));
                let value = kind.parse().expect("a header");
                response.headers_mut().insert("content-type", value);
                response
            }
            site::Found::Nothing => status(StatusCode::NOT_FOUND),
            site::Found::NoSite => Response::new(full(self.story(&seen))),
        }
    }

    /// Who was asked for what.
    fn story(&self, seen: &Request) -> Vec<u8> {
        let story = json!({
            "address": seen.local.ip().to_string(),
            "tls_name": seen.tls_name,
            "host": seen.host,
            "target": seen.target,
        });
        format!("{story}\n").into_bytes()
    }
}

fn bulk(mut bytes: usize) -> Response<Body> {
    let length = bytes;
    let chunks = std::iter::from_fn(move || {
        let chunk = bytes.min(FILLER.len());
        bytes -= chunk;
        let frame = || Ok(Frame::data(Bytes::from_static(&FILLER[..chunk])));
        (chunk > 0).then(frame)
    });
    let body = StreamBody::new(tokio_stream::iter(chunks));
    let mut response = Response::new(body.boxed());
    response.headers_mut().insert(CONTENT_LENGTH, length.into());
    response
}

/// A line now and then, for as long as somebody listens.
fn drip() -> Response<Body> {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let drop = || Ok(Frame::data(Bytes::from_static(b"drip\n")));
        while sender.send(drop()).await.is_ok() {
            tokio::time::sleep(DRIP).await;
        }
    });
    Response::new(StreamBody::new(ReceiverStream::new(receiver)).boxed())
}

fn redirect(target: &str) -> Response<Body> {
    let mut response = status(StatusCode::FOUND);
    let target = target.strip_prefix("to=").unwrap_or(target);
    let target = target.parse().expect("a header");
    response.headers_mut().insert(LOCATION, target);
    response
}

fn status(code: StatusCode) -> Response<Body> {
    let mut response = Response::new(empty());
    *response.status_mut() = code;
    response
}

fn full(data: Vec<u8>) -> Body {
    Full::new(Bytes::from(data)).boxed()
}

fn empty() -> Body {
    full(Vec::new())
}
