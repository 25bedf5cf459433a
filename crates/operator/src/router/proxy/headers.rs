//! What is taken off, changed and added on the way: credentials stay here, and what is between two hops stays there.

use super::Caller;
use crate::router::answer::Refusal;
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, FORWARDED, HOST,
    HeaderMap, HeaderName, HeaderValue, ORIGIN, TE, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::{Request, Response, StatusCode, Uri, Version};
use std::net::SocketAddr;

/// Between two hops only, besides what `connection` names.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Made by callers, to find a request again in logs.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Of that, as much as a log takes.
const REQUEST_ID_BYTES_MAX: usize = 128;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// What is spoken with the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// HTTP/1.1.
    Http,
    /// HTTP/1.1, until both switch to something else.
    Upgrade,
    /// HTTP/2, with trailers.
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

/// gRPC as such: `grpc-web` is plain HTTP, and so is whatever comes with HTTP/1.1.
pub(super) fn is_grpc(request: &Request<Incoming>) -> bool {
    let kind = request
        .headers()
        .get(CONTENT_TYPE)
        .map(HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(b"application/grpc"));
    let named = rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')));
    named && request.version() == Version::HTTP_2
}

/// Makes a caller's headers those of the request to the sandbox.
pub(super) fn to_sandbox(parts: &mut Parts, kind: Kind, caller: Caller) {
    let headers = &mut parts.headers;
    let host = headers.get(HOST).cloned();
    let host = host.or_else(|| HeaderValue::from_str(parts.uri.authority()?.as_str()).ok());
    let protocol = headers.get(UPGRADE).cloned();
    let trailers = kind == Kind::Grpc && headers.contains_key(TE);
    remove_hop_by_hop(headers);
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
            // It names the router's host, and sandboxes that check it want their own.
            headers.remove(ORIGIN);
            headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
            headers.extend(protocol.map(|protocol| (UPGRADE, protocol)));
        }
        Kind::Grpc => headers.extend(trailers.then(|| (TE, HeaderValue::from_static("trailers")))),
    }
    join_cookies(headers, kind);
    // Whatever came in these, only what we have seen ourselves is true.
    let address = HeaderValue::from_str(&caller.address.to_string());
    headers.extend(address.ok().map(|address| (FORWARDED_FOR, address)));
    let protocol = HeaderValue::from_static(if caller.tls { "https" } else { "http" });
    headers.insert(FORWARDED_PROTO, protocol);
    headers.extend(host.map(|host| (FORWARDED_HOST, host)));
}

/// Addresses the request to where the sandbox is.
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

/// Makes a sandbox's headers those of the answer; `protocol` is what was switched to.
pub(super) fn to_caller<B>(answer: &mut Response<B>, kind: Kind, protocol: Option<HeaderValue>) {
    remove_hop_by_hop(answer.headers_mut());
    if kind == Kind::Upgrade
        && let Some(protocol) = protocol
    {
        let headers = answer.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
    // Of the caller's connection; hyper knows it.
    *answer.version_mut() = Version::default();
}

/// What its caller calls a request, if that can stand in a log.
pub(super) fn request_id(request: &Request<Incoming>) -> Option<String> {
    let id = request.headers().get(REQUEST_ID)?.to_str().ok()?;
    let short = id.len() <= REQUEST_ID_BYTES_MAX && !id.is_empty();
    short.then(|| id.to_owned())
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = words(headers, &CONNECTION)
        .filter_map(|word| HeaderName::from_bytes(word).ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// HTTP/2 sends them one by one; HTTP/1.1 knows one line of them.
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

/// To whatever, except to HTTP/2: that would be requests that nobody has looked at.
fn wants_upgrade(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    let mut asks = words(headers, &CONNECTION);
    let mut protocols = words(headers, &UPGRADE).peekable();
    request.version() == Version::HTTP_11
        && asks.any(|word| word.eq_ignore_ascii_case(b"upgrade"))
        && protocols.peek().is_some()
        && protocols.all(|word| {
            !word
                .get(..2)
                .is_some_and(|two| two.eq_ignore_ascii_case(b"h2"))
        })
}

fn words<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
) -> impl Iterator<Item = &'h [u8]> + use<'h> {
    let values = headers.get_all(name).into_iter();
    values
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|word| !word.is_empty())
}
