//! Bodies: chunked, with a length, without one, large.

use super::*;
use crate::sandbox_net::Limits;
use crate::tcp::http::LINGER_BYTES_MAX;
use std::time::Instant;

#[tokio::test]
async fn chunks_trailers_and_no_body_at_all() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let chunked = "POST /echo HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\
                   Trailer: X-Sum\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nX-Sum: 5\r\n\r\n";
    let answer = ask(&mut stream, chunked).await;
    assert!(answer.ends_with("abcde"), "{answer}");
    assert!(
        server.heard()[0]
            .to_lowercase()
            .contains("0\r\nx-sum: 5\r\n"),
        "{:?}",
        server.heard()
    );
    let trailers =
        "GET /trailers HTTP/1.1\r\nHost: a.example\r\nConnection: TE\r\nTE: trailers\r\n\r\n";
    stream.write_all(trailers.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await;
    assert!(
        head.to_lowercase().contains("transfer-encoding: chunked"),
        "{head}"
    );
    let want = "5\r\nhello\r\n0\r\nx-sum: 1\r\n\r\n";
    let mut rest = vec![0; want.len()];
    stream.read_exact(&mut rest).await.unwrap();
    assert_eq!(String::from_utf8(rest).unwrap(), want);
    stream
        .write_all(b"HEAD /head HTTP/1.1\r\nHost: a.example\r\n\r\n")
        .await
        .unwrap();
    let head = read_head(&mut stream).await;
    assert!(head.contains("Content-Length: 5\r\n"), "{head}");
    for status in ["204", "304"] {
        let request = format!("GET /{status} HTTP/1.1\r\nHost: a.example\r\n\r\n");
        let answer = ask(&mut stream, &request).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
        assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    }
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_body_delimited_by_close() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let new = stage
        .say(b"GET /close HTTP/1.1\r\nHost: a.example\r\n\r\n")
        .await
        .unwrap();
    assert!(
        new.ends_with(b"5\r\nhello\r\n0\r\n\r\n"),
        "{}",
        String::from_utf8_lossy(&new)
    );
    let old = stage
        .say(b"GET /close HTTP/1.0\r\nHost: a.example\r\n\r\n")
        .await
        .unwrap();
    assert!(
        old.starts_with(b"HTTP/1.0 200"),
        "{}",
        String::from_utf8_lossy(&old)
    );
    assert!(
        old.ends_with(b"\r\n\r\nhello"),
        "{}",
        String::from_utf8_lossy(&old)
    );
}

#[tokio::test]
async fn expect_100_continue_is_answered() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let head = "POST /echo HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(
        read_head(&mut stream).await,
        "HTTP/1.1 100 Continue\r\n\r\n"
    );
    let answer = ask(&mut stream, "body").await;
    assert!(answer.ends_with("body"), "{answer}");
}

#[tokio::test]
async fn a_refused_request_gets_no_100_continue() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let head = "POST /echo HTTP/1.1\r\nHost: evil.test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 403"));
}

#[tokio::test]
async fn large_bodies_both_ways() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let body: Vec<u8> = (0..20_u32 << 20)
        .map(|n| (n ^ (n >> 11)).to_le_bytes()[0])
        .collect();
    let head = format!(
        "POST /stream HTTP/1.1\r\nHost: a.example\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let (mut read, mut write) = stream.split();
    let sent = async {
        write.write_all(head.as_bytes()).await.unwrap();
        write.write_all(&body).await.unwrap();
    };
    let heard = async {
        let head = read_head(&mut read).await;
        assert!(
            head.contains(&format!("Content-Length: {}\r\n", body.len())),
            "{head}"
        );
        let mut heard = vec![0; body.len()];
        read.read_exact(&mut heard).await.unwrap();
        heard
    };
    let ((), heard) = timeout(SOON, async { tokio::join!(sent, heard) })
        .await
        .unwrap();
    assert!(heard == body);
}

#[tokio::test]
async fn bodies_are_limited_in_bandwidth() {
    let server = TestServer::start().await;
    let limits = Limits {
        connections: 4,
        bandwidth: Some(4 << 20),
    };
    let policy = policy(&["a.example"], &[]);
    let stage = Stage::with_limits(policy, limits, HTTP, server.address).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    let start = Instant::now();
    let head = format!(
        "POST /echo HTTP/1.1\r\nHost: a.example\r\nContent-Length: {}\r\n\r\n",
        3 << 20
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![b'x'; 3 << 20]).await.unwrap();
    let answer = ask(&mut stream, "").await;
    assert!(answer.len() > 3 << 20);
    let took = start.elapsed().as_secs_f64();
    // 6 MiB, both directions together, minus the burst of a quarter of a second and the last chunk.
    assert!((1.1..10.0).contains(&took), "{took}");
}

#[tokio::test]
async fn a_client_that_is_still_sending_gets_the_403() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let body = vec![b'x'; LINGER_BYTES_MAX / 2];
    let head = format!(
        "POST / HTTP/1.1\r\nHost: evil.test\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body).await.unwrap();
    sleep(Duration::from_millis(50)).await;
    let answer = String::from_utf8(read_all(&mut stream).await.unwrap()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
}
