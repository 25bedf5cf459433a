//! Listeners: TLS certificate reload, idle timeout, connection limits and graceful shutdown.

use super::*;
use crate::router::tls::Certificate;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use std::path::Path;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Writes a new certificate and its key to files, and returns the certificate.
fn renew(cert: &Path, key: &Path) -> Vec<u8> {
    let made = rcgen::generate_simple_self_signed(["router.example".to_owned()]).unwrap();
    std::fs::write(cert, made.cert.pem()).unwrap();
    std::fs::write(key, made.signing_key.serialize_pem()).unwrap();
    made.cert.pem().into_bytes()
}

/// Sends a request over TLS; `None` if the router does not present this certificate.
async fn ask_over_tls(router: &Router, trusted: &[u8], request: Request<AnyBody>) -> Option<Heard> {
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(trusted).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider);
    let config = config
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from("router.example").unwrap();
    let stream = TlsConnector::from(Arc::new(config))
        .connect(name, router.connect().await)
        .await
        .ok()?;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    Some(
        hear(sender.send_request(request).await.unwrap())
            .await
            .unwrap(),
    )
}

#[tokio::test]
async fn a_renewed_certificate_is_reloaded() {
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let first = renew(&cert, &key);
    let certificate = Certificate::load(cert.clone(), key.clone()).unwrap();
    let tls = TlsAcceptor::from(Arc::new(certificate.config().unwrap()));
    let index = Arc::new(Index::new(true));
    let proxy = Proxy::new(options(&[]), Arc::clone(&index), Authorizer::AllowAll);
    let router = Router::start_listener(index, proxy, Some(tls)).await;
    let sandbox = Sandbox::mirror().await;
    router.knows("sb", &sandbox);
    let request = || {
        sandbox
            .request_http2()
            .uri("https://router.example/")
            .body(no_body())
            .unwrap()
    };
    let heard = ask_over_tls(&router, &first, request()).await.unwrap();
    assert_eq!(heard.mirrored("x-forwarded-proto"), ["https"]);

    let second = renew(&cert, &key);
    certificate.reload();
    assert!(ask_over_tls(&router, &second, request()).await.is_some());
    assert!(ask_over_tls(&router, &first, request()).await.is_none());

    // A certificate without its key, and garbage: the previous one stays in use.
    std::fs::write(&key, "nonsense").unwrap();
    certificate.reload();
    assert!(ask_over_tls(&router, &second, request()).await.is_some());
    assert!(Certificate::load(cert, key).is_err());
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let router = Router::start(&["--idle-timeout=50ms"]).await;
    for said in [
        &b""[..],
        b"PRI * HT",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        b"GET / HTTP/1.1\r\nx: y",
    ] {
        let mut stream = router.connect().await;
        stream.write_all(said).await.unwrap();
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(STUCK_AFTER, stream.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "{said:?}");
    }
    // After a request, too.
    let mut stream = router.connect().await;
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    let ended = tokio::time::timeout(STUCK_AFTER, stream.read_to_string(&mut answer)).await;
    assert!(
        ended.is_ok() && answer.starts_with("HTTP/1.1 400"),
        "{answer}"
    );
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let (router, sandbox) = (
        Router::start(&["--max-connections=1"]).await,
        Sandbox::mirror().await,
    );
    router.knows("sb", &sandbox);
    let stream = TokioIo::new(router.connect().await);
    let (mut sender, connection) = http1::handshake(stream).await.unwrap();
    let first = tokio::spawn(connection);
    let answer = sender
        .send_request(sandbox.request().body(no_body()).unwrap())
        .await
        .unwrap();
    hear(answer).await.unwrap();
    let mut waiting = Box::pin(router.ask(sandbox.request().body(no_body()).unwrap()));
    let early = tokio::time::timeout(Duration::from_millis(100), &mut waiting).await;
    assert!(early.is_err(), "there was room for two");
    drop(sender);
    first.abort();
    assert_eq!(waiting.await.status, 200);
}

#[tokio::test]
async fn requests_in_flight_are_drained_at_shutdown() {
    let (asked, release) = (
        Arc::new(tokio::sync::Notify::new()),
        Arc::new(tokio::sync::Notify::new()),
    );
    let (was_asked, released) = (Arc::clone(&asked), Arc::clone(&release));
    let sandbox = Sandbox::start(move |_| {
        let (asked, released) = (Arc::clone(&was_asked), Arc::clone(&released));
        async move {
            asked.notify_one();
            released.notified().await;
            Response::new(full("done".to_owned()))
        }
    })
    .await;
    let index = Arc::new(Index::new(true));
    let proxy = Arc::new(Proxy::new(
        options(&[]),
        Arc::clone(&index),
        Authorizer::AllowAll,
    ));
    index.apply(Event::Apply(pod("sb", "127.0.0.1")));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (stop, stopping) = watch::channel(false);
    let router = Router {
        index,
        address: listener.local_addr().unwrap(),
        _stop: watch::channel(false).0,
    };
    let serving = tokio::spawn(ProxyListener::new(listener, None).serve(
        proxy,
        ConnectionLimit::new(9),
        stopping,
    ));
    let idle = router.connect().await;
    let ending = async {
        asked.notified().await;
        stop.send(true).unwrap();
        while TcpStream::connect(router.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        release.notify_one();
    };
    let (heard, ()) = tokio::join!(
        router.ask(sandbox.request().body(no_body()).unwrap()),
        ending
    );
    assert_eq!(&heard.body[..], b"done");
    tokio::time::timeout(STUCK_AFTER, serving)
        .await
        .unwrap()
        .unwrap();
    drop(idle);
}

#[tokio::test]
async fn connections_to_sandboxes_are_limited() {
    let router = Router::start(&["--max-connections=1"]).await;
    let sandbox = Sandbox::start(|request| async move {
        if request.uri().path() == "/never" {
            std::future::pending::<()>().await;
        }
        Response::new(full("done".to_owned()))
    })
    .await;
    router.knows("sb", &sandbox);
    let stream = TokioIo::new(router.connect().await);
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream)
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = |path: &str| {
        let request = sandbox
            .request()
            .uri(format!("http://router.example{path}"));
        request.body(no_body()).unwrap()
    };
    let mut asking = sender.clone();
    let never = tokio::spawn(asking.send_request(request("/never")));
    while sandbox.connections() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let heard = hear(sender.send_request(request("/")).await.unwrap()).await;
    let heard = heard.unwrap();
    assert_eq!(heard.status, 503);
    assert!(
        heard.detail().contains("--max-connections"),
        "{}",
        heard.detail()
    );
    // Its permit is released as soon as the client disconnects.
    never.abort();
    let heard = hear(sender.send_request(request("/")).await.unwrap()).await;
    assert_eq!(heard.unwrap().status, 200);
}
