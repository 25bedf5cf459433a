//! Forwarding: rewriting of requests and responses, connection reuse and retries.

use super::*;
use metrics_exporter_prometheus::PrometheusBuilder;

#[tokio::test]
async fn requests_and_responses_are_forwarded() {
    let (router, sandbox) = (Router::start(&[]).await, Sandbox::mirror().await);
    router.knows("sb", &sandbox);
    for http2 in [false, true] {
        let request = if http2 {
            sandbox.request_http2()
        } else {
            sandbox.request().header("host", "router.example")
        };
        let request = request
            .method("PUT")
            .header("x-own", "kept")
            .body(body("hello"))
            .unwrap();
        let heard = if http2 {
            router.ask_http2(request).await
        } else {
            router.ask(request).await
        };
        assert_eq!(heard.status, 200);
        let told = heard.json();
        assert_eq!(
            (&told["method"], &told["uri"]),
            (&json!("PUT"), &json!("/path?q=1"))
        );
        assert_eq!(
            (&told["version"], &told["body"]),
            (&json!("HTTP/1.1"), &json!("hello"))
        );
        assert_eq!(heard.mirrored("x-own"), ["kept"]);
        assert_eq!(heard.mirrored("x-sandbox-id"), ["sb"]);
        assert_eq!(heard.mirrored("host"), [sandbox.address.to_string()]);
        assert_eq!(heard.mirrored("x-forwarded-host"), ["router.example"]);
    }
}

#[tokio::test]
async fn credentials_and_hop_by_hop_headers_are_removed() {
    let (router, sandbox) = (Router::start(&[]).await, Sandbox::mirror().await);
    router.knows("sb", &sandbox);
    let request = sandbox
        .request()
        .header("authorization", "Bearer secret")
        .header("proxy-authorization", "Basic secret")
        .header("connection", "x-hop, keep-alive")
        .header("x-hop", "1")
        .header("te", "trailers")
        .header("origin", "https://a.example")
        .header("x-forwarded-for", "6.6.6.6")
        .header("forwarded", "for=6.6.6.6")
        .header("cookie", "a=1")
        .header("cookie", "b=2");
    let heard = router.ask(request.body(no_body()).unwrap()).await;
    for name in [
        "authorization",
        "proxy-authorization",
        "connection",
        "x-hop",
        "te",
        "forwarded",
    ] {
        assert!(heard.mirrored(name).is_empty(), "{name}");
    }
    assert_eq!(heard.mirrored("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(heard.mirrored("x-forwarded-proto"), ["http"]);
    assert_eq!(
        heard.mirrored("origin"),
        ["https://a.example"],
        "only upgrades lose it"
    );
    assert_eq!(heard.mirrored("cookie"), ["a=1; b=2"]);
}

#[tokio::test]
async fn the_response_to_head_keeps_its_content_length() {
    let router = Router::start(&[]).await;
    let sandbox =
        Sandbox::start(|_| async { Response::new(full("twelve bytes".to_owned())) }).await;
    router.knows("sb", &sandbox);
    let heard = router
        .ask(sandbox.request().method("HEAD").body(no_body()).unwrap())
        .await;
    assert_eq!(heard.headers["content-length"], "12");
    assert!(heard.body.is_empty());
}

#[tokio::test]
async fn a_pod_ip_of_the_sandbox_is_accepted() {
    let (router, sandbox) = (Router::start(&[]).await, Sandbox::mirror().await);
    router.knows("sb", &sandbox);
    let request = sandbox
        .request()
        .header("x-sandbox-pod-ip", "127.0.0.1")
        .header("x-sandbox-uid", "uid-sb");
    assert_eq!(
        router.ask(request.body(no_body()).unwrap()).await.status,
        200
    );
}

#[tokio::test]
async fn the_path_can_name_the_sandbox() {
    let (router, sandbox) = (
        Router::start(&["--path-routing-prefix=/s"]).await,
        Sandbox::mirror().await,
    );
    router.knows("sb", &sandbox);
    let uri = format!("/s/team/sb/{}/a%2Fb/c?x=y", sandbox.port());
    let heard = router.ask(Request::get(uri).body(no_body()).unwrap()).await;
    assert_eq!(heard.json()["uri"], "/a%2Fb/c?x=y");
    let heard = router.ask(sandbox.request().body(no_body()).unwrap()).await;
    assert_eq!(heard.json()["uri"], "/path?q=1", "headers go on working");
    let heard = router
        .ask(Request::get("/s/team/sb/x/").body(no_body()).unwrap())
        .await;
    assert_eq!(heard.detail(), "Invalid port format.");
}

#[tokio::test]
async fn connections_are_reused_and_replaced_when_closed() {
    let (router, sandbox) = (Router::start(&[]).await, Sandbox::mirror().await);
    router.knows("sb", &sandbox);
    let stream = TokioIo::new(router.connect().await);
    let (mut sender, connection) = http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..50 {
        let request = sandbox.request().method("POST").body(body("x")).unwrap();
        hear(sender.send_request(request).await.unwrap())
            .await
            .unwrap();
        sender.ready().await.unwrap();
    }
    let used = sandbox.connections();
    assert!(used < 25, "50 requests used {used} connections");

    // A sandbox that closes each connection after one response, without announcing it.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await;
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                .await;
        }
    });
    let closing = Sandbox {
        address,
        connections: Arc::default(),
    };
    for _ in 0..20 {
        let heard = router
            .ask(closing.request().method("POST").body(no_body()).unwrap())
            .await;
        assert_eq!(
            (heard.status, &heard.body[..]),
            (StatusCode::OK, &b"ok"[..])
        );
    }
}

