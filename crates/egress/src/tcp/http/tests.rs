//! Raw HTTP requests through a gate, to a server that records what it reads.

mod bodies;
mod smuggling;
mod switching;
mod test_server;

use crate::tcp::testing::*;
use std::time::Duration;
use test_server::{TestServer, ask, read_head};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

const HTTP: &str = "93.184.215.14:80";
const ADDRESS: &str = "93.184.215.14";

/// A gate that allows `a.example` and `b.example`, which share an address.
async fn open(server: &TestServer) -> Stage {
    let policy = policy(&["a.example", "b.example"], &[]);
    let stage = Stage::open(policy, HTTP, server.address).await;
    for host in ["a.example", "b.example", "evil.test"] {
        stage.tell(host, ADDRESS);
    }
    stage
}

#[tokio::test]
async fn a_request_and_its_response() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let said = stage
        .say(b"GET /text HTTP/1.1\r\nHost: A.example\r\nX-MiXed: One\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let want =
        "HTTP/1.1 200 Fine\r\nContent-Length: 5\r\nX-SeRver: s\r\nconnection: close\r\n\r\nhello";
    assert_eq!(String::from_utf8(said).unwrap(), want);
    let want = "GET /text HTTP/1.1\r\nHost: A.example\r\nX-MiXed: One\r\nConnection: close\r\n\r\n";
    assert_eq!(server.heard(), [want]);
    assert_eq!(
        stage.flow().await,
        "allowed a.example 93.184.215.14:80 a.example"
    );
}

#[tokio::test]
async fn many_requests_on_one_connection() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    for host in ["a.example", "a.example", "b.example", "b.example:80"] {
        let answer = ask(
            &mut stream,
            &format!("GET /text HTTP/1.1\r\nHost: {host}\r\n\r\n"),
        )
        .await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.ends_with("hello"), "{answer}");
    }
    assert_eq!((server.heard().len(), server.connections()), (4, 1));
    let flows: Vec<_> = stage.flows(2).await.iter().map(text).collect();
    assert_eq!(
        flows,
        [
            "allowed a.example 93.184.215.14:80 a.example",
            "allowed b.example 93.184.215.14:80 b.example"
        ]
    );
}

#[tokio::test]
async fn each_request_of_a_connection_is_checked() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    ask(&mut stream, "GET /text HTTP/1.1\r\nHost: a.example\r\n\r\n").await;
    let answer = ask(&mut stream, "GET /text HTTP/1.1\r\nHost: evil.test\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{answer}");
    let line = "k8e denied evil.test (93.184.215.14:80): \
                allow it with `k8e sandbox allow-hosts --session-id sess-a --add evil.test`\n";
    assert!(answer.ends_with(line), "{answer}");
    assert!(read_all(&mut stream).await.unwrap().is_empty());
    assert_eq!(server.heard().len(), 1);
    let flows = stage.flows(2).await;
    assert_eq!(text(&flows[1]), "not_allowed evil.test 93.184.215.14:80 -");
}

#[tokio::test]
async fn a_403_has_the_reason() {
    let server = TestServer::start().await;
    for (request, line, flow) in [
        (
            "GET / HTTP/1.0\r\n\r\n",
            "k8e denied 93.184.215.14:80: the connection shows no host name",
            "no_name - 93.184.215.14:80 -",
        ),
        (
            "GET / HTTP/1.1\r\nHost: 93.184.215.14\r\n\r\n",
            "k8e denied 93.184.215.14:80: the connection shows no host name",
            "no_name - 93.184.215.14:80 -",
        ),
        (
            "CONNECT a.example:80 HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "k8e denied 93.184.215.14:80: what was sent is not valid for this port",
            "malformed - 93.184.215.14:80 -",
        ),
        (
            "GET / HTTP/1.1\r\nHost: c.b.example\r\n\r\n",
            "k8e denied c.b.example (93.184.215.14:80): allow it with",
            "not_allowed c.b.example 93.184.215.14:80 -",
        ),
    ] {
        let stage = open(&server).await;
        let answer = String::from_utf8(stage.say(request.as_bytes()).await.unwrap()).unwrap();
        assert!(answer.contains(" 403 Forbidden\r\n"), "{answer}");
        assert!(answer.contains(line), "{answer}");
        assert_eq!(stage.flow().await, flow);
    }
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn a_client_may_half_close_after_its_request() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    stream
        .write_all(b"GET /slow HTTP/1.1\r\nHost: a.example\r\n\r\n")
        .await
        .unwrap();
    stream.shutdown().await.unwrap();
    assert!(read_all(&mut stream).await.unwrap().ends_with(b"hello"));
}

#[tokio::test]
async fn pipelined_requests() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let request = "GET /text HTTP/1.1\r\nHost: a.example\r\n\r\n";
    let last = "GET /text HTTP/1.1\r\nHost: b.example\r\nConnection: close\r\n\r\n";
    stream
        .write_all(format!("{request}{request}{last}").as_bytes())
        .await
        .unwrap();
    let answers = String::from_utf8(read_all(&mut stream).await.unwrap()).unwrap();
    assert_eq!(answers.matches("hello").count(), 3, "{answers}");
}

