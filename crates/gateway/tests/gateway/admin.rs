//! Admin HTTP server: metrics, health and readiness probes.

use crate::server::{SOON, TestServer};
use k8e_driver::Probe;
use k8e_testkit::FakeDriver;
use std::net::SocketAddr;
use std::time::Instant;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread")]
async fn it_shows_metrics_and_health() {
    let server = TestServer::start().await;
    let metrics = ask(server.admin(), "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics}");
    assert!(metrics.contains("content-type: text/plain; version=0.0.4"));
    assert!(metrics.contains("\nk8e_sessions_active{runtime=\"native\"} "));
    assert!(metrics.contains("\nprocess_resident_memory_bytes "));
    for path in ["/healthz", "/readyz"] {
        let answer = ask(server.admin(), &format!("GET {path} HTTP/1.1\r\n\r\n")).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    }
    let head = ask(server.admin(), "HEAD /healthz HTTP/1.0\r\n\r\n").await;
    assert!(head.ends_with("\r\n\r\n"), "{head}");
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_is_refused() {
    let server = TestServer::start().await;
    let long = format!("GET /healthz HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(20_000));
    let many = format!("GET /healthz HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
    let body = "POST /metrics HTTP/1.1\r\ncontent-length: 9999999999\r\n\r\nzzz";
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("GET /metrics/../readyz HTTP/1.1\r\n\r\n", "404"),
        (body, "405"),
        ("\u{0}\u{1}\u{2}\r\n\r\n", "400"),
        (&long, "431"),
        (&many, "431"),
    ] {
        let answer = ask(server.admin(), request).await;
        let expected = format!("HTTP/1.1 {status} ");
        // A head that is cut off may cost the answer: there was more to come.
        let cut = request.len() > 10_000 && answer.is_empty();
        assert!(
            answer.starts_with(&expected) || cut,
            "{request:.60}: {answer}"
        );
    }
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn ready_is_more_than_alive() {
    let driver = FakeDriver::new();
    driver.set_probe(Probe::Unusable {
        reason: "no cgroups: mount them".to_owned(),
    });
    let server = TestServer::start_over(driver, None).await.unwrap();
    let ready = ask(server.admin(), "GET /readyz HTTP/1.1\r\n\r\n").await;
    assert!(ready.starts_with("HTTP/1.1 503 "), "{ready}");
    assert!(ready.contains("no runtime works"), "{ready}");
    let healthy = ask(server.admin(), "GET /healthz HTTP/1.1\r\n\r\n").await;
    assert!(healthy.starts_with("HTTP/1.1 200 "), "{healthy}");
    server.stop().await.unwrap();

    let server = TestServer::start().await;
    server.sessions().ready().await.unwrap();
    server.close_store().await;
    let ready = ask(server.admin(), "GET /readyz HTTP/1.1\r\n\r\n").await;
    assert!(ready.starts_with("HTTP/1.1 503 "), "{ready}");
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_do_not_block_others() {
    let server = TestServer::start().await;
    let mut slow = Vec::new();
    // More than are served at once.
    for _ in 0..40 {
        let mut stream = TcpStream::connect(server.admin()).await.unwrap();
        stream.write_all(b"GET /metr").await.unwrap();
        slow.push(stream);
    }
    let since = Instant::now();
    let answer = ask(server.admin(), "GET /healthz HTTP/1.1\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(since.elapsed() < SOON);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_address_that_is_taken_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = TestServer::watched_at(address).await.err().unwrap();
    let text = error.to_string();
    assert!(text.contains("--metrics-listen"), "{text}");
    assert!(text.contains(&address.to_string()), "{text}");
}

/// Everything that comes back.
async fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // What refuses early closes early.
    let _ = stream.write_all(request.as_bytes()).await;
    let mut answer = Vec::new();
    let read = timeout(SOON, stream.read_to_end(&mut answer)).await;
    let _ = read.expect("the door answers or closes");
    String::from_utf8_lossy(&answer).into_owned()
}