#[tokio::test]
async fn failed_connection_attempts_are_retried() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let metrics = recorder.handle();
    let _guard = ::metrics::set_default_local_recorder(&recorder);
    let router = Router::start(&["--upstream-retry-initial-delay=50ms"]).await;
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap();
    drop(taken);
    let nobody = Sandbox {
        address,
        connections: Arc::default(),
    };
    router.knows("sb", &nobody);
    let asked = router.ask(nobody.request().method("POST").body(body("x")).unwrap());
    let opened = async {
        while !metrics
            .render()
            .contains("sandbox_router_upstream_retries_total{sandbox_namespace=\"team\"} 1")
        {
            tokio::task::yield_now().await;
        }
        let listener = TcpListener::bind(address).await.unwrap();
        Sandbox::serve(listener, |_| async {
            Response::new(full("there".to_owned()))
        })
    };
    let (heard, sandbox) = tokio::join!(asked, opened);
    assert_eq!(&heard.body[..], b"there");
    assert_eq!(sandbox.connections(), 1);
    let seen = metrics.render();
    let counted =
        "sandbox_router_requests_total{method=\"POST\",code=\"200\",sandbox_namespace=\"team\"} 1";
    assert!(seen.contains(counted), "{seen}");
}

#[tokio::test]
async fn a_request_that_was_sent_is_never_retried() {
    let router = Router::start(&["--upstream-retry-initial-delay=1ms"]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&accepted);
    tokio::spawn(async move {
        use tokio::io::AsyncReadExt as _;
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await;
        }
    });
    let sandbox = Sandbox {
        address,
        connections: accepted,
    };
    router.knows("sb", &sandbox);
    let heard = router
        .ask(sandbox.request().method("POST").body(body("x")).unwrap())
        .await;
    assert_eq!(heard.status, 502);
    assert!(
        heard
            .detail()
            .starts_with("Could not connect to the backend sandbox: sb"),
        "{}",
        heard.detail()
    );
    assert_eq!(sandbox.connections(), 1);
}

#[tokio::test]
async fn grpc_calls_are_forwarded_with_trailers() {
    let router = Router::start(&[]).await;
    let sandbox = Sandbox::start(|request| async move {
        assert_eq!(request.version(), hyper::Version::HTTP_2);
        assert_eq!(request.headers()["te"], "trailers");
        assert!(!request.headers().contains_key("authorization"));
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        let echoed = request
            .into_body()
            .with_trailers(async move { Some(Ok(trailers)) });
        let mut answer = Response::new(AnyBody::new(echoed.map_err(Into::into)));
        answer
            .headers_mut()
            .insert("content-type", "application/grpc".parse().unwrap());
        answer
    })
    .await;
    router.knows("sb", &sandbox);
    let call = || {
        let request = sandbox.request_http2().method("POST");
        request
            .header("content-type", "application/grpc+proto")
            .header("te", "trailers")
            .header("authorization", "Bearer x")
    };
    for _ in 0..3 {
        let heard = router
            .ask_http2(call().body(body("\0\0\0\0\x02hi")).unwrap())
            .await;
        assert_eq!(
            (heard.status, &heard.body[..]),
            (StatusCode::OK, &b"\0\0\0\0\x02hi"[..])
        );
        assert_eq!(heard.trailers.unwrap()["grpc-status"], "0");
        assert_eq!(heard.headers["content-type"], "application/grpc");
    }
    assert_eq!(
        sandbox.connections(),
        1,
        "one HTTP/2 connection carries all calls"
    );

    let mut nowhere = call();
    nowhere
        .headers_mut()
        .unwrap()
        .insert("x-sandbox-id", "gone".parse().unwrap());
    let heard = router.ask_http2(nowhere.body(no_body()).unwrap()).await;
    assert_eq!(
        (heard.status, &heard.headers["grpc-status"]),
        (StatusCode::OK, &"14".parse().unwrap())
    );
    let mut portless = call();
    portless.headers_mut().unwrap().remove("x-sandbox-port");
    let heard = router.ask_http2(portless.body(no_body()).unwrap()).await;
    assert_eq!(heard.headers["grpc-status"], "3");
    assert_eq!(
        heard.headers["grpc-message"],
        "X-Sandbox-Port header is required for gRPC."
    );
}
