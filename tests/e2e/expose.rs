//! Services in real sandboxes, visited by their URL.

use crate::identity::{cert_dir, key, ran, remote};
use k8e_e2e::{Server, Session};
use ring::digest::{SHA256, digest};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Nothing here takes longer, on a machine that runs other tests as well.
const SOON: Duration = Duration::from_secs(60);

const MIB: usize = 1 << 20;

/// Where a service is, and the way there.
struct Exposed {
    url: String,
    /// `host:port` of the door.
    door: String,
    path: String,
    token: String,
}

/// A server whose door for visitors stays where it is after a restart.
fn server(flags: &[&str]) -> Server {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let door = free.local_addr().unwrap().to_string();
    drop(free);
    Server::start_with(&[&["--expose-listen", &door], flags].concat())
}

/// Starts the service of these tests in a session and waits until it listens.
fn start_service(session: &Session<'_>, port: u16) {
    let (server, id) = (session.server, &session.id);
    let write = ["sandbox", "write", id, "service.py"];
    let written = server.k8e_with(&write, include_bytes!("expose.py"));
    assert_eq!(written.code, 0, "{}", written.all());
    let command = format!("exec python3 service.py {port}");
    let run = [
        "sandbox",
        "run",
        "--background",
        "--session-id",
        id,
        &command,
    ];
    let run = server.k8e(&run);
    assert_eq!(run.code, 0, "{}", run.all());
    let wait = format!("until (: < /dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done");
    let listens = session.run(&["--timeout", "60"], &wait);
    assert_eq!(listens.code, 0, "{}", listens.all());
}

fn expose(session: &Session<'_>, port: u16) -> Exposed {
    let args = [
        "sandbox",
        "expose",
        &port.to_string(),
        "--session-id",
        &session.id,
    ];
    let made = session.server.k8e(&args);
    assert_eq!(made.code, 0, "{}", made.all());
    let made = made.json();
    let text = |key: &str| made[key].as_str().unwrap().to_owned();
    assert_eq!(
        (text("session_id"), &made["port"]),
        (session.id.clone(), &port.into())
    );
    let url = text("url");
    let (door, path) = url
        .strip_prefix("http://")
        .unwrap()
        .split_once('/')
        .unwrap();
    Exposed {
        door: door.to_owned(),
        path: format!("/{}", path.split('?').next().unwrap()),
        token: text("token"),
        url: url.clone(),
    }
}

impl Exposed {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.door).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
    }

    /// Sends the head of a request; `what` is method and path below the service's.
    fn begin(&self, what: &str, headers: &str) -> TcpStream {
        let mut stream = self.connect();
        let (method, path) = what.split_once(" /").unwrap();
        let Self {
            path: prefix,
            token,
            ..
        } = self;
        let head = format!(
            "{method} {prefix}{path} HTTP/1.1\r\nHost: door.example\r\nX-K8E-Token: {token}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    fn get(&self, what: &str) -> String {
        rest(self.begin(what, "Connection: close\r\n"))
    }

    /// Without a token, or with another.
    fn status(&self, path: &str) -> u16 {
        let mut stream = self.connect();
        let head = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        status(&rest(stream))
    }
}

