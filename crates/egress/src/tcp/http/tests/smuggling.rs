//! Request smuggling: attempts to hide a request in another.

use super::*;

const EVIL: &str = "GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n";

/// The requests that reach the server. The hidden one must not be among them.
async fn heard(said: &str) -> Vec<String> {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    stream.write_all(said.as_bytes()).await.unwrap();
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    // A reset or a response, but the connection ends.
    let _ = timeout(SOON, stream.read_to_end(&mut answer))
        .await
        .expect("it ends");
    let heard = server.heard();
    for request in &heard {
        assert!(
            !request.starts_with("GET /evil"),
            "{said:?} came through as {heard:?}"
        );
    }
    heard
}

#[tokio::test]
async fn chunked_takes_precedence_over_content_length() {
    let chunked = format!("{:x}\r\n{EVIL}\r\n0\r\n\r\n", EVIL.len());
    for fields in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    ] {
        let said = format!("POST / HTTP/1.1\r\nHost: a.example\r\n{fields}\r\n{chunked}{EVIL}");
        let heard = heard(&said).await;
        assert_eq!(heard.len(), 1);
        assert!(
            !heard[0].to_lowercase().contains("content-length"),
            "{heard:?}"
        );
        assert!(heard[0].ends_with(&chunked), "{heard:?}");
    }
}

#[tokio::test]
async fn invalid_lengths_are_malformed() {
    for fields in [
        "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Content-Length: 4, 5\r\n",
        "Content-Length: +4\r\n",
        "Content-Length: 4 4\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 0x4\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding:\x0bchunked\r\n",
        "Transfer-Encoding: chunked\r\n Content-Length: 4\r\n",
    ] {
        let said = format!("POST / HTTP/1.1\r\nHost: a.example\r\n{fields}\r\n0\r\n\r\n{EVIL}");
        assert_eq!(heard(&said).await, Vec::<String>::new(), "{fields:?}");
    }
}

#[tokio::test]
async fn invalid_chunks_are_malformed() {
    for body in [
        "-1\r\n",
        "ffffffffffffffff1\r\n",
        "5\r\nabc\r\n0\r\n\r\n",
        "x\r\n",
        "3\nabc\n0\n\n",
    ] {
        let head = "POST /echo HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n";
        heard(&format!("{head}{body}{EVIL}")).await;
    }
}

#[tokio::test]
async fn ambiguous_hosts_are_malformed() {
    for head in [
        "GET / HTTP/1.1\r\nHost: a.example\r\nHost: evil.test\r\n",
        "GET / HTTP/1.1\r\nHost: evil.test\r\nHost: a.example\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\n Host: evil.test\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\n\tevil.test\r\n",
        "GET / HTTP/1.1\r\n Host: a.example\r\nHost: evil.test\r\n",
        "GET / HTTP/1.1\r\nHost : evil.test\r\nHost: a.example\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\rHost: evil.test\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\0.evil.test\r\n",
        "GET http://evil.test/ HTTP/1.1\r\nHost: a.example\r\n",
        "GET http://a.example@evil.test/ HTTP/1.1\r\nHost: a.example\r\n",
        "GET evil.test:80 HTTP/1.1\r\nHost: a.example\r\n",
        "GET //evil.test/ HTTP/1.1 \r\nHost: a.example\r\n",
        "GET / HTTP/1.1\r\nHost: a.example:8080\r\n",
    ] {
        let heard = heard(&format!("{head}\r\n")).await;
        assert_eq!(heard, Vec::<String>::new(), "{head:?}");
    }
}

#[tokio::test]
async fn a_host_in_a_trailer_or_in_connection_changes_nothing() {
    let trailer = "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\
                   Trailer: Host\r\n\r\n0\r\nHost: evil.test\r\n\r\n";
    let heard_it = heard(trailer).await;
    assert!(!heard_it[0].contains("evil.test"), "{heard_it:?}");
    let hop = "GET / HTTP/1.1\r\nHost: a.example\r\nConnection: Host, close\r\n\r\n";
    let heard_it = heard(hop).await;
    assert!(heard_it[0].contains("Host: a.example\r\n"), "{heard_it:?}");
    assert!(!heard_it[0].contains("Connection: Host"), "{heard_it:?}");
}

#[tokio::test]
async fn a_body_is_not_parsed_as_a_request() {
    let length = EVIL.len();
    let said =
        format!("GET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: {length}\r\n\r\n{EVIL}");
    let heard = heard(&said).await;
    assert_eq!(heard, [said]);
}

#[tokio::test]
async fn other_protocols_are_malformed() {
    for said in [
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        "GET /\r\n",
        "GET / HTTP/3.0\r\nHost: a.example\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01",
        "SSH-2.0-x\r\n\r\n",
        "\r\n\r\nGET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        "GET / HTTP/1.1\nHost: evil.test\n\n",
    ] {
        assert_eq!(heard(said).await, Vec::<String>::new(), "{said:?}");
    }
}

#[tokio::test]
async fn the_size_of_a_head_is_limited() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let long = format!(
        "GET / HTTP/1.1\r\nHost: a.example\r\nX: {}\r\n\r\n",
        "x".repeat(80 << 10)
    );
    let _ = stream.write_all(long.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = timeout(SOON, stream.read_to_end(&mut answer))
        .await
        .expect("it ends");
    assert_eq!(server.connections(), 0);
    assert_eq!(stage.flow().await, "malformed - 93.184.215.14:80 -");
}
