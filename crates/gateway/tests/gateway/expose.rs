//! Visitors of exposed services: who is let in, what goes through, and what a service cannot do.

use crate::server::{SOON, TestServer};
use k8e_api::v1;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// A service on this machine, which is where guests of tests run, and what it was sent last.
struct Service {
    port: u32,
    heard: Arc<Mutex<String>>,
}

/// A service that a session exposes.
pub(crate) struct Exposed {
    pub(crate) server: TestServer,
    session_id: String,
    service: Service,
    host: String,
    /// Path and query, with the token.
    pub(crate) url: String,
    token: String,
}

impl Service {
    /// Answers each connection with the same bytes and closes it.
    async fn saying(answer: &'static str) -> Self {
        let heard = Arc::new(Mutex::new(String::new()));
        let told = Arc::clone(&heard);
        let port = serve(move |mut stream| {
            let told = Arc::clone(&told);
            async move {
                *told.lock().unwrap() = head(&mut stream).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        })
        .await;
        Self { port, heard }
    }

    fn heard(&self) -> String {
        std::mem::take(&mut *self.heard.lock().unwrap())
    }
}

/// Serves each connection; returns the port.
async fn serve<F>(answer: impl Fn(TcpStream) -> F + Send + 'static) -> u32
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    port.into()
}

/// Reads a head, and nothing behind it.
async fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).unwrap()
}

pub(crate) const HELLO: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";

impl Exposed {
    pub(crate) async fn saying(answer: &'static str) -> Self {
        let service = Service::saying(answer).await;
        Self::over(service).await
    }

    async fn on(port: u32) -> Self {
        let heard = Arc::default();
        Self::over(Service { port, heard }).await
    }

    async fn over(service: Service) -> Self {
        Self::of(TestServer::start().await, service).await
    }

    async fn of(server: TestServer, service: Service) -> Self {
        let mut client = server.local().await;
        let create = v1::CreateSessionRequest {
            session_id: "s1".to_owned(),
            ..Default::default()
        };
        let session_id = client.create_session(create).await.unwrap();
        let session_id = session_id.into_inner().session_id;
        let expose = v1::ExposeServiceRequest {
            session_id: session_id.clone(),
            port: service.port,
            host: String::new(),
        };
        let exposed = client.expose_service(expose).await.unwrap().into_inner();
        assert!(!format!("{exposed:?}").contains(&exposed.token));
        let (_, after_scheme) = exposed.url.split_once("://").unwrap();
        let (host, _) = after_scheme.split_once('/').unwrap();
        let url = after_scheme[host.len()..].to_owned();
        Self {
            server,
            session_id,
            service,
            host: host.to_owned(),
            url,
            token: exposed.token,
        }
    }

    /// Its path without the token.
    fn path(&self) -> &str {
        self.url.split('?').next().unwrap()
    }

    async fn ask(&self, request: &str) -> String {
        ask(self.server.expose(), request).await
    }

    /// A request with the token in a header; `what` is method and path below the service's.
    async fn get(&self, what: &str, headers: &str) -> String {
        let (method, path) = what.split_once(" /").unwrap();
        let (prefix, token) = (self.path(), &self.token);
        self.ask(&format!(
            "{method} {prefix}{path} HTTP/1.1\r\nhost: door\r\nconnection: close\r\nx-k8e-token: {token}\r\n{headers}\r\n"
        ))
        .await
    }

    async fn unexpose(&self) {
        let request = v1::UnexposeServiceRequest {
            session_id: self.session_id.clone(),
            port: self.service.port,
        };
        let mut client = self.server.local().await;
        let answer = client.unexpose_service(request).await.unwrap();
        assert!(answer.into_inner().ok);
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.server.expose()).await.unwrap()
    }
}

/// Sends it all and reads up to the end.
async fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let _ = stream.write_all(request.as_bytes()).await;
    let mut answer = Vec::new();
    let read = timeout(SOON, stream.read_to_end(&mut answer)).await;
    let _ = read.expect("the answer ends");
    String::from_utf8_lossy(&answer).into_owned()
}

