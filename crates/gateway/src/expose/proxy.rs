//! Proxies one request to a service and streams its answer back, or relays a WebSocket.

use super::base::BaseUrl;
use super::headers::{to_service, to_visitor};
use super::token_auth::Visit;
use super::{Answer, HEAD_BYTES_MAX, HEADERS_MAX};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderValue, TRANSFER_ENCODING, UPGRADE,
};
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;
use k8e_engine::{OpenPort, PortConnection};
use k8e_model::Code;
use k8e_net::hop_by_hop::has_token;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Timeout of the head of an answer: a service may compute for a while; one that never answers holds a connection.
const ANSWER_WITHIN: Duration = Duration::from_secs(600);

/// Why the service gave no answer.
pub(crate) enum Failed {
    /// The session or the exposure has ended meanwhile.
    Gone,
    /// Status and text for the visitor.
    Unreachable(StatusCode, String),
}

/// Aborts the task of a connection to a service when dropped.
struct AbortOnDrop(AbortHandle);

/// The body of an answer, and the connection it comes from.
struct HeldBody {
    inner: Incoming,
    _held: AbortOnDrop,
}

/// Passes a request on and the answer back.
pub(super) async fn relay(
    base: &BaseUrl,
    visit: &Visit,
    port: &OpenPort,
    mut request: Request<Incoming>,
    visitor: IpAddr,
) -> Result<Answer, Failed> {
    let connection = port.connect().await.map_err(not_connected)?;
    let upgrade = wants_upgrade(&request);
    let visitors_end = upgrade.then(|| hyper::upgrade::on(&mut request));
    let host = request.headers().get(HOST).cloned();
    let request = passed_on(base, visit, request, visitor, upgrade)?;
    let (mut answer, held) = ask(connection, request).await?;
    let switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let services_end = switched.then(|| hyper::upgrade::on(&mut answer));
    to_visitor(answer.headers_mut(), visit, host.as_ref());
    match (visitors_end, services_end) {
        (Some(visitors_end), Some(services_end)) => {
            Ok(join(visitors_end, services_end, answer, held))
        }
        (None, Some(_)) => Err(no_answer("it switched to a protocol that nobody asked for")),
        (_, None) => {
            let held = |inner| HeldBody { inner, _held: held };
            Ok(answer.map(|inner| held(inner).boxed()))
        }
    }
}

/// Passes a request on as it is, but for hop-by-hop headers, and the answer back: for clients that address a service by a
/// host name or headers of their own.
pub(crate) async fn forward(
    connection: PortConnection,
    mut request: Request<Incoming>,
) -> Result<Answer, Failed> {
    let upgrade = wants_upgrade(&request);
    let visitors_end = upgrade.then(|| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    let target = parts
        .uri
        .path_and_query()
        .map_or("/", |target| target.as_str());
    parts.uri = target.parse().map_err(|_| {
        let why = "the path cannot be passed on".to_owned();
        Failed::Unreachable(StatusCode::BAD_REQUEST, why)
    })?;
    parts.version = Version::HTTP_11;
    hop_by_hop(&mut parts.headers);
    // `Expect: 100-continue` is answered here, when the body is read.
    parts.headers.remove(EXPECT);
    let close = if upgrade { "upgrade" } else { "close" };
    parts
        .headers
        .insert(CONNECTION, HeaderValue::from_static(close));
    if upgrade {
        parts
            .headers
            .insert(UPGRADE, HeaderValue::from_static("websocket"));
    }
    let (mut answer, held) = ask(connection, Request::from_parts(parts, body)).await?;
    let switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let services_end = switched.then(|| hyper::upgrade::on(&mut answer));
    hop_by_hop(answer.headers_mut());
    match (visitors_end, services_end) {
        (Some(visitors_end), Some(services_end)) => {
            Ok(join(visitors_end, services_end, answer, held))
        }
        (None, Some(_)) => Err(no_answer("it switched to a protocol that nobody asked for")),
        (_, None) => Ok(answer.map(|inner| HeldBody { inner, _held: held }.boxed())),
    }
}

/// Removes what is about one connection only. A chunked message has no other length: two lengths are how requests are
/// smuggled.
fn hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    k8e_net::hop_by_hop::remove(headers, &[]);
}

