//! Heads of HTTP requests and responses: the requested host, and removal of hop-by-hop headers.

use crate::tcp::policy_check::{RequestedName, is_address};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{PathAndQuery, Scheme, Uri};
use hyper::{Method, Version};
use k8e_model::egress::HostName;
use k8e_net::hop_by_hop;

/// The only protocol for which `Upgrade` is allowed. In others (HTTP/2, TLS) a client could request
/// another name than the one that was checked.
const WEBSOCKET: &str = "websocket";

/// The only port allowed in `Host`.
const HTTP_PORT: &str = "80";

/// An ambiguous request, or one without a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The requested host, from `Host` and the request target, which must agree.
pub(super) fn host(request: &Parts) -> Result<RequestedName, Malformed> {
    if request.method == Method::CONNECT {
        return Err(Malformed);
    }
    let mut hosts = request.headers.get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => Some(host.to_str().map_err(|_| Malformed)?),
        (None, None) => None,
        _ => return Err(Malformed),
    };
    let host = host.map(without_port).transpose()?;
    match (request.uri.scheme(), request.uri.authority()) {
        (None, None) => {}
        (Some(scheme), Some(authority)) if *scheme == Scheme::HTTP => {
            let authority = without_port(authority.as_str())?;
            if !host.is_some_and(|host| host.eq_ignore_ascii_case(authority)) {
                return Err(Malformed);
            }
        }
        _ => return Err(Malformed),
    }
    let path = request.uri.path();
    let of_server = path == "*" && request.method == Method::OPTIONS;
    if !of_server && !path.starts_with('/') {
        return Err(Malformed);
    }
    match host {
        None | Some("") => Ok(RequestedName::Missing),
        Some(host) if is_address(host) => Ok(RequestedName::Missing),
        // Servers differ in how they treat a trailing dot.
        Some(host) if host.ends_with('.') => Err(Malformed),
        Some(host) => HostName::parse(host)
            .map(RequestedName::Name)
            .map_err(|_| Malformed),
    }
}

/// Rewrites the head for the upstream. Returns whether the client asks for an upgrade to WebSocket.
pub(super) fn prepare_request(request: &mut Parts) -> Result<bool, Malformed> {
    let headers = &mut request.headers;
    let asks = |option: &str| hop_by_hop::has_token(headers, &CONNECTION, option);
    let switch = request.version == Version::HTTP_11
        && request.method == Method::GET
        && asks("upgrade")
        && is_one(headers, &UPGRADE, WEBSOCKET);
    let trailers = asks("te") && is_one(headers, &TE, "trailers");
    let close = asks("close");
    // hyper has determined the length; other transfer codings would contradict it.
    if headers.contains_key(TRANSFER_ENCODING) && !is_one(headers, &TRANSFER_ENCODING, "chunked") {
        return Err(Malformed);
    }
    remove_hop_by_hop(headers);
    let mut connection = Vec::new();
    if switch {
        connection.push("Upgrade");
        headers.insert(UPGRADE, HeaderValue::from_static(WEBSOCKET));
    }
    if trailers {
        connection.push("TE");
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if close {
        connection.push("close");
    }
    set_connection(headers, &connection);
    request.version = Version::HTTP_11;
    request.uri = origin_form(&request.uri);
    Ok(switch)
}

/// Rewrites the head for the client. `switching`: the request asked for an upgrade to WebSocket.
pub(super) fn prepare_response(
    response: &mut hyper::http::response::Parts,
    switching: bool,
) -> Result<(), Malformed> {
    let headers = &mut response.headers;
    let close = closes(response.version, headers);
    let mut connection = Vec::new();
    let switched = response.status == hyper::StatusCode::SWITCHING_PROTOCOLS;
    if switched {
        if !switching || !is_one(headers, &UPGRADE, WEBSOCKET) {
            return Err(Malformed);
        }
        connection.push("Upgrade");
    }
    let upgrade = headers.get(UPGRADE).cloned().filter(|_| switched);
    let chunked = headers.contains_key(TRANSFER_ENCODING);
    remove_hop_by_hop(headers);
    // hyper has determined the length and writes these headers itself.
    headers.remove(TRANSFER_ENCODING);
    if chunked || headers.get_all(CONTENT_LENGTH).iter().count() > 1 {
        headers.remove(CONTENT_LENGTH);
    }
    if let Some(upgrade) = upgrade {
        headers.insert(UPGRADE, upgrade);
    } else if close {
        connection.push("close");
    }
    set_connection(headers, &connection);
    response.version = Version::HTTP_11;
    Ok(())
}

/// The host without its port, which must be 80.
fn without_port(authority: &str) -> Result<&str, Malformed> {
    // An IPv6 address ends with a bracket, and has colons before it.
    match authority.rsplit_once(':') {
        Some((_, rest)) if rest.ends_with(']') => Ok(authority),
        Some((host, HTTP_PORT)) => Ok(host),
        Some(_) => Err(Malformed),
        None => Ok(authority),
    }
}

/// Origin form of the request target (RFC 9112 3.2.1): path and query only.
fn origin_form(uri: &Uri) -> Uri {
    // An empty path reads as `/` but is written as nothing, as in `http://a.example#x`.
    let path = uri.path_and_query().filter(|path| path.as_str() != "/");
    path.cloned()
        .unwrap_or_else(|| PathAndQuery::from_static("/"))
        .into()
}

/// Removes hop-by-hop headers, except what frames the body, which hyper has read already.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    hop_by_hop::remove(headers, &[TRANSFER_ENCODING, TRAILER]);
}

fn set_connection(headers: &mut HeaderMap, options: &[&str]) {
    if let Ok(value) = HeaderValue::from_str(&options.join(", "))
        && !options.is_empty()
    {
        headers.insert(CONNECTION, value);
    }
}

fn is_one(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    let mut values = headers.get_all(name).iter();
    let is_word = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(word.as_bytes());
    values.next().is_some_and(is_word) && values.next().is_none()
}

fn closes(version: Version, headers: &HeaderMap) -> bool {
    let says = |word: &str| hop_by_hop::has_token(headers, &CONNECTION, word);
    says("close") || (version == Version::HTTP_10 && !says("keep-alive"))
}

#[cfg(test)]
mod tests;