#[tokio::test]
async fn requests_have_a_rate_limit() {
    /// Two seconds at the full rate, of which the burst covers a quarter of a second.
    const REQUESTS: usize = 4000;
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let start = std::time::Instant::now();
    let (mut read, mut write) = stream.split();
    let asked = async {
        let request = b"GET /text HTTP/1.1\r\nHost: a.example\r\n\r\n".repeat(REQUESTS);
        write.write_all(&request).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut answers = Vec::new();
    let (_, read) = tokio::join!(asked, read.read_to_end(&mut answers));
    read.unwrap();
    let took = start.elapsed().as_secs_f64();
    let answers = String::from_utf8(answers).unwrap();
    assert_eq!(answers.matches("hello").count(), REQUESTS);
    assert!(took > 1.7, "{took}");
}

#[tokio::test]
async fn a_closed_upstream_connection_is_opened_again() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let answer = ask(
        &mut stream,
        "GET /text-then-close HTTP/1.1\r\nHost: a.example\r\n\r\n",
    )
    .await;
    assert!(answer.ends_with("hello"), "{answer}");
    // The close is relayed, so that the client opens another connection.
    assert!(read_all(&mut stream).await.unwrap().is_empty());
}

#[tokio::test]
async fn an_upstream_that_aborts_is_a_reset() {
    let server = TestServer::start().await;
    for path in ["/nothing", "/half", "/nonsense", "/101"] {
        let stage = open(&server).await;
        let answer = stage
            .say(format!("GET {path} HTTP/1.1\r\nHost: a.example\r\n\r\n").as_bytes())
            .await;
        assert!(is_reset(&answer), "{path}: {answer:?}");
    }
}

#[tokio::test]
async fn an_unreachable_upstream() {
    let stage = Stage::open(policy(&["a.example"], &[]), HTTP, nobody().await).await;
    stage.tell("a.example", ADDRESS);
    assert!(is_reset(
        &stage
            .say(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
            .await
    ));
    assert_eq!(
        stage.flow().await,
        "unreachable a.example 93.184.215.14:80 -"
    );
}

#[tokio::test]
async fn a_policy_change_closes_and_counts_for_each_request() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    ask(&mut stream, "GET /text HTTP/1.1\r\nHost: b.example\r\n\r\n").await;
    stage.sandbox.set_policy(policy(&["b.example"], &[]));
    sleep(Duration::from_millis(20)).await;
    let answer = ask(&mut stream, "GET /text HTTP/1.1\r\nHost: a.example\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");

    let mut stream = stage.connect().await;
    stream
        .write_all(b"GET /endless HTTP/1.1\r\nHost: b.example\r\n\r\n")
        .await
        .unwrap();
    read_head(&mut stream).await;
    stage.sandbox.set_policy(policy(&["a.example"], &[]));
    assert!(is_reset(&read_all(&mut stream).await));
    let flows = stage.flows(3).await;
    assert_eq!(
        text(flows.last().unwrap()),
        "policy_changed b.example 93.184.215.14:80 -"
    );
}

#[tokio::test]
async fn under_all_the_host_is_checked_if_names_are_denied() {
    let server = TestServer::start().await;
    let stage = Stage::open(policy(&["all"], &["evil.test"]), HTTP, server.address).await;
    let mut stream = stage.connect().await;
    for host in ["a.example", "93.184.215.14"] {
        let answer = ask(
            &mut stream,
            &format!("GET /text HTTP/1.1\r\nHost: {host}\r\n\r\n"),
        )
        .await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let answer = ask(&mut stream, "GET /text HTTP/1.1\r\nHost: evil.test\r\n\r\n").await;
    assert!(
        answer.contains("403") && answer.contains("the server denies it"),
        "{answer}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_head_times_out() {
    let server = TestServer::start().await;
    for said in [&b""[..], b"GET / HT", b"GET / HTTP/1.1\r\nHost: a.exa"] {
        let stage = open(&server).await;
        let mut stream = stage.connect().await;
        stream.write_all(said).await.unwrap();
        let mut heard = Vec::new();
        let _ = timeout(Duration::from_secs(200), stream.read_to_end(&mut heard))
            .await
            .unwrap();
        assert_eq!(stage.flow().await, "no_name - 93.184.215.14:80 -");
    }
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_client_is_closed() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let request = b"GET /never HTTP/1.1\r\nHost: a.example\r\n\r\n";
    let mut waits = stage.connect().await;
    waits.write_all(request).await.unwrap();
    let mut gave_up = stage.connect().await;
    gave_up.write_all(request).await.unwrap();
    gave_up.shutdown().await.unwrap();
    let start = tokio::time::Instant::now();
    assert!(is_reset(&gave_up.read_u8().await));
    assert!(
        start.elapsed() < 3 * super::ABANDONED_AFTER,
        "{:?}",
        start.elapsed()
    );
    assert!(is_reset(&waits.read_u8().await));
    assert!(
        start.elapsed() > crate::tcp::relay::IDLE_MAX,
        "{:?}",
        start.elapsed()
    );
}
