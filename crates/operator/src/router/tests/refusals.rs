//! Refused requests and their error responses.

use super::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

async fn refused(router: &Router, headers: &[(&str, &str)]) -> (u16, String) {
    let mut request = Request::get("/");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let heard = router.ask(request.body(no_body()).unwrap()).await;
    assert_eq!(heard.headers["content-type"], "application/json");
    (heard.status.as_u16(), heard.detail())
}

#[tokio::test]
async fn invalid_headers_get_the_texts_that_clients_match() {
    let router = Router::start(&[]).await;
    let id = ("x-sandbox-id", "sb");
    let rows: [(&[(&str, &str)], &str); 6] = [
        (&[], "X-Sandbox-ID header is required."),
        (
            &[("x-sandbox-id", "Bad_Name")],
            "Invalid sandbox ID format.",
        ),
        (
            &[id, ("x-sandbox-namespace", "a.b")],
            "Invalid namespace format.",
        ),
        (&[id, ("x-sandbox-port", "0")], "Invalid port format."),
        (
            &[id, ("x-sandbox-pod-ip", "169.254.169.254")],
            "Invalid target IP address.",
        ),
        (
            &[id, ("x-sandbox-pod-ip", "nonsense")],
            "Invalid target IP address.",
        ),
    ];
    for (headers, detail) in rows {
        assert_eq!(refused(&router, headers).await, (400, detail.to_owned()));
    }
}

#[tokio::test]
async fn only_the_pods_of_the_sandbox_are_dialled() {
    let (router, sandbox, other) = (
        Router::start(&[]).await,
        Sandbox::mirror().await,
        Sandbox::mirror().await,
    );
    router.knows("sb", &sandbox);
    let pooled = json!({"metadata": {"labels": {crate::crd::names::WARM_POOL: "0a0a0a0a"}}});
    router
        .index
        .apply(Event::Apply(pod_with("warm", "127.0.0.1", pooled)));
    router.index.apply(Event::Apply(pod("far", "127.0.0.9")));
    let (port, team) = (
        ("x-sandbox-port", &*other.port()),
        ("x-sandbox-namespace", "team"),
    );
    let ask = async |rest: &[(&str, &str)]| {
        let headers: Vec<_> = [port, team]
            .into_iter()
            .chain(rest.iter().copied())
            .collect();
        refused(&router, &headers).await
    };
    let (sb, far, warm) = (
        ("x-sandbox-id", "sb"),
        ("x-sandbox-id", "far"),
        ("x-sandbox-id", "warm"),
    );
    let words = |name: &str, why: &str| {
        (
            502,
            format!("Could not connect to the backend sandbox: {name} ({why})"),
        )
    };
    // An unused address, and that of another sandbox: the request goes to the pod of its own sandbox.
    for ip in ["10.0.0.1", "127.0.0.9"] {
        let request = sandbox.request().header("x-sandbox-pod-ip", ip);
        let heard = router.ask(request.body(no_body()).unwrap()).await;
        assert_eq!(heard.status, 200, "{ip}");
    }
    assert_eq!(ask(&[far, ("x-sandbox-pod-ip", "127.0.0.1")]).await.0, 502);
    let unknown = ask(&[
        ("x-sandbox-id", "unknown"),
        ("x-sandbox-pod-ip", "127.0.0.1"),
    ])
    .await;
    assert_eq!(unknown, words("unknown", "it has no ready pod"));
    let other_uid = words(
        "sb",
        "the sandbox with this name has another UID than X-Sandbox-UID",
    );
    assert_eq!(ask(&[sb, ("x-sandbox-uid", "uid-old")]).await, other_uid);
    assert_eq!(
        ask(&[warm]).await,
        words("warm", "it has no ready pod"),
        "it has no claim"
    );
    assert_eq!(ask(&[warm, ("x-sandbox-pod-ip", "127.0.0.1")]).await.0, 502);
    assert_eq!(other.connections(), 0);
    let request = other.request().header("x-sandbox-uid", "uid-warm");
    let mut request = request.body(no_body()).unwrap();
    request
        .headers_mut()
        .insert("x-sandbox-id", "warm".parse().unwrap());
    assert_eq!(
        router.ask(request).await.status,
        200,
        "who knows its UID has seen it"
    );
}

#[tokio::test]
async fn dns_is_used_only_with_the_flag() {
    let router = Router::start(&["--dns-fallback", "--cluster-domain=invalid"]).await;
    let (status, detail) = refused(&router, &[("x-sandbox-id", "sb")]).await;
    assert_eq!(status, 502);
    assert!(
        detail.ends_with("(it has no ready pod, and its Service no address in DNS)"),
        "{detail}"
    );
    for more in [
        ("x-sandbox-pod-ip", "10.0.0.1"),
        ("x-sandbox-uid", "uid-sb"),
    ] {
        let (_, detail) = refused(&router, &[("x-sandbox-id", "sb"), more]).await;
        assert!(detail.ends_with("(it has no ready pod)"), "{detail}");
    }
}

#[tokio::test]
async fn the_router_is_not_an_open_proxy() {
    let (router, sandbox) = (Router::start(&[]).await, Sandbox::mirror().await);
    router.knows("sb", &sandbox);
    let mut stream = router.connect().await;
    let address = sandbox.address;
    stream
        .write_all(format!("CONNECT {address} HTTP/1.1\r\nhost: {address}\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 405");
    // The address in the request line is ignored: the headers name the target.
    let request = Request::get(format!("http://{address}/x"))
        .body(no_body())
        .unwrap();
    assert_eq!(router.ask(request).await.status, 400);
    assert_eq!(sandbox.connections(), 0);
}

#[tokio::test]
async fn a_closed_port_is_a_bad_gateway() {
    let flags = [
        "--upstream-retry-initial-delay=1ms",
        "--upstream-max-retries=2",
    ];
    let router = Router::start(&flags).await;
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = Sandbox {
        address: taken.local_addr().unwrap(),
        connections: Arc::default(),
    };
    drop(taken);
    router.knows("sb", &nobody);
    let heard = router.ask(nobody.request().body(no_body()).unwrap()).await;
    assert_eq!(heard.status, 502);
    let why = format!(
        "nothing accepts connections on port {} of its pod",
        nobody.port()
    );
    assert_eq!(
        heard.detail(),
        format!("Could not connect to the backend sandbox: sb ({why})")
    );
}

#[tokio::test]
async fn a_response_that_is_not_http_fails_only_its_request() {
    let router = Router::start(&[]).await;
    let huge = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(1024 * 1024));
    for said in [
        "nonsense\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        &huge,
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let sandbox = Sandbox {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
        };
        router.knows("sb", &sandbox);
        let said = said.to_owned();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(said.as_bytes()).await;
                let _ = stream.read(&mut [0; 1]).await;
            }
        });
        let heard = router.ask(sandbox.request().body(no_body()).unwrap()).await;
        assert_eq!(heard.status, 502, "{}", heard.detail());
    }
}
