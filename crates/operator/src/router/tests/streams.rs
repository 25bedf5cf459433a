//! Streaming: large and slow bodies, backpressure, WebSockets, timeouts and size limits.

use super::*;
use futures::{StreamExt as _, stream};
use http_body_util::StreamBody;
use hyper::body::Frame;
use std::sync::atomic::AtomicU64;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

const MIB: usize = 1024 * 1024;
/// Bytes of an unread stream that socket buffers, HTTP/2 windows and our buffers may contain.
const IN_FLIGHT_BYTES_MAX: u64 = 32 * MIB as u64;

/// A body of `pieces` chunks of 64 KiB; `sent` counts the bytes that were read from it.
fn flood(pieces: usize, sent: Arc<AtomicU64>) -> AnyBody {
    let piece = Bytes::from(vec![7; MIB / 16]);
    let pieces = stream::iter(0..pieces).map(move |_| {
        sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
        Ok::<_, BoxError>(Frame::data(piece.clone()))
    });
    AnyBody::new(StreamBody::new(pieces))
}

#[tokio::test]
async fn server_sent_events_are_streamed_without_delay() {
    let router = Router::start(&[]).await;
    let (events, received) = mpsc::channel::<Bytes>(1);
    let received = Arc::new(tokio::sync::Mutex::new(received));
    let sandbox = Sandbox::start(move |_| {
        let received = Arc::clone(&received);
        async move {
            let received = received.lock_owned().await;
            let events = stream::unfold(received, |mut received| async move {
                let event = received.recv().await?;
                Some((Ok::<_, BoxError>(Frame::data(event)), received))
            });
            let mut answer = Response::new(AnyBody::new(StreamBody::new(events)));
            answer
                .headers_mut()
                .insert("content-type", "text/event-stream".parse().unwrap());
            answer
        }
    })
    .await;
    router.knows("sb", &sandbox);
    let stream = TokioIo::new(router.connect().await);
    let (mut sender, connection) = http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut answer = sender
        .send_request(sandbox.request().body(no_body()).unwrap())
        .await
        .unwrap();
    for n in 0..3 {
        // The next one is sent only when this one has arrived.
        let event = format!("data: {n}\n\n");
        events.send(event.clone().into()).await.unwrap();
        let frame = answer.body_mut().frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), event);
    }
    drop(events);
    assert!(answer.body_mut().frame().await.is_none());
}

#[tokio::test]
async fn a_hundred_megabytes_are_streamed_both_ways() {
    let router = Router::start(&[]).await;
    let sandbox = Sandbox::start(|request| async move {
        Response::new(AnyBody::new(request.into_body().map_err(Into::into)))
    })
    .await;
    router.knows("sb", &sandbox);
    for http2 in [false, true] {
        let request = if http2 {
            sandbox.request_http2()
        } else {
            sandbox.request()
        };
        let request = request
            .method("POST")
            .body(flood(1600, Arc::default()))
            .unwrap();
        let stream = TokioIo::new(router.connect().await);
        let answer = if http2 {
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream)
                .await
                .unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        } else {
            let (mut sender, connection) = http1::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        };
        let mut body = answer.into_body();
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            let data = frame.unwrap().into_data().unwrap_or_default();
            assert!(data.iter().all(|byte| *byte == 7));
            bytes += data.len();
        }
        assert_eq!(bytes, 100 * MIB);
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_causes_backpressure() {
    for http2 in [false, true] {
        let router = Router::start(&[]).await;
        let sent = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&sent);
        let sandbox = Sandbox::start(move |_| {
            let sent = Arc::clone(&count);
            async move { Response::new(flood(1 << 20, sent)) }
        })
        .await;
        router.knows("sb", &sandbox);
        let request = if http2 {
            sandbox.request_http2()
        } else {
            sandbox.request()
        };
        let request = request.body(no_body()).unwrap();
        let stream = TokioIo::new(router.connect().await);
        let answer = if http2 {
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream)
                .await
                .unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        } else {
            let (mut sender, connection) = http1::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        };
        // Until the stream stalls: no more bytes were sent for a while.
        let mut before = u64::MAX;
        while sent.load(Ordering::Relaxed) != before {
            before = sent.load(Ordering::Relaxed);
            assert!(
                before < IN_FLIGHT_BYTES_MAX,
                "{before} bytes are buffered for a client that does not read"
            );
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        assert!(before > 0);
        drop(answer);
    }
}

