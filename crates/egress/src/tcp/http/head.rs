//! The heads of requests and responses: whom a request is for, and what of a head is only about the
//! connection it came on and must not go on to the next.

use crate::tcp::check::{Said, is_address};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRANSFER_ENCODING,
    UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{PathAndQuery, Scheme, Uri};
use hyper::{Method, Version};
use k8e_model::egress::HostName;

/// The one protocol that a connection may be switched to. In others (HTTP/2, TLS) a client could
/// ask for another name than the one that was checked.
const WEBSOCKET: &str = "websocket";

/// The port a `Host` may name.
const HTTP_PORT: &str = "80";

/// Of one connection only, besides those that `Connection` names (RFC 9110 7.6.1).
const HOP_BY_HOP: [&str; 5] = [
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "http2-settings",
];

/// A request that can be read in more than one way, or that is no request to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Whom the request is for.
pub(super) fn host(request: &Parts) -> Result<Said, Malformed> {
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
        None | Some("") => Ok(Said::Nothing),
        Some(host) if is_address(host) => Ok(Said::Nothing),
        // Servers differ in what they make of a last dot.
        Some(host) if host.ends_with('.') => Err(Malformed),
        Some(host) => HostName::parse(host).map(Said::Name).map_err(|_| Malformed),
    }
}

/// Makes the head that goes on. Says whether the client wants to switch to WebSocket.
pub(super) fn prepare_request(request: &mut Parts) -> Result<bool, Malformed> {
    let headers = &mut request.headers;
    let options = connection_options(headers);
    let asks = |option: &str| options.iter().any(|known| known == option);
    let switch = request.version == Version::HTTP_11
        && request.method == Method::GET
        && asks("upgrade")
        && is_one(headers, &UPGRADE, WEBSOCKET);
    let trailers = asks("te") && is_one(headers, &TE, "trailers");
    // hyper has read the length already; what is left here must not say it in another way.
    if headers.contains_key(TRANSFER_ENCODING) && !is_one(headers, &TRANSFER_ENCODING, "chunked") {
        return Err(Malformed);
    }
    remove_hop_by_hop(headers, &options);
    let mut connection = Vec::new();
    if switch {
        connection.push("Upgrade");
        headers.insert(UPGRADE, HeaderValue::from_static(WEBSOCKET));
    }
    if trailers {
        connection.push("TE");
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if asks("close") {
        connection.push("close");
    }
    set_connection(headers, &connection);
    request.version = Version::HTTP_11;
    request.uri = origin_form(&request.uri);
    Ok(switch)
}

/// Makes the head that goes back. `switching` when it is an answer to a wish for WebSocket.
pub(super) fn prepare_response(
    response: &mut hyper::http::response::Parts,
    switching: bool,
) -> Result<(), Malformed> {
    let headers = &mut response.headers;
    let options = connection_options(headers);
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
    remove_hop_by_hop(headers, &options);
    // How long it is, hyper knows: it has read the length by the rules.
    headers.remove(TRANSFER_ENCODING);
    if chunked || headers.get_all(CONTENT_LENGTH).iter().count() > 1 {
        headers.remove(CONTENT_LENGTH);
    }
    if let Some(upgrade) = upgrade {
        headers.insert(UPGRADE, upgrade);
    } else if closes(response.version, &options) {
        connection.push("close");
    }
    set_connection(headers, &connection);
    response.version = Version::HTTP_11;
    Ok(())
}

/// What is before a port, which must be HTTP's.
fn without_port(authority: &str) -> Result<&str, Malformed> {
    // An IPv6 address ends with a bracket, and has colons before it.
    match authority.rsplit_once(':') {
        Some((_, rest)) if rest.ends_with(']') => Ok(authority),
        Some((host, HTTP_PORT)) => Ok(host),
        Some(_) => Err(Malformed),
        None => Ok(authority),
    }
}

/// The path alone: who is asked for says `Host`.
fn origin_form(uri: &Uri) -> Uri {
    // An empty one reads as `/` and is written as nothing: `http://a.example#x` has that.
    let path = uri.path_and_query().filter(|path| path.as_str() != "/");
    path.cloned()
        .unwrap_or_else(|| PathAndQuery::from_static("/"))
        .into()
}

fn connection_options(headers: &HeaderMap) -> Vec<String> {
    let values = headers.get_all(CONNECTION).iter();
    let values = values.filter_map(|value| value.to_str().ok());
    let options = values.flat_map(|value| value.split(','));
    options
        .map(|option| option.trim().to_ascii_lowercase())
        .filter(|option| !option.is_empty())
        .collect()
}

/// Takes out what `Connection` names too, but for what says whom a message is for and how long it
/// is: a client that names those wants the next server to forget them.
fn remove_hop_by_hop(headers: &mut HeaderMap, options: &[String]) {
    for option in options {
        if let Ok(name) = HeaderName::from_bytes(option.as_bytes())
            && ![HOST, CONTENT_LENGTH, TRANSFER_ENCODING].contains(&name)
        {
            headers.remove(name);
        }
    }
    for name in [CONNECTION, TE, UPGRADE] {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
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

fn closes(version: Version, options: &[String]) -> bool {
    let says = |word: &str| options.iter().any(|option| option == word);
    says("close") || (version == Version::HTTP_10 && !says("keep-alive"))
}

#[cfg(test)]
mod tests;
