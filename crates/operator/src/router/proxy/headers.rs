//! Header rewriting of the proxy: removes hop-by-hop headers and credentials, sets X-Forwarded-*.

use super::Caller;
use crate::router::refusal::Refusal;
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, FORWARDED, HOST,
    HeaderMap, HeaderName, HeaderValue, ORIGIN, TE, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::{Request, Response, StatusCode, Uri, Version};
use k8e_net::hop_by_hop;
use std::net::SocketAddr;

/// Request id set by clients, for the access log.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest request id; a longer one is not logged.
const REQUEST_ID_BYTES_MAX: usize = 128;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Protocol towards the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// HTTP/1.1.
    Http,
    /// HTTP/1.1 with an upgrade, such as a WebSocket.
    Upgrade,
    /// gRPC: HTTP/2 without TLS, with trailers.
    Grpc,
}

pub(super) fn kind(request: &Request<Incoming>) -> Kind {
    if is_grpc(request) {
        Kind::Grpc
    } else if wants_upgrade(request) {
        Kind::Upgrade
    } else {
        Kind::Http
    }
}

/// Whether this is native gRPC: `grpc-web`, and any request over HTTP/1.1, is plain HTTP.
pub(super) fn is_grpc(request: &Request<Incoming>) -> bool {
    let kind = request
        .headers()
        .get(CONTENT_TYPE)
        .map(HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(b"application/grpc"));
    let named = rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')));
    named && request.version() == Version::HTTP_2
}

/// Rewrites the headers of a client's request for the sandbox.
pub(super) fn to_sandbox(parts: &mut Parts, kind: Kind, caller: Caller) {
    let headers = &mut parts.headers;
    let host = headers.get(HOST).cloned();
    let host = host.or_else(|| HeaderValue::from_str(parts.uri.authority()?.as_str()).ok());
    let protocol = headers.get(UPGRADE).cloned();
    let trailers = kind == Kind::Grpc && headers.contains_key(TE);
    hop_by_hop::remove(headers, &[]);
    for name in [
        HOST,
        AUTHORIZATION,
        EXPECT,
        FORWARDED,
        FORWARDED_FOR,
        FORWARDED_HOST,
    ] {
        headers.remove(name);
    }
    match kind {
        Kind::Http => {}
        Kind::Upgrade => {
            // Origin names the host of the router; servers that check it against their own would refuse.
            headers.remove(ORIGIN);
            headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
            headers.extend(protocol.map(|protocol| (UPGRADE, protocol)));
        }
        Kind::Grpc => headers.extend(trailers.then(|| (TE, HeaderValue::from_static("trailers")))),
    }
    join_cookies(headers, kind);
    // Values sent by the client are replaced: only what the router saw itself can be trusted.
    let address = HeaderValue::from_str(&caller.address.to_string());
    headers.extend(address.ok().map(|address| (FORWARDED_FOR, address)));
    let protocol = HeaderValue::from_static(if caller.tls { "https" } else { "http" });
    headers.insert(FORWARDED_PROTO, protocol);
    headers.extend(host.map(|host| (FORWARDED_HOST, host)));
}

/// Sets URI, authority or Host, and HTTP version for the address of the sandbox.
pub(super) fn address<B>(
    request: &mut Request<B>,
    address: SocketAddr,
    kind: Kind,
) -> Result<(), Refusal> {
    let invalid = || Refusal::new(StatusCode::BAD_REQUEST, "Invalid path.");
    let authority = address.to_string();
    let path = request.uri().path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let mut uri = Uri::default().into_parts();
    uri.path_and_query = Some(path);
    if kind == Kind::Grpc {
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = Some(Authority::try_from(authority).map_err(|_| invalid())?);
        *request.version_mut() = Version::HTTP_2;
    } else {
        let host = HeaderValue::try_from(authority).map_err(|_| invalid())?;
        request.headers_mut().insert(HOST, host);
        *request.version_mut() = Version::HTTP_11;
    }
    *request.uri_mut() = Uri::from_parts(uri).map_err(|_| invalid())?;
    Ok(())
}

/// Rewrites the headers of a sandbox's response for the client. `protocol` is the upgraded protocol.
pub(super) fn to_caller<B>(answer: &mut Response<B>, kind: Kind, protocol: Option<HeaderValue>) {
    hop_by_hop::remove(answer.headers_mut(), &[]);
    if kind == Kind::Upgrade
        && let Some(protocol) = protocol
    {
        let headers = answer.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
    // hyper sets the version of the client's connection.
    *answer.version_mut() = Version::default();
}

/// The request id of the client, if it is short printable text.
pub(super) fn request_id(request: &Request<Incoming>) -> Option<String> {
    let id = request.headers().get(REQUEST_ID)?.to_str().ok()?;
    let short = id.len() <= REQUEST_ID_BYTES_MAX && !id.is_empty();
    short.then(|| id.to_owned())
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// HTTP/2 may split cookies into several headers; HTTP/1.1 allows one (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap, kind: Kind) {
    let cookies: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if kind != Kind::Grpc
        && cookies.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// Whether the client asks for an upgrade to any protocol except h2c, whose requests would bypass authorization.
fn wants_upgrade(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    let mut protocols = hop_by_hop::tokens(headers, &UPGRADE).peekable();
    request.version() == Version::HTTP_11
        && hop_by_hop::has_token(headers, &CONNECTION, "upgrade")
        && protocols.peek().is_some()
        && protocols.all(|word| {
            !word
                .get(..2)
                .is_some_and(|two| two.eq_ignore_ascii_case(b"h2"))
        })
}
