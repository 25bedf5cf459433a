//! Cross-origin check (CSRF protection): a browser in the sandbox, or behind a tunnel to it, sends requests on behalf
//! of any web page that it shows, and without a token the APIs cannot tell them from those of a client.

use hyper::header::{HOST, ORIGIN};
use hyper::{HeaderMap, Method, Request};

/// Whether this is a cross-origin request that is not a read (GET or HEAD).
pub(crate) fn is_foreign<B>(request: &Request<B>) -> bool {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    !reads && is_cross_origin(request.headers())
}

fn is_cross_origin(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).map(|value| value.as_bytes());
    match text("sec-fetch-site") {
        Some(b"same-origin" | b"none") => return false,
        Some(_) => return true,
        // Not a browser, or an old one, or a page without TLS: see Origin.
        None => {}
    }
    let Some(origin) = text(ORIGIN.as_str()) else {
        return false;
    };
    let origin = String::from_utf8_lossy(origin);
    let host = origin.split_once("://").map(|(_, host)| host.as_bytes());
    host.is_none() || host != text(HOST.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn foreign(method: Method, headers: &[(&'static str, &'static str)]) -> bool {
        let mut request = Request::new(());
        *request.method_mut() = method;
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        is_foreign(&request)
    }

    #[test]
    fn cross_origin_writes_are_refused() {
        let post = |headers| foreign(Method::POST, headers);
        assert!(!post(&[]));
        assert!(!post(&[("origin", "http://a:1"), ("host", "a:1")]));
        assert!(post(&[("origin", "http://b"), ("host", "a:1")]));
        assert!(post(&[("origin", "null"), ("host", "a:1")]));
        assert!(post(&[("sec-fetch-site", "cross-site")]));
        assert!(post(&[("sec-fetch-site", "same-site")]));
        // Behind a router, the Host header differs from the origin of the page.
        assert!(!post(&[
            ("sec-fetch-site", "same-origin"),
            ("origin", "https://b"),
            ("host", "a")
        ]));
        assert!(!foreign(Method::GET, &[("sec-fetch-site", "cross-site")]));
    }
}