#[tokio::test]
async fn a_websocket_is_tunnelled_both_ways() {
    let router = Router::start(&["--proxy-timeout=200ms"]).await;
    let sandbox = Sandbox::start(|mut request: Request<Incoming>| async move {
        assert_eq!(request.headers()["upgrade"], "websocket");
        assert!(
            !request.headers().contains_key("origin")
                && !request.headers().contains_key("authorization")
        );
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgraded.await.unwrap());
            let mut buffer = [0; 1024];
            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                stream.write_all(&buffer[..count]).await.unwrap();
            }
        });
        let answer = Response::builder()
            .status(101)
            .header("connection", "upgrade")
            .header("upgrade", "websocket");
        answer
            .header("sec-websocket-accept", "x")
            .body(empty())
            .unwrap()
    })
    .await;
    router.knows("sb", &sandbox);
    let mut stream = router.connect().await;
    let head = format!(
        "GET /ws HTTP/1.1\r\nhost: router\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\norigin: https://x\r\n\
         authorization: Bearer x\r\nx-sandbox-id: sb\r\nx-sandbox-namespace: team\r\nx-sandbox-port: {}\r\n\r\n",
        sandbox.port()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    assert!(
        head.starts_with("http/1.1 101") && head.contains("upgrade: websocket"),
        "{head}"
    );
    assert!(head.contains("sec-websocket-accept: x"), "{head}");
    let until = tokio::time::Instant::now() + Duration::from_millis(400);
    let mut rounds = 0;
    // Longer than --proxy-timeout, which does not apply to WebSockets.
    while tokio::time::Instant::now() < until {
        stream.write_all(b"ping").await.unwrap();
        let mut echoed = [0; 4];
        stream.read_exact(&mut echoed).await.unwrap();
        assert_eq!(&echoed, b"ping");
        rounds += 1;
    }
    assert!(rounds > 0);
    stream.shutdown().await.unwrap();
    assert_eq!(
        stream.read(&mut [0; 8]).await.unwrap(),
        0,
        "closing one end closes the other"
    );
}

#[tokio::test]
async fn an_idle_websocket_is_closed() {
    let router = Router::start(&["--websocket-idle-timeout=100ms"]).await;
    let sandbox = Sandbox::start(|mut request: Request<Incoming>| async move {
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgraded.await.unwrap());
            let _ = stream.read_u8().await;
        });
        let answer = Response::builder()
            .status(101)
            .header("connection", "upgrade")
            .header("upgrade", "x");
        answer.body(empty()).unwrap()
    })
    .await;
    router.knows("sb", &sandbox);
    let request = sandbox
        .request()
        .header("connection", "upgrade")
        .header("upgrade", "x");
    let stream = TokioIo::new(router.connect().await);
    let (mut sender, connection) = http1::handshake(stream).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    let answer = sender
        .send_request(request.body(no_body()).unwrap())
        .await
        .unwrap();
    assert_eq!(answer.status(), 101);
    let mut stream = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
    let ended = tokio::time::timeout(STUCK_AFTER, stream.read(&mut [0; 8])).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))));
}

#[tokio::test]
async fn a_slow_sandbox_times_out() {
    let router = Router::start(&["--proxy-timeout=300ms"]).await;
    let sandbox = Sandbox::start(|request: Request<Incoming>| async move {
        if request.uri().path() == "/never" {
            std::future::pending::<()>().await;
        }
        let begun = stream::iter([Ok::<_, BoxError>(Frame::data(Bytes::from("begun")))]);
        Response::new(AnyBody::new(StreamBody::new(
            begun.chain(stream::pending()),
        )))
    })
    .await;
    router.knows("sb", &sandbox);
    for timeout in ["0.05", "100000"] {
        let request = sandbox
            .request()
            .uri("/never")
            .header("x-sandbox-timeout", timeout);
        let heard = router.ask(request.body(no_body()).unwrap()).await;
        assert_eq!(heard.status, 504, "{timeout}");
        assert_eq!(heard.detail(), "The sandbox did not answer in time: sb");
    }
    // A response that does not end in time is aborted: a client must not take a part of it for the whole.
    let stream = TokioIo::new(router.connect().await);
    let (mut sender, connection) = http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let answer = sender
        .send_request(sandbox.request().body(no_body()).unwrap())
        .await
        .unwrap();
    assert_eq!(answer.status(), 200);
    assert!(
        tokio::time::timeout(STUCK_AFTER, hear(answer))
            .await
            .unwrap()
            .is_err()
    );

    let router = Router::start(&["--response-header-timeout=50ms"]).await;
    router.knows("sb", &sandbox);
    let heard = router
        .ask(sandbox.request().uri("/never").body(no_body()).unwrap())
        .await;
    assert_eq!(heard.status, 504);
}

#[tokio::test]
async fn the_request_body_has_a_size_limit() {
    let (router, sandbox) = (
        Router::start(&["--max-request-body-bytes=100000"]).await,
        Sandbox::mirror().await,
    );
    router.knows("sb", &sandbox);
    let ask = |body: AnyBody| router.ask(sandbox.request().method("POST").body(body).unwrap());
    assert_eq!(ask(full("x".repeat(100_000))).await.status, 200);
    assert_eq!(ask(full("x".repeat(100_001))).await.status, 413);
    assert_eq!(
        ask(flood(2, Arc::default())).await.status,
        413,
        "there was no content-length"
    );
}
