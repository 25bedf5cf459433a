//! Upgrades to another protocol (101 Switching Protocols).

use super::*;

const WISH: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n";

#[tokio::test]
async fn a_websocket_is_relayed() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    // Bytes that the client sends before the response are not lost.
    let request = format!("GET /switch HTTP/1.1\r\nHost: a.example\r\n{WISH}early");
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 101 Sure\r\n"), "{head}");
    assert!(head.contains("Upgrade: websocket\r\n"), "{head}");
    let mut heard = [0; 10];
    stream.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"firstearly");
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
        .await
        .unwrap();
    stream.shutdown().await.unwrap();
    // Bytes are relayed now, and the server echoes them.
    assert!(
        read_all(&mut stream)
            .await
            .unwrap()
            .starts_with(b"GET / HTTP/1.1")
    );
    assert_eq!(
        stage.flow().await,
        "allowed a.example 93.184.215.14:80 a.example"
    );
}

#[tokio::test]
async fn without_101_the_connection_stays_http() {
    let server = TestServer::start().await;
    for protocol in ["websocket", "h2c", "TLS/1.0"] {
        let stage = open(&server).await;
        let mut stream = stage.connect().await;
        let wish = WISH.replace("websocket", protocol);
        let request = format!("GET /text HTTP/1.1\r\nHost: a.example\r\n{wish}");
        let answer = ask(&mut stream, &request).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let last = server.heard().pop().unwrap();
        assert_eq!(last.contains("Upgrade"), protocol == "websocket", "{last}");
        let answer = ask(&mut stream, "GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
        assert!(
            !server
                .heard()
                .iter()
                .any(|request| request.contains("evil"))
        );
    }
}

#[tokio::test]
async fn an_unexpected_101_is_a_reset() {
    let server = TestServer::start().await;
    for (path, wish) in [
        ("/101", "\r\n"),
        ("/101", "Upgrade: websocket\r\n\r\n"),
        ("/101-h2c", WISH),
    ] {
        let stage = open(&server).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: a.example\r\n{wish}");
        let answer = stage.say(request.as_bytes()).await;
        assert!(is_reset(&answer), "{path} {wish:?}: {answer:?}");
    }
}

#[tokio::test]
async fn a_denied_upgrade_request_is_not_upgraded() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let said =
        format!("GET /switch HTTP/1.1\r\nHost: evil.test\r\n{WISH}GET /evil HTTP/1.1\r\n\r\n");
    let answer = stage.say(said.as_bytes()).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 403"));
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn a_policy_change_closes_a_websocket() {
    let server = TestServer::start().await;
    let stage = open(&server).await;
    let mut stream = stage.connect().await;
    let request = format!("GET /switch HTTP/1.1\r\nHost: a.example\r\n{WISH}");
    stream.write_all(request.as_bytes()).await.unwrap();
    read_head(&mut stream).await;
    stage.sandbox.set_policy(policy(&["b.example"], &[]));
    assert!(is_reset(&read_all(&mut stream).await));
    let flows = stage.flows(2).await;
    assert_eq!(
        text(&flows[1]),
        "policy_changed a.example 93.184.215.14:80 -"
    );
}
