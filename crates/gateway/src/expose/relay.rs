//! One request to a service and its answer, or a WebSocket, as it comes.

use super::base::BaseUrl;
use super::headers::{to_service, to_visitor};
use super::visit::Visit;
use super::{Answer, HEAD_BYTES_MAX, HEADERS_MAX};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST, HeaderMap, HeaderValue, UPGRADE};
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;
use k8e_engine::{OpenPort, PortConnection};
use k8e_model::Code;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// A service that computes may take a while to begin its answer; one that never does holds a place.
const ANSWER_WITHIN: Duration = Duration::from_secs(600);

/// Why there is no answer of the service's.
pub(super) enum Failed {
    /// Nothing is here any more.
    Gone,
    /// What a visitor is told.
    Unreachable(StatusCode, String),
}

/// Ends the connection to a service with whoever holds this.
struct Held(AbortHandle);

/// An answer's body, and what carries it.
struct HeldBody {
    inner: Incoming,
    _held: Held,
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
        (None, Some(_)) => Err(misspoke("it switched to a protocol that nobody asked for")),
        (_, None) => {
            let held = |inner| HeldBody { inner, _held: held };
            Ok(answer.map(|inner| held(inner).boxed()))
        }
    }
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
) -> Result<(Response<Incoming>, Held), Failed> {
    let (mut sender, connection) = http1::Builder::new()
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .handshake(TokioIo::new(connection))
        .await
        .map_err(|_| misspoke("it hung up"))?;
    let carried = tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!("a connection to a service ended: {error}");
        }
    });
    let held = Held(carried.abort_handle());
    match timeout(ANSWER_WITHIN, sender.send_request(request)).await {
        Ok(Ok(answer)) => Ok((answer, held)),
        Ok(Err(error)) if error.is_user() => {
            // The visitor stopped sending; nobody reads this.
            Err(misspoke("the request was broken off"))
        }
        Ok(Err(_)) => Err(misspoke("what it answered is not HTTP, or it hung up")),
        Err(_) => Err(Failed::Unreachable(
            StatusCode::GATEWAY_TIMEOUT,
            format!("the service did not answer within {ANSWER_WITHIN:?}"),
        )),
    }
}

/// Carries what both say from here on, whatever that is.
fn join(visitor: OnUpgrade, service: OnUpgrade, answer: Response<Incoming>, held: Held) -> Answer {
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

/// Only WebSockets: no other protocol is what browsers upgrade to.
fn wants_upgrade(request: &Request<Incoming>) -> bool {
    let has = |headers: &HeaderMap, name, token: &[u8]| {
        let values = headers.get_all(name).into_iter();
        let mut words = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        words.any(|word| word.trim_ascii().eq_ignore_ascii_case(token))
    };
    let headers = request.headers();
    request.method() == Method::GET
        && request.version() == Version::HTTP_11
        && has(headers, CONNECTION, b"upgrade")
        && has(headers, UPGRADE, b"websocket")
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

fn misspoke(what: &str) -> Failed {
    let why = format!("the service in the sandbox gave no answer: {what}");
    Failed::Unreachable(StatusCode::BAD_GATEWAY, why)
}

// === impl Held ===

impl Drop for Held {
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