/// The request as the service gets it.
fn passed_on(
    base: &BaseUrl,
    visit: &Visit,
    request: Request<Incoming>,
    visitor: IpAddr,
    upgrade: bool,
) -> Result<Request<Incoming>, Failed> {
    let (mut parts, body) = request.into_parts();
    let target: Result<Uri, _> = visit.target.parse();
    parts.uri = target.map_err(|_| {
        let why = "the path cannot be passed on".to_owned();
        Failed::Unreachable(StatusCode::BAD_REQUEST, why)
    })?;
    parts.version = Version::HTTP_11;
    to_service(&mut parts.headers, visit, base, visitor, upgrade);
    Ok(Request::from_parts(parts, body))
}

/// Sends it and waits for the head of the answer.
async fn ask(
    connection: PortConnection,
    request: Request<Incoming>,
) -> Result<(Response<Incoming>, AbortOnDrop), Failed> {
    let (mut sender, connection) = http1::Builder::new()
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .handshake(TokioIo::new(connection))
        .await
        .map_err(|_| no_answer("it hung up"))?;
    let carried = tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!("a connection to a service ended: {error}");
        }
    });
    let held = AbortOnDrop(carried.abort_handle());
    match timeout(ANSWER_WITHIN, sender.send_request(request)).await {
        Ok(Ok(answer)) => Ok((answer, held)),
        Ok(Err(error)) if error.is_user() => {
            // The visitor stopped sending; nobody reads this.
            Err(no_answer("the client cancelled the request"))
        }
        Ok(Err(_)) => Err(no_answer("what it answered is not HTTP, or it hung up")),
        Err(_) => Err(Failed::Unreachable(
            StatusCode::GATEWAY_TIMEOUT,
            format!("the service did not answer within {ANSWER_WITHIN:?}"),
        )),
    }
}

/// Relays bytes in both directions after the upgrade.
fn join(
    visitor: OnUpgrade,
    service: OnUpgrade,
    answer: Response<Incoming>,
    held: AbortOnDrop,
) -> Answer {
    tokio::spawn(async move {
        let _held = held;
        let Ok((visitor, service)) = tokio::try_join!(visitor, service) else {
            return;
        };
        let (mut visitor, mut service) = (TokioIo::new(visitor), TokioIo::new(service));
        let _ = tokio::io::copy_bidirectional(&mut visitor, &mut service).await;
    });
    let mut answer = answer.map(|_| Empty::new().map_err(|never| match never {}).boxed());
    let headers = answer.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    answer
}

/// Only WebSockets are upgraded: browsers know no other protocol.
fn wants_upgrade(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    request.method() == Method::GET
        && request.version() == Version::HTTP_11
        && has_token(headers, &CONNECTION, "upgrade")
        && has_token(headers, &UPGRADE, "websocket")
}

fn not_connected(error: k8e_engine::Error) -> Failed {
    if matches!(error, k8e_engine::Error::SessionEnded { .. }) || error.code() == Code::NotFound {
        return Failed::Gone;
    }
    let status = if error.code() == Code::Exhausted {
        StatusCode::SERVICE_UNAVAILABLE
    } else {
        StatusCode::BAD_GATEWAY
    };
    Failed::Unreachable(status, error.to_string())
}

fn no_answer(what: &str) -> Failed {
    let why = format!("the service in the sandbox gave no answer: {what}");
    Failed::Unreachable(StatusCode::BAD_GATEWAY, why)
}

// === impl AbortOnDrop ===

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

// === impl HeldBody ===

impl Body for HeldBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
