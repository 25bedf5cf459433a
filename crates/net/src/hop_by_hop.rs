//! Hop-by-hop headers (RFC 9110, section 7.6.1): what a proxy takes off a message before it passes it on.

use hyper::HeaderMap;
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderName, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING,
    UPGRADE,
};

/// Always about one connection only, whether `Connection` names them or not.
const ALWAYS: [HeaderName; 10] = [
    CONNECTION,
    HeaderName::from_static("http2-settings"),
    HeaderName::from_static("keep-alive"),
    hyper::header::PROXY_AUTHENTICATE,
    hyper::header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Never removed because `Connection` names them: a peer that names these wants the next server to read another message than
/// the proxy did (its length, its host), or clients to lose a cookie.
const END_TO_END: [HeaderName; 4] = [CONTENT_LENGTH, HOST, SET_COOKIE, TRANSFER_ENCODING];

/// Removes them, and what `Connection` names, except those in `keep`.
pub fn remove(headers: &mut HeaderMap, keep: &[HeaderName]) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
        .filter_map(|name| HeaderName::from_bytes(name).ok())
        .filter(|name| !END_TO_END.contains(name))
        .collect();
    for name in named.iter().chain(&ALWAYS) {
        if !keep.contains(name) {
            headers.remove(name);
        }
    }
}

/// The elements of a header that is a comma-separated list, over all its lines, without empty ones.
pub fn tokens<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
) -> impl Iterator<Item = &'h [u8]> + use<'h> {
    let values = headers.get_all(name).into_iter();
    values
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|token| !token.is_empty())
}

/// Whether a list has `token`, in whatever case.
#[must_use]
pub fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|one| one.eq_ignore_ascii_case(token.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        });
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value);
        }
        headers
    }

    fn left(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn what_connection_names_is_removed_but_not_what_frames_the_message() {
        let mut headers = headers(&[
            ("connection", "x-a, close,Content-Length,host,,set-cookie"),
            ("connection", "X-B"),
            ("x-a", "1"),
            ("x-b", "1"),
            ("x-c", "1"),
            ("keep-alive", "timeout=5"),
            ("content-length", "5"),
            ("host", "a.example"),
            ("set-cookie", "a=b"),
        ]);
        remove(&mut headers, &[]);
        assert_eq!(
            left(&headers),
            ["content-length", "host", "set-cookie", "x-c"]
        );
    }

    #[test]
    fn what_is_always_of_one_hop_is_removed_unless_it_is_kept() {
        let all: Vec<_> = ALWAYS.iter().map(|name| (name.clone(), "x")).collect();
        let all: HeaderMap = all
            .into_iter()
            .map(|(name, value)| (name, HeaderValue::from_static(value)))
            .collect();
        let mut none = all.clone();
        remove(&mut none, &[]);
        assert!(none.is_empty());
        let mut framing = all;
        remove(&mut framing, &[TRANSFER_ENCODING, TRAILER]);
        assert_eq!(left(&framing), ["trailer", "transfer-encoding"]);
    }

    #[test]
    fn lists_have_tokens() {
        let headers = headers(&[("connection", "keep-alive , UPGRADE"), ("connection", ",x")]);
        let all: Vec<_> = tokens(&headers, &CONNECTION).collect();
        assert_eq!(all, [&b"keep-alive"[..], b"UPGRADE", b"x"]);
        assert!(has_token(&headers, &CONNECTION, "upgrade"));
        assert!(!has_token(&headers, &CONNECTION, "grade"));
    }
}
