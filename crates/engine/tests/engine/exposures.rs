//! Exposed services.

use super::*;
use bytes::Bytes;
use k8e_engine::{ExposeBase, ExposedService, OpenPort, PortConnection};
use k8e_model::{Lifetime, Port, ServiceToken};
use k8e_testkit::{Script, Step};
use k8e_wire::proto::{Connected, Done, End, reply, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const BASE: &str = "https://preview.example.com";

impl Server {
    async fn with_door() -> Self {
        let server = Self::start().await;
        server
            .sessions
            .serve_exposed_at(ExposeBase::Path(BASE.to_owned()));
        server
    }

    async fn expose(&self, id: &str, port: Port) -> Result<ExposedService, Error> {
        let host = "".parse().unwrap();
        self.sessions.expose(&me(), &sid(id), port, host).await
    }

    fn open(&self, exposed: &ExposedService) -> Option<OpenPort> {
        let exposure = &exposed.exposure;
        let tokens = [ServiceToken::random(), exposure.token.clone()];
        self.sessions
            .open_port(&exposure.session, exposure.port, &tokens)
    }

    async fn exposed(&self, id: &str) -> Vec<ExposedService> {
        self.sessions.exposed(&me(), &sid(id)).await.unwrap()
    }
}

fn port(number: i64) -> Port {
    Port::new(number).unwrap()
}

/// Starts an echo server; returns its port.
async fn echo() -> Port {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let number = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    port(number.into())
}

/// Waits until a connection is cut.
async fn cut(connection: &mut PortConnection) -> std::io::Error {
    let mut byte = [0];
    let cut = tokio::time::timeout(PATIENCE, connection.read(&mut byte)).await;
    cut.expect("in time").unwrap_err()
}

#[tokio::test]
async fn a_service_is_exposed_visited_and_unexposed() {
    let server = Server::with_door().await;
    server.create("a").await;
    let port = echo().await;
    let exposed = server.expose("a", port).await.unwrap();
    let token = exposed.exposure.token.reveal();
    let url = format!("{BASE}/k8e/expose/a/{port}/?k8e_token={token}");
    assert_eq!(exposed.url, url);
    assert!(!format!("{exposed:?}").contains(&token));
    assert_eq!(server.expose("a", port).await.unwrap(), exposed);
    assert_eq!(server.exposed("a").await, std::slice::from_ref(&exposed));

    let open = server.open(&exposed).unwrap();
    let mut connection = open.connect().await.unwrap();
    connection.write_all(b"hello").await.unwrap();
    connection.shutdown().await.unwrap();
    let mut said = String::new();
    connection.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "hello");

    let mut connection = open.connect().await.unwrap();
    let taken = server.sessions.unexpose(&me(), &sid("a"), port).await;
    assert!(taken.unwrap());
    cut(&mut connection).await;
    assert!(server.open(&exposed).is_none());
    let again = server.sessions.unexpose(&me(), &sid("a"), port).await;
    assert!(!again.unwrap());
    assert!(server.exposed("a").await.is_empty());
    // Exposing it again gives it another URL.
    let later = server.expose("a", port).await.unwrap();
    assert_ne!(later.url, exposed.url);
    let kinds = server.kinds("a").await;
    assert!(kinds.contains(&"service_exposed".to_owned()), "{kinds:?}");
    assert!(kinds.contains(&"service_unexposed".to_owned()), "{kinds:?}");
}

