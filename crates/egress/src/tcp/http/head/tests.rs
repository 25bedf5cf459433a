//! Unambiguous and ambiguous heads.

use super::*;
use crate::tcp::testing::name;
use hyper::http::{Request, Response};

fn request(method: &str, uri: &str, headers: &[(&str, &str)]) -> Parts {
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap().into_parts().0
}

fn whom(method: &str, uri: &str, hosts: &[&str]) -> Result<RequestedName, Malformed> {
    let hosts: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
    host(&request(method, uri, &hosts))
}

#[test]
fn one_host() {
    let a = Ok(RequestedName::Name(name("a.example")));
    assert_eq!(whom("GET", "/", &["a.example"]), a);
    assert_eq!(whom("GET", "/x?y=http://evil.test/", &["A.Example:80"]), a);
    assert_eq!(whom("OPTIONS", "*", &["a.example"]), a);
    assert_eq!(whom("GET", "http://a.example/x", &["a.example"]), a);
    assert_eq!(whom("GET", "http://A.example:80/x", &["a.example"]), a);
    assert_eq!(whom("GET", "http://a.example", &["a.example:80"]), a);
}

#[test]
fn no_name() {
    for hosts in [
        &[][..],
        &[""],
        &["1.2.3.4"],
        &["1.2.3.4:80"],
        &["[::1]"],
        &["[::1]:80"],
    ] {
        assert_eq!(
            whom("GET", "/", hosts),
            Ok(RequestedName::Missing),
            "{hosts:?}"
        );
    }
}

#[test]
fn ambiguous_hosts_are_malformed() {
    for (method, uri, hosts) in [
        ("GET", "/", &["a.example", "a.example"][..]),
        ("GET", "/", &["a.example", "b.example"]),
        ("GET", "/", &["a.example, b.example"]),
        ("GET", "/", &["a.example:8080"]),
        ("GET", "/", &["a.example:"]),
        ("GET", "/", &["a.example:080"]),
        ("GET", "/", &["a.example:80:80"]),
        ("GET", "/", &["a.example."]),
        ("GET", "/", &["u@a.example"]),
        ("GET", "/", &["a.example/x"]),
        ("GET", "/", &["a.example#"]),
        ("GET", "/", &["127.1"]),
        ("GET", "http://b.example/", &["a.example"]),
        ("GET", "http://a.example@b.example/", &["b.example"]),
        ("GET", "http://a.example:8080/", &["a.example"]),
        ("GET", "https://a.example/", &["a.example"]),
        ("GET", "ftp://a.example/", &["a.example"]),
        ("GET", "http://a.example/", &[]),
        ("GET", "a.example:80", &["a.example"]),
        ("GET", "*", &["a.example"]),
        ("CONNECT", "a.example:80", &["a.example"]),
        ("CONNECT", "/", &["a.example"]),
    ] {
        assert_eq!(
            whom(method, uri, hosts),
            Err(Malformed),
            "{method} {uri} {hosts:?}"
        );
    }
}

fn prepared(method: &str, uri: &str, headers: &[(&str, &str)]) -> (Parts, bool) {
    let mut parts = request(method, uri, headers);
    let switch = prepare_request(&mut parts).unwrap();
    (parts, switch)
}

fn lines(headers: &HeaderMap) -> Vec<String> {
    let line =
        |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
    headers.iter().map(line).collect()
}

#[test]
fn a_path_is_never_empty() {
    for uri in [
        "http://a.example",
        "http://a.example#x",
        "http://a.example/",
    ] {
        let (parts, _) = prepared("GET", uri, &[("host", "a.example")]);
        assert_eq!(parts.uri.to_string(), "/", "{uri}");
    }
    let (parts, _) = prepared("GET", "http://a.example?x", &[("host", "a.example")]);
    assert_eq!(parts.uri.to_string(), "/?x");
}

