//! Fuzz target for HTTP heads: arbitrary heads, and the invariants of rewriting them.

use super::head::{host, prepare_request, prepare_response};
use crate::tcp::policy_check::RequestedName;
use hyper::header::{CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, TE, UPGRADE};
use hyper::http::{Request, Response};
use hyper::{Method, Uri, Version};

/// A head as hyper may have parsed it: `method uri` or `status`, then `name: value` lines. Returns a
/// summary of the outcome.
pub fn http_head(bytes: &[u8]) -> String {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let first = lines.next().unwrap_or_default();
    let mut headers = HeaderMap::new();
    for line in lines {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        let (name, value) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value));
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    let mut words = first.split(|byte| *byte == b' ');
    let (Some(method), Some(uri)) = (words.next(), words.next()) else {
        return "neither".to_owned();
    };
    if let Ok(status) = hyper::StatusCode::from_bytes(method) {
        return response(status, uri == b"switching", headers);
    }
    let (method, uri) = (Method::from_bytes(method), Uri::try_from(uri));
    match (method, uri) {
        (Ok(method), Ok(uri)) => request(method, uri, headers, first.ends_with(b"1.0")),
        _ => "no request".to_owned(),
    }
}

fn request(method: Method, uri: Uri, headers: HeaderMap, old: bool) -> String {
    let mut parts = Request::new(()).into_parts().0;
    (parts.method, parts.uri, parts.headers) = (method, uri, headers);
    parts.version = if old {
        Version::HTTP_10
    } else {
        Version::HTTP_11
    };
    let Ok(said) = host(&parts) else {
        return "malformed host".to_owned();
    };
    let Ok(switch) = prepare_request(&mut parts) else {
        return "malformed".to_owned();
    };
    // The host does not change, and only `Host` has it.
    assert_eq!(host(&parts).as_ref(), Ok(&said));
    assert!(parts.uri.authority().is_none() && parts.headers.get_all(HOST).iter().count() <= 1);
    assert!(parts.method != Method::CONNECT && parts.version == Version::HTTP_11);
    let upgrades = parts.headers.get_all(UPGRADE).iter().count();
    assert_eq!(upgrades, usize::from(switch), "nothing but WebSocket");
    check_connection(&parts.headers, &["upgrade", "te", "close"]);
    // Rewriting is idempotent.
    let once = (parts.headers.clone(), parts.uri.clone());
    assert_eq!(prepare_request(&mut parts), Ok(switch));
    assert_eq!((&parts.headers, &parts.uri), (&once.0, &once.1));
    let said = match said {
        RequestedName::Name(_) => "name",
        RequestedName::Missing => "nothing",
        RequestedName::Encrypted(_) => "encrypted",
    };
    format!("{said} {switch} {}", parts.headers.contains_key(TE))
}

fn response(status: hyper::StatusCode, switching: bool, headers: HeaderMap) -> String {
    let mut parts = Response::new(()).into_parts().0;
    (parts.status, parts.headers) = (status, headers);
    if prepare_response(&mut parts, switching).is_err() {
        return "malformed response".to_owned();
    }
    let switched = parts.headers.contains_key(UPGRADE);
    assert!(!switched || (switching && status == hyper::StatusCode::SWITCHING_PROTOCOLS));
    assert!(!parts.headers.contains_key("transfer-encoding"));
    check_connection(&parts.headers, &["upgrade", "close"]);
    format!(
        "response {switched} {}",
        parts.headers.contains_key(CONNECTION)
    )
}

/// `Connection` occurs at most once and has no other options than these.
fn check_connection(headers: &HeaderMap, known: &[&str]) {
    let values: Vec<_> = headers.get_all(CONNECTION).iter().collect();
    assert!(values.len() <= 1);
    for value in values {
        let value = value.to_str().expect("we wrote it").to_ascii_lowercase();
        assert!(
            value.split(", ").all(|word| known.contains(&word)),
            "{value}"
        );
    }
    for name in ["keep-alive", "proxy-connection", "http2-settings"] {
        assert!(!headers.contains_key(name));
    }
}