#[tokio::test]
async fn large_transfers_are_relayed_unchanged() {
    const BYTES: usize = 16 * 1024 * 1024;
    let server = Server::with_door().await;
    server.create("a").await;
    let exposed = server.expose("a", echo().await).await.unwrap();
    let connection = server.open(&exposed).unwrap().connect().await.unwrap();
    let (mut read, mut write) = tokio::io::split(connection);
    let data: Vec<u8> = (0..251).cycle().take(BYTES).collect();
    let sending = async {
        write.write_all(&data).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut got = Vec::new();
    let (_, read) = tokio::join!(sending, read.read_to_end(&mut got));
    assert_eq!(read.unwrap(), BYTES);
    assert!(got == data);
}

#[tokio::test]
async fn only_the_token_authorizes_and_only_owners_expose() {
    let server = Server::with_door().await;
    server.create("a").await;
    let exposed = server.expose("a", port(8080)).await.unwrap();
    let sessions = &server.sessions;
    let right = [exposed.exposure.token.clone()];
    let open = |id: &str, number, tokens: &[ServiceToken]| {
        sessions.open_port(&sid(id), port(number), tokens).is_some()
    };
    assert!(open("a", 8080, &right));
    assert!(!open("a", 8080, &[]));
    assert!(!open("a", 8080, &[ServiceToken::random()]));
    assert!(!open("a", 8081, &right));
    assert!(!open("b", 8080, &right));
    assert!(!open("b", 8080, &[ServiceToken::NOBODYS]));

    let host = || "".parse().unwrap();
    let theirs = sessions.expose(&other(), &sid("a"), port(1), host()).await;
    refused(theirs, Code::NotFound, "session a not found");
    let theirs = sessions.unexpose(&other(), &sid("a"), port(8080)).await;
    refused(theirs, Code::NotFound, "session a not found");
    let theirs = sessions.exposed(&other(), &sid("a")).await;
    refused(theirs, Code::NotFound, "session a not found");
    assert_eq!(server.exposed("a").await.len(), 1);
}

#[tokio::test]
async fn a_url_outlives_the_server_and_not_its_session() {
    let server = Server::with_door().await;
    server.create("a").await;
    server.create("b").await;
    let port = echo().await;
    let exposed = server.expose("a", port).await.unwrap();
    server.expose("b", port).await.unwrap();
    let gone = server.expose("a", self::port(7)).await.unwrap();
    let sessions = &server.sessions;
    let taken = sessions.unexpose(&me(), &sid("a"), self::port(7)).await;
    assert!(taken.unwrap());

    let server = server.restart().await;
    server
        .sessions
        .serve_exposed_at(ExposeBase::Path(BASE.to_owned()));
    assert_eq!(server.exposed("a").await, std::slice::from_ref(&exposed));
    assert!(server.open(&gone).is_none());
    let mut connection = server.open(&exposed).unwrap().connect().await.unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    cut(&mut connection).await;
    assert!(server.open(&exposed).is_none());

    // Nor does it open the next session of that id, now or after a restart.
    server.create("a").await;
    assert!(server.open(&exposed).is_none());
    let server = server.restart().await;
    assert!(server.exposed("a").await.is_empty());
    assert_eq!(server.exposed("b").await.len(), 1);
}

#[tokio::test]
async fn a_lost_key_costs_urls_and_nothing_else() {
    let server = Server::with_door().await;
    server.create("a").await;
    server.expose("a", port(8080)).await.unwrap();
    server.sessions.shutdown().await;
    let Server {
        dir,
        driver,
        store,
        config,
        ..
    } = server;
    store.close().await;
    std::fs::remove_file(dir.path().join("secrets.key")).unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let sessions = Sessions::start(config, store, drivers(&driver)).await;
    let sessions = sessions.unwrap();
    sessions.serve_exposed_at(ExposeBase::Path(BASE.to_owned()));
    assert!(sessions.exposed(&me(), &sid("a")).await.unwrap().is_empty());
    let host = "".parse().unwrap();
    let again = sessions.expose(&me(), &sid("a"), port(8080), host).await;
    again.unwrap();
}

#[tokio::test]
async fn with_a_domain_each_service_has_a_host_name() {
    let server = Server::start().await;
    server.sessions.serve_exposed_at(ExposeBase::Host {
        scheme: "https",
        domain: "sandboxes.example:8443".to_owned(),
    });
    server.create("a").await;
    let exposed = server.expose("a", port(80)).await.unwrap();
    let token = exposed.exposure.token.reveal();
    let url = format!("https://80-a.sandboxes.example:8443/?k8e_token={token}");
    assert_eq!(exposed.url, url);
    let long = "a".repeat(63);
    server.create(&long).await;
    let refusal = server.expose(&long, port(80)).await;
    refused(refusal, Code::Invalid, "at most 57 characters");
}

#[tokio::test]
async fn services_and_connections_are_limited() {
    let server = Server::start().await;
    server.create("a").await;
    let without = server.expose("a", port(80)).await;
    refused(without, Code::Precondition, "--expose-listen");
    server
        .sessions
        .serve_exposed_at(ExposeBase::Path(BASE.to_owned()));
    for number in 1..=32 {
        server.expose("a", port(number)).await.unwrap();
    }
    let more = server.expose("a", port(33)).await;
    refused(more, Code::Exhausted, "32 exposed services");
    // Exposing an exposed one does not count again.
    server.expose("a", port(32)).await.unwrap();
    let host = "::1".parse().unwrap();
    let sessions = &server.sessions;
    let moved = sessions.expose(&me(), &sid("a"), port(32), host).await;
    let moved = moved.unwrap();
    assert_eq!(moved.exposure.host.as_str(), "::1");
    assert_eq!(server.exposed("a").await.len(), 32);

    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let number = unused.local_addr().unwrap().port();
    drop(unused);
    server.create("b").await;
    let exposed = server.expose("b", port(number.into())).await.unwrap();
    let nobody = server.open(&exposed).unwrap().connect().await;
    refused(nobody, Code::Precondition, "no process listens on port");
    let exposed = server.expose("b", echo().await).await.unwrap();
    let open = server.open(&exposed).unwrap();
    let mut connections = Vec::new();
    for _ in 0..64 {
        connections.push(open.connect().await.unwrap());
    }
    refused(open.connect().await, Code::Exhausted, "64 connections");
    connections.clear();
    let again = async {
        while open.connect().await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let again = tokio::time::timeout(PATIENCE, again).await;
    again.expect("room is made");
}

#[tokio::test]
async fn a_connection_holds_off_idle_expiry() {
    let server = Server::with_door().await;
    let lifetime = Lifetime {
        ttl: None,
        // Long enough to connect before, on a busy machine.
        idle: Some(Duration::from_secs(2)),
    };
    let idle = SessionSpec {
        lifetime: lifetime.into(),
        ..spec("a")
    };
    server.sessions.create(&me(), idle).await.unwrap();
    let exposed = server.expose("a", echo().await).await.unwrap();
    let mut connection = server.open(&exposed).unwrap().connect().await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    connection.write_all(b"x").await.unwrap();
    let mut byte = [0];
    connection.read_exact(&mut byte).await.unwrap();
    drop(connection);
    server.ended("a").await;
}

#[tokio::test]
async fn a_guest_that_lies_breaks_its_own_connection() {
    let connected = Step::Reply(reply::Reply::Connected(Connected {}));
    let data = |bytes: &'static [u8]| reply::Reply::Data(Bytes::from_static(bytes));
    let end = Step::Reply(reply::Reply::End(End {}));
    let lies = [
        vec![Step::Reply(reply::Reply::Done(Done::default()))],
        vec![Step::Reply(data(b"early"))],
        vec![],
        vec![connected.clone()],
        vec![connected.clone(), Step::Flood(data(b""))],
        vec![
            connected.clone(),
            Step::Reply(reply::Reply::Done(Done::default())),
        ],
        vec![connected.clone(), end.clone(), Step::Reply(data(b"late"))],
        vec![connected.clone(), end.clone(), end],
        vec![connected, Step::Raw(vec![0xff; 64])],
    ];
    for lie in lies {
        let said = lie.clone();
        let script: Script = Arc::new(move |call| match call {
            request::Call::Forward(_) => Some(said.clone()),
            _ => None,
        });
        let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
        server
            .sessions
            .serve_exposed_at(ExposeBase::Path(BASE.to_owned()));
        server.create("a").await;
        let exposed = server.expose("a", port(80)).await.unwrap();
        let visit = async {
            let mut connection = server.open(&exposed).unwrap().connect().await.ok()?;
            let mut got = Vec::new();
            let _ = connection.read_to_end(&mut got).await;
            Some(got)
        };
        let got = tokio::time::timeout(PATIENCE, visit)
            .await
            .expect("in time");
        assert!(got.is_none_or(|got| got.is_empty()), "{lie:?}");
    }
}