#[track_caller]
fn is(answer: &str, status: u16) {
    let expected = format!("HTTP/1.1 {status} ");
    assert!(answer.starts_with(&expected), "{status}: {answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_show_the_token_and_it_goes_no_further() {
    let exposed = Exposed::saying(HELLO).await;
    let (path, token) = (exposed.path(), &exposed.token);
    let get = |target: String, headers: String| {
        format!("GET {target} HTTP/1.1\r\nhost: door.example\r\nconnection: close\r\n{headers}\r\n")
    };
    let plain = |headers: &str| get(format!("{path}a?b=c"), headers.to_owned());
    for request in [
        get(format!("{path}a?k8e_token={token}&b=c"), String::new()),
        plain(&format!("authorization: Bearer {token}\r\n")),
        plain(&format!("x-k8e-token: {token}\r\n")),
        plain(&format!("cookie: x=1; k8e_token={token}; y=2\r\n")),
        plain(&format!(
            "cookie: k8e_token=0\r\ncookie: k8e_token={token}\r\n"
        )),
    ] {
        let answer = exposed.ask(&request).await;
        is(&answer, 200);
        assert!(answer.ends_with("\r\n\r\nhello"), "{answer}");
        let heard = exposed.service.heard();
        assert!(heard.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{heard}");
        assert!(!heard.contains(token), "{heard}");
        assert!(!heard.contains("k8e_token") && !heard.contains("x-k8e"));
        let prefix = path.trim_end_matches('/');
        for line in [
            "host: door.example",
            "x-forwarded-for: 127.0.0.1",
            "x-forwarded-host: door.example",
            "x-forwarded-proto: http",
            &format!("x-forwarded-prefix: {prefix}"),
        ] {
            assert!(heard.contains(&format!("{line}\r\n")), "{line}: {heard}");
        }
        if request.contains("y=2") {
            assert!(heard.contains("cookie: x=1; y=2\r\n"), "{heard}");
        }
    }
    // What is not the token is the service's own business.
    let own = format!(
        "authorization: Bearer {}\r\nx-forwarded-for: 192.0.2.1\r\n",
        "f".repeat(64)
    );
    is(&exposed.get("GET /", &own).await, 200);
    let heard = exposed.service.heard();
    assert!(heard.contains("authorization: Bearer ffff"), "{heard}");
    assert!(
        heard.contains("x-forwarded-for: 192.0.2.1, 127.0.0.1\r\n"),
        "{heard}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_token_cannot_tell_what_is_there() {
    let exposed = Exposed::saying(HELLO).await;
    let (path, token) = (exposed.path(), &exposed.token);
    let port = exposed.service.port;
    let wrong = "0".repeat(64);
    let mut answers = Vec::new();
    for target in [
        path.to_owned(),
        format!("{path}?k8e_token={wrong}"),
        format!("{path}?k8e_token={}", &token[1..]),
        format!("{path}?k8e_token="),
        format!("/k8e/expose/s1/1/?k8e_token={token}"),
        format!("/k8e/expose/s2/{port}/?k8e_token={token}"),
        format!("/k8e/expose/s1/0{port}/?k8e_token={token}"),
        format!("/k8e/expose/S1/{port}/?k8e_token={token}"),
        "/k8e/expose/".to_owned(),
        "/".to_owned(),
    ] {
        let answer = exposed
            .ask(&format!("GET {target} HTTP/1.1\r\nhost: a\r\n\r\n"))
            .await;
        is(&answer, 404);
        let date = |line: &&str| !line.starts_with("date:");
        answers.push(answer.lines().filter(date).collect::<Vec<_>>().join("\n"));
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:#?}");
    assert_eq!(exposed.service.heard(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_gets_a_cookie_and_a_url_without_the_token() {
    let exposed = Exposed::saying(HELLO).await;
    let (path, token) = (exposed.path(), &exposed.token);
    let request = format!(
        "GET {path}a/b?x=1&k8e_token={token} HTTP/1.1\r\nhost: a\r\nconnection: close\r\naccept: text/html,*/*\r\n\r\n"
    );
    let answer = exposed.ask(&request).await;
    is(&answer, 303);
    assert!(
        answer.contains(&format!("\r\nlocation: {path}a/b?x=1\r\n")),
        "{answer}"
    );
    let cookie = format!("k8e_token={token}; Path={path}; HttpOnly; SameSite=Lax");
    assert!(
        answer.contains(&format!("\r\nset-cookie: {cookie}\r\n")),
        "{answer}"
    );
    assert!(
        answer.contains("referrer-policy: no-referrer\r\n"),
        "{answer}"
    );
    assert_eq!(exposed.service.heard(), "");
    // Nobody is sent anywhere with a body, or with a wrong token.
    let post = request.replace("GET", "POST");
    is(&exposed.ask(&post).await, 200);
    let wrong = request.replace(token.as_str(), &"0".repeat(64));
    is(&exposed.ask(&wrong).await, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_means_nothing_outside_its_path() {
    let exposed = Exposed::saying(
        "HTTP/1.1 302 Found\r\nLocation: /login\r\nSet-Cookie: a=b; Domain=door; Path=/\r\n\
         Set-Cookie: k8e_token=evil; Path=/\r\nSet-Cookie: c=d; Path=/k8e/expose/s2/80/\r\n\
         Clear-Site-Data: \"*\"\r\nService-Worker-Allowed: /\r\nStrict-Transport-Security: max-age=1\r\n\
         Alt-Svc: h3=\":1\"\r\nConnection: x-secret, close\r\nX-Secret: 1\r\nKeep-Alive: timeout=9\r\n\
         Proxy-Authenticate: Basic\r\nX-Own: kept\r\nContent-Length: 0\r\n\r\n",
    )
    .await;
    let answer = exposed.get("GET /", "").await;
    is(&answer, 302);
    let path = exposed.path();
    let (head, _) = answer.split_once("\r\n\r\n").unwrap();
    let mut lines: Vec<_> = head.lines().skip(1).collect();
    lines.retain(|line| !line.starts_with("date:"));
    lines.sort_unstable();
    let mut expected = [
        "connection: close".to_owned(),
        "content-length: 0".to_owned(),
        format!("location: {path}login"),
        format!("set-cookie: a=b; Path={path}"),
        format!("set-cookie: c=d; Path={path}k8e/expose/s2/80/"),
        "x-own: kept".to_owned(),
    ];
    expected.sort_unstable();
    assert_eq!(lines, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_gives_no_answer_is_named() {
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = unused.local_addr().unwrap().port();
    drop(unused);
    let nobody = Exposed::on(port.into()).await;
    let answer = nobody.get("GET /", "").await;
    is(&answer, 502);
    assert!(
        answer.contains(&format!("no process listens on port {port}")),
        "{answer}"
    );
    assert!(!answer.contains(&nobody.token));
    for nonsense in [
        "",
        "SSH-2.0-nonsense\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    ] {
        let exposed = Exposed::saying(nonsense).await;
        is(&exposed.get("GET /", "").await, 502);
    }
    let endless = serve(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n").await;
        while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
    });
    let exposed = Exposed::on(endless.await).await;
    is(&exposed.get("GET /", "").await, 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_answer_is_not_taken_for_a_whole_one() {
    let exposed =
        Exposed::saying("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
            .await;
    let answer = exposed.get("GET /", "").await;
    is(&answer, 200);
    assert!(!answer.ends_with("0\r\n\r\n"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_and_old_clients() {
    let exposed =
        Exposed::saying("HTTP/1.0 200 OK\r\nContent-Type: a/b\r\n\r\nuntil I close").await;
    let (path, token) = (exposed.path(), &exposed.token);
    let old = format!("GET {path} HTTP/1.0\r\nx-k8e-token: {token}\r\n\r\n");
    let answer = exposed.ask(&old).await;
    assert!(answer.ends_with("\r\n\r\nuntil I close"), "{answer}");
    let answer = exposed.get("GET /", "").await;
    assert!(answer.contains("until I close"), "{answer}");
    let exposed = Exposed::saying("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n").await;
    let answer = exposed.get("HEAD /", "").await;
    assert!(answer.contains("content-length: 1000\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    let long = format!("x-long: {}\r\n", "y".repeat(100_000));
    let answer = exposed.get("GET /", &long).await;
    // A head that is cut off may cost the answer: there was more to come.
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431 "),
        "{answer}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn events_come_as_they_are_said() {
    let (go, went) = tokio::sync::watch::channel(false);
    let port = serve(move |mut stream| {
        let mut went = went.clone();
        async move {
            head(&mut stream).await;
            let begin = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: one\n\n";
            stream.write_all(begin.as_bytes()).await.unwrap();
            went.wait_for(|went| *went).await.unwrap();
            let _ = stream.write_all(b"data: two\n\n").await;
        }
    });
    let exposed = Exposed::on(port.await).await;
    let mut stream = exposed.connect().await;
    let url = &exposed.url;
    let request = format!("GET {url} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut said = Vec::new();
    let one = async {
        while !String::from_utf8_lossy(&said).contains("data: one\n\n") {
            assert!(stream.read_buf(&mut said).await.unwrap() > 0);
        }
    };
    timeout(SOON, one)
        .await
        .expect("the first is not held back");
    go.send_replace(true);
    timeout(SOON, stream.read_to_end(&mut said))
        .await
        .unwrap()
        .unwrap();
    assert!(String::from_utf8_lossy(&said).contains("data: two\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_go_both_ways_at_once() {
    const BYTES: usize = 32 * 1024 * 1024;
    // Says what it hears while it hears it.
    let port = serve(|mut stream| async move {
        let asked = head(&mut stream).await;
        assert!(asked.contains("transfer-encoding: chunked\r\n"), "{asked}");
        assert!(!asked.contains("expect"), "{asked}");
        let begin = "HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(begin.as_bytes()).await.unwrap();
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    });
    let exposed = Exposed::on(port.await).await;
    let (read, mut write) = exposed.connect().await.into_split();
    let url = &exposed.url;
    let head = format!(
        "POST {url} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let sending = async {
        write.write_all(head.as_bytes()).await.unwrap();
        let mut chunk = b"10000\r\n".to_vec();
        chunk.extend(vec![b'x'; 0x10000]);
        chunk.extend(b"\r\n");
        for _ in 0..BYTES / 0x10000 {
            write.write_all(&chunk).await.unwrap();
        }
        write.write_all(b"0\r\n\r\n").await.unwrap();
    };
    let mut read = tokio::io::BufReader::new(read);
    let receiving = async {
        let (mut count, mut buffer) = (0, vec![0; 1 << 16]);
        loop {
            match read.read(&mut buffer).await.unwrap() {
                0 => return count,
                n => count += buffer[..n].iter().filter(|byte| **byte == b'x').count(),
            }
        }
    };
    let both = async { tokio::join!(sending, receiving).1 };
    let count = timeout(3 * SOON, both).await.expect("in time");
    assert!((BYTES..BYTES + 100).contains(&count), "{count}");
}

const UPGRADE: &str =
    "connection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\nsec-websocket-key: k\r\n";

/// Switches, and says what it hears.
async fn switching() -> u32 {
    serve(|mut stream| async move {
        let asked = head(&mut stream).await;
        let wanted = "connection: upgrade\r\nupgrade: websocket\r\n";
        let switches = wanted.lines().all(|line| asked.contains(line));
        assert!(switches && asked.contains("sec-websocket-key: k\r\n"), "{asked}");
        let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: a\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn web_sockets_go_through_until_the_url_is_taken_back() {
    let exposed = Exposed::on(switching().await).await;
    let mut stream = exposed.connect().await;
    let url = &exposed.url;
    // As a browser: it can say the token in the URL only.
    let request = format!("GET {url} HTTP/1.1\r\nhost: a\r\naccept: text/html\r\n{UPGRADE}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let answer = timeout(SOON, head(&mut stream)).await.unwrap();
    is(&answer, 101);
    assert!(answer.contains("sec-websocket-accept: a\r\n"), "{answer}");
    let mut said = [0; 4];
    for _ in 0..3 {
        stream.write_all(b"ping").await.unwrap();
        timeout(SOON, stream.read_exact(&mut said))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(&said, b"ping");
    }
    exposed.unexpose().await;
    let mut rest = Vec::new();
    let cut = timeout(SOON, stream.read_to_end(&mut rest)).await;
    let _ = cut.expect("it is cut");
    assert!(rest.is_empty());
    is(&exposed.get("GET /", "").await, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_visitor_who_leaves_is_not_waited_for() {
    let (left, mut leaves) = tokio::sync::mpsc::channel(1);
    let (asked, mut asks) = tokio::sync::mpsc::channel(1);
    let port = serve(move |mut stream| {
        let (left, asked) = (left.clone(), asked.clone());
        async move {
            head(&mut stream).await;
            let _ = asked.send(()).await;
            // No answer: what ends this is that nobody wants one.
            let _ = stream.read_u8().await;
            let _ = left.send(()).await;
        }
    });
    let exposed = Exposed::on(port.await).await;
    let mut stream = exposed.connect().await;
    let url = &exposed.url;
    let request = format!("GET {url} HTTP/1.1\r\nhost: a\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let asked = timeout(SOON, asks.recv()).await;
    asked.expect("the service is asked");
    drop(stream);
    timeout(SOON, leaves.recv())
        .await
        .expect("the service is told");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted() {
    let exposed = Exposed::saying(HELLO).await;
    is(&exposed.get("GET /", "").await, 200);
    is(&exposed.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await, 404);
    let metrics = ask(
        exposed.server.admin(),
        "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
    )
    .await;
    for result in ["2xx", "refused"] {
        let line = format!("k8e_expose_requests_total{{result=\"{result}\"}} ");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

/// A service with a host name of its own.
async fn with_a_host(scheme: &str) -> Exposed {
    let service = Service::saying(ANSWER).await;
    let server = TestServer::exposing_at(&format!("{scheme}://*.sandboxes.example")).await;
    Exposed::of(server, service).await
}

const ANSWER: &str = "HTTP/1.1 302 Found\r\nlocation: /next\r\ncontent-length: 5\r\n\
    set-cookie: a=b; Domain=sandboxes.example\r\nset-cookie: __Host-k8e_token=x; Path=/; Secure\r\n\r\nhello";

impl Exposed {
    /// A request to a host.
    async fn at(&self, host: &str, path: &str, headers: &str) -> String {
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n");
        self.ask(&request).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_service_has_an_origin_of_its_own_below_a_wildcard() {
    let exposed = with_a_host("https").await;
    let (host, token) = (&exposed.host, &exposed.token);
    let port = exposed.service.port;
    assert_eq!(*host, format!("{port}-s1.sandboxes.example"));
    assert_eq!(exposed.url, format!("/?k8e_token={token}"));

    // A browser gets a cookie that only this origin can set, and goes on without the token.
    let html = "accept: text/html\r\n";
    let sent_on = exposed.at(host, &exposed.url, html).await.to_lowercase();
    assert!(sent_on.starts_with("http/1.1 303 "), "{sent_on}");
    assert!(sent_on.contains(&format!("location: https://{host}/\r\n")));
    let cookie =
        format!("set-cookie: __host-k8e_token={token}; path=/; httponly; samesite=lax; secure\r\n");
    assert!(sent_on.contains(&cookie), "{sent_on}");
    let elsewhere = format!("//evil.example/?k8e_token={token}");
    let sent_on = exposed.at(host, &elsewhere, html).await;
    assert!(sent_on.contains(&format!("location: https://{host}//evil.example/\r\n")));

    // Its paths and cookies are its own, and ours are not passed on.
    let cookie = format!("cookie: __Host-k8e_token={token}; c=d\r\n");
    let answer = exposed.at(host, "/a?b=c", &cookie).await;
    assert!(answer.contains("location: /next\r\n"), "{answer}");
    assert!(answer.contains("set-cookie: a=b; Path=/\r\n"), "{answer}");
    assert!(!answer.contains("k8e_token"), "{answer}");
    let heard = exposed.service.heard();
    assert!(heard.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{heard}");
    assert!(
        heard.contains("cookie: c=d\r\n") && !heard.contains(token),
        "{heard}"
    );
    assert!(!heard.contains("x-forwarded-prefix"), "{heard}");
}

#[tokio::test(flavor = "multi_thread")]
async fn below_a_wildcard_only_the_right_host_and_token_lead_to_a_service() {
    let exposed = with_a_host("https").await;
    let (host, port, token) = (&exposed.host, exposed.service.port, &exposed.token);
    let bearer = format!("authorization: Bearer {token}\r\n");
    let answer = exposed.at(host, "/", &bearer).await;
    assert!(answer.starts_with("HTTP/1.1 302 "), "{answer}");
    // Where each has a host there is no path to another.
    let path = format!("/k8e/expose/s1/{port}/");
    for (host, path, headers) in [
        (host.as_str(), "/", ""),
        ("sandboxes.example", "/", bearer.as_str()),
        ("sandboxes.example", &path, &bearer),
        ("127.0.0.1", &path, &bearer),
        (&format!("{port}-s2.sandboxes.example"), "/", &bearer),
        (&format!("{port}-s1.evil.example"), "/", &bearer),
        (&format!("x.{host}"), "/", &bearer),
        // One that a page of another service can set for all.
        (host, "/", &format!("cookie: k8e_token={token}\r\n")),
    ] {
        let refused = exposed.at(host, path, headers).await;
        assert!(
            refused.starts_with("HTTP/1.1 404 "),
            "{host} {path} {headers}: {refused}"
        );
    }
    let two = format!("host: {host}\r\n{bearer}");
    let refused = exposed.at(host, "/", &two).await;
    assert!(!refused.starts_with("HTTP/1.1 302 "), "{refused}");
}

/// Services below one domain are of one site, so browsers send cookies along with what their pages ask of each other.
#[tokio::test(flavor = "multi_thread")]
async fn below_a_wildcard_pages_of_other_services_have_no_use_of_a_cookie() {
    for (scheme, name) in [("https", "__Host-k8e_token"), ("http", "k8e_token")] {
        let exposed = with_a_host(scheme).await;
        let (host, token) = (&exposed.host, &exposed.token);
        let cookie = format!("cookie: {name}={token}\r\n");
        let own = format!("origin: {scheme}://{host}\r\n");
        for headers in [
            "",
            &own,
            "sec-fetch-site: same-origin\r\n",
            "sec-fetch-site: none\r\n",
            "sec-fetch-site: same-site\r\nsec-fetch-mode: navigate\r\nsec-fetch-dest: document\r\n",
        ] {
            let answer = exposed.at(host, "/", &format!("{cookie}{headers}")).await;
            assert!(answer.starts_with("HTTP/1.1 302 "), "{headers}: {answer}");
        }
        let websocket = "connection: upgrade\r\nupgrade: websocket\r\n";
        for headers in [
            "origin: https://81-s2.sandboxes.example\r\n",
            "origin: null\r\n",
            "sec-fetch-site: same-site\r\nsec-fetch-mode: no-cors\r\nsec-fetch-dest: script\r\n",
            "sec-fetch-site: cross-site\r\nsec-fetch-mode: navigate\r\nsec-fetch-dest: iframe\r\n",
            &format!("{websocket}origin: https://81-s2.sandboxes.example\r\n"),
        ] {
            let refused = exposed.at(host, "/", &format!("{cookie}{headers}")).await;
            assert!(refused.starts_with("HTTP/1.1 404 "), "{headers}: {refused}");
        }
    }
}