#[test]
fn hop_by_hop_headers_are_removed() {
    let (parts, switch) = prepared(
        "GET",
        "http://a.example/x?y",
        &[
            ("host", "a.example"),
            ("connection", "keep-alive, X-Mine"),
            ("connection", "close"),
            ("x-mine", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAMAAABk"),
            ("te", "gzip"),
            ("accept", "*/*"),
        ],
    );
    assert!(!switch);
    assert_eq!(parts.uri, "/x?y");
    assert_eq!(
        lines(&parts.headers),
        ["host: a.example", "accept: */*", "connection: close"]
    );
}

#[test]
fn connection_cannot_remove_host_or_length() {
    let (parts, _) = prepared(
        "POST",
        "/",
        &[
            ("host", "a.example"),
            ("connection", "host, content-length, close"),
            ("content-length", "3"),
        ],
    );
    let want = ["host: a.example", "content-length: 3", "connection: close"];
    assert_eq!(lines(&parts.headers), want);
}

#[test]
fn only_websocket_upgrades_are_allowed() {
    let upgrade = |connection, protocol| {
        let headers = [
            ("host", "a"),
            ("connection", connection),
            ("upgrade", protocol),
        ];
        let (parts, switch) = prepared("GET", "/", &headers);
        assert_eq!(parts.headers.contains_key(UPGRADE), switch);
        assert_eq!(parts.headers.contains_key(CONNECTION), switch);
        switch
    };
    assert!(upgrade("Upgrade", "WebSocket"));
    assert!(upgrade("keep-alive, upgrade", "websocket"));
    assert!(!upgrade("keep-alive", "websocket"));
    for other in [
        "h2c",
        "TLS/1.0",
        "HTTP/2.0",
        "websocket, h2c",
        "h2c,websocket",
        "tcp",
    ] {
        assert!(!upgrade("Upgrade", other), "{other}");
    }
    let twice = [
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("upgrade", "h2c"),
    ];
    assert!(!prepared("GET", "/", &twice).1);
    assert!(!prepared("POST", "/", &twice[..2]).1);
}

#[test]
fn te_trailers_is_kept() {
    let (parts, _) = prepared("GET", "/", &[("connection", "TE"), ("te", "trailers")]);
    assert_eq!(lines(&parts.headers), ["te: trailers", "connection: TE"]);
}

#[test]
fn only_chunked_transfer_encoding_is_allowed() {
    for encodings in [
        &["gzip, chunked"][..],
        &["chunked", "chunked"],
        &["identity", "chunked"],
        &["chunked, identity"],
        &["xchunked"],
    ] {
        let headers: Vec<_> = encodings
            .iter()
            .map(|text| ("transfer-encoding", *text))
            .collect();
        let mut parts = request("POST", "/", &headers);
        assert_eq!(prepare_request(&mut parts), Err(Malformed), "{encodings:?}");
    }
    let mut parts = request("POST", "/", &[("transfer-encoding", "Chunked")]);
    assert_eq!(prepare_request(&mut parts), Ok(false));
}

fn answered(status: u16, headers: &[(&str, &str)], switching: bool) -> Option<Vec<String>> {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    let mut parts = response.body(()).unwrap().into_parts().0;
    prepare_response(&mut parts, switching).ok()?;
    Some(lines(&parts.headers))
}

#[test]
fn hop_by_hop_headers_of_responses_are_removed() {
    let headers = [
        ("connection", "close, x-hop"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("content-length", "5"),
        ("upgrade", "h2c"),
        ("server", "s"),
    ];
    let want = ["content-length: 5", "server: s", "connection: close"];
    assert_eq!(answered(200, &headers, false).unwrap(), want);
    let both = [("content-length", "5"), ("transfer-encoding", "chunked")];
    assert_eq!(answered(200, &both, false).unwrap(), Vec::<String>::new());
}

#[test]
fn a_101_needs_an_upgrade_request() {
    let yes = [("connection", "Upgrade"), ("upgrade", "websocket")];
    assert_eq!(
        answered(101, &yes, true).unwrap(),
        ["upgrade: websocket", "connection: Upgrade"]
    );
    assert_eq!(answered(101, &yes, false), None);
    assert_eq!(answered(101, &[("upgrade", "h2c")], true), None);
    assert_eq!(answered(101, &[], true), None);
}