fn rest(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn status(answer: &str) -> u16 {
    let code = answer.split(' ').nth(1).unwrap_or_default();
    code.parse()
        .unwrap_or_else(|_| panic!("no answer: {answer:?}"))
}

/// Reads up to that text.
fn until(stream: &mut TcpStream, text: &str) -> String {
    let mut said = String::new();
    let mut buffer = [0; 4096];
    while !said.contains(text) {
        let n = stream.read(&mut buffer).unwrap();
        assert!(n > 0, "it ended without {text:?}: {said}");
        said.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    said
}

#[test]
fn a_native_service_is_visited() {
    visited(&server(&[]));
}

#[test]
fn a_gvisor_service_is_visited() {
    visited(&server(&["--default-runtime", "gvisor"]));
}

fn visited(server: &Server) {
    let session = server.session();
    let nobody = expose(&session, 8000);
    let answer = nobody.get("GET /");
    assert_eq!(status(&answer), 502, "{answer}");
    assert!(
        answer.contains("no process listens on port 8000"),
        "{answer}"
    );

    start_service(&session, 8000);
    let exposed = expose(&session, 8000);
    assert_eq!(exposed.url, nobody.url, "the same every time");
    let answer = exposed.get("GET /a?b=c");
    assert_eq!(status(&answer), 200, "{answer}");
    assert!(answer.contains("('/a?b=c', ["), "{answer}");
    assert!(answer.contains("'door.example')"), "{answer}");
    assert!(!answer.to_lowercase().contains("x-k8e-token"), "{answer}");

    // Who has no token is told nothing.
    let Exposed { path, token, .. } = &exposed;
    let other_port = path.replace("/8000/", "/8001/");
    for wrong in [
        path.clone(),
        format!("{path}?k8e_token={}", "0".repeat(64)),
        format!("{other_port}?k8e_token={token}"),
    ] {
        assert_eq!(exposed.status(&wrong), 404, "{wrong}");
    }
    assert_eq!(exposed.status(&format!("{path}?k8e_token={token}")), 200);

    // What it says is its own path's only.
    let answer = exposed.get("GET /hostile");
    assert!(
        answer.contains(&format!("set-cookie: a=b; Path={path}\r\n")),
        "{answer}"
    );
    assert!(!answer.contains("clear-site-data"), "{answer}");

    events(&session, &exposed);
    web_socket(&exposed);
    large(&exposed);
    taken_back(&session, &exposed);
}

fn events(session: &Session<'_>, exposed: &Exposed) {
    let mut stream = exposed.begin("GET /events", "Connection: close\r\n");
    for n in 0..3 {
        until(&mut stream, &format!("data: {n}\n\n"));
        let seen = session.sh(&format!("touch /tmp/seen-{n}"));
        assert_eq!(seen.code, 0, "{}", seen.all());
    }
}

fn web_socket(exposed: &Exposed) {
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let mut stream = exposed.begin("GET /ws", upgrade);
    let head = until(&mut stream, "\r\n\r\n");
    assert_eq!(status(&head), 101, "{head}");
    let accept = "sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n";
    assert!(head.contains(accept), "{head}");
    for word in ["ping", "pong"] {
        stream.write_all(word.as_bytes()).unwrap();
        until(&mut stream, word);
    }
}

fn large(exposed: &Exposed) {
    const UP: usize = 100 * MIB;
    let data: Vec<u8> = (0..251).cycle().take(UP).collect();
    let length = format!("Content-Length: {UP}\r\nConnection: close\r\n");
    let mut stream = exposed.begin("POST /up", &length);
    stream.write_all(&data).unwrap();
    let answer = rest(stream);
    let sum = digest(&SHA256, &data);
    let sum: String = sum
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert!(answer.ends_with(&format!("{UP} {sum}")), "{answer}");
    let answer = exposed.get(&format!("GET /down/{UP}"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!((status(head), body.len()), (200, UP), "{head}");
}

fn taken_back(session: &Session<'_>, exposed: &Exposed) {
    let (server, id) = (session.server, &session.id);
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n";
    let mut open = exposed.begin("GET /ws", upgrade);
    until(&mut open, "\r\n\r\n");
    let listed = server
        .k8e(&["sandbox", "exposed", "--session-id", id])
        .json();
    assert_eq!(
        listed["services"][0]["url"],
        exposed.url.as_str(),
        "{listed}"
    );
    let unexpose = ["sandbox", "unexpose", "8000", "--session-id", id];
    assert_eq!(server.k8e(&unexpose).json()["ok"], true);
    // At once, for who is there and for who comes.
    let begun = Instant::now();
    assert_eq!(rest(open), "");
    assert!(begun.elapsed() < SOON);
    assert_eq!(status(&exposed.get("GET /")), 404);
    assert_eq!(server.k8e(&unexpose).json()["ok"], false);
    let listed = server
        .k8e(&["sandbox", "exposed", "--session-id", id])
        .json();
    assert_eq!(listed["services"], serde_json::json!([]));
    let events = server.k8e(&["sandbox", "events", id]).out();
    assert!(events.contains("service_exposed") && events.contains("service_unexposed"));
    assert!(!events.contains(&exposed.token) && !server.log_text().contains(&exposed.token));
}

#[test]
fn a_url_outlives_kill_9_and_ends_with_its_session() {
    let mut server = server(&[]);
    let id = {
        let session = server.session_with(&["--tenant", "web", "--idle-timeout", "never"]);
        start_service(&session, 8000);
        session.id
    };
    let exposed = expose(
        &Session {
            server: &server,
            id: id.clone(),
        },
        8000,
    );
    assert_eq!(status(&exposed.get("GET /")), 200);
    server.kill();
    server.restart();
    assert_eq!(status(&exposed.get("GET /")), 200);
    let listed = server.k8e(&["sandbox", "exposed", "--session-id", &id]);
    assert_eq!(listed.code, 0, "{}", listed.all());
    assert_eq!(listed.json()["services"][0]["url"], exposed.url.as_str());
    let database = std::fs::read(server.data_dir().join("store/k8e.db")).unwrap();
    let token: Vec<u8> = (0..64)
        .step_by(2)
        .map(|at| u8::from_str_radix(&exposed.token[at..at + 2], 16).unwrap())
        .collect();
    let has = |part: &[u8]| database.windows(part.len()).any(|window| window == part);
    assert!(!has(exposed.token.as_bytes()) && !has(&token));
    Session {
        server: &server,
        id,
    }
    .destroy();
    assert_eq!(status(&exposed.get("GET /")), 404);
}

#[test]
fn only_owners_expose_and_only_where_there_is_a_door() {
    let server = server(&["--listen", "127.0.0.1:0"]);
    let session = server.session();
    let certs = cert_dir(&server);
    let bob = key(&server, "bob", &[]);
    let id = session.id.as_str();
    for args in [&["expose", "80"][..], &["unexpose", "80"], &["exposed"]] {
        let args = [&["sandbox"], args, &["--session-id", id]].concat();
        let theirs = ran(remote(&server, certs.path(), &bob).args(&args));
        assert_eq!(theirs.code, 1, "{}", theirs.all());
        assert!(theirs.all().contains("not found"), "{}", theirs.all());
    }
    for wrong in [&["expose", "0"][..], &["expose", "65536"], &["expose"]] {
        let args = [&["sandbox"], wrong, &["--session-id", id]].concat();
        assert_ne!(server.k8e(&args).code, 0, "{wrong:?}");
    }
    let outside = [
        "sandbox",
        "expose",
        "80",
        "--host",
        "192.0.2.1",
        "--session-id",
        id,
    ];
    let refused = server.k8e(&outside);
    assert!(refused.all().contains("loopback"), "{}", refused.all());

    let closed = Server::start();
    let session = closed.session();
    let refused = closed.k8e(&["sandbox", "expose", "80", "--session-id", &session.id]);
    assert_eq!(refused.code, 1, "{}", refused.all());
    assert!(
        refused.all().contains("--expose-listen"),
        "{}",
        refused.all()
    );
}

/// A session of `create` is used only by name, as with `run`.
#[test]
fn without_a_session_id_the_session_of_run_is_used() {
    let server = server(&[]);
    let created = server.session().id;
    let commands = [&["expose", "8000"][..], &["exposed"], &["unexpose", "8000"]];
    for args in commands {
        let refused = server.k8e(&[&["sandbox"], args].concat());
        assert_eq!(refused.code, 1, "{args:?}: {}", refused.all());
        assert_eq!(refused.json()["detail"], "not_found", "{}", refused.all());
        assert_eq!(
            refused.json()["error"],
            "no session is named, and `k8e sandbox run` has none yet: name the session of the service with --session-id \
             (`k8e sandbox sessions` lists them), or start the service with `k8e sandbox run --background`"
        );
    }
    let ran = server.k8e(&["sandbox", "run", "true"]).json();
    // Newer ones, with other options or of another tenant.
    server.session();
    server.k8e(&["sandbox", "run", "--memory", "256MiB", "true"]);
    server.k8e(&["sandbox", "run", "--tenant", "web", "true"]);
    for args in commands {
        let done = server.k8e(&[&["sandbox"], args].concat());
        assert_eq!(done.code, 0, "{args:?}: {}", done.all());
        assert_eq!(
            done.json()["session_id"],
            ran["session_id"],
            "{}",
            done.all()
        );
    }
    assert_ne!(ran["session_id"], *created);
    let web = server
        .k8e(&["sandbox", "exposed", "--tenant", "web"])
        .json();
    let status = server.k8e(&["sandbox", "status", "--tenant", "web"]).json();
    assert_eq!(web["session_id"], status["session_id"]);
    assert_ne!(web["session_id"], ran["session_id"]);
}
