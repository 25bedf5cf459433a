//! Silent connections from one source address: whoever comes from another is not delayed.

use crate::expose::{Exposed, HELLO};
use crate::identity::status;
use crate::server::{SOON, TestServer};
use futures::StreamExt as _;
use k8e_api::v1;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

const SILENT: usize = 3000;

/// Enough for both ends of the silent connections of all tests here.
const DESCRIPTORS: u64 = 20_000;

/// A server that waits for silent connections serves others when their deadline of 10 seconds (5 for metrics) has passed,
/// batch after batch.
const NOT_DELAYED: Duration = Duration::from_secs(8);

fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.map(|limit| limit.max(DESCRIPTORS));
    let raised = Rlimit {
        current: enough(limit.current),
        maximum: enough(limit.maximum),
    };
    setrlimit(Resource::Nofile, raised).unwrap();
}

async fn connect(to: SocketAddr, from: &str) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    // Other tests listen on ports of their choice.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(from.parse().unwrap(), 0))?;
    socket.connect(to).await
}

/// Connections that say nothing.
async fn silent(to: SocketAddr, from: &'static str) -> Vec<TcpStream> {
    raise_descriptor_limit();
    // Where they are not accepted, some wait for ever.
    let connects = (0..SILENT).map(|_| timeout(Duration::from_secs(2), connect(to, from)));
    let connects = futures::stream::iter(connects).buffer_unordered(500);
    let connected: Vec<_> = connects
        .filter_map(|connected| async { connected.ok()?.ok() })
        .collect()
        .await;
    assert!(connected.len() > SILENT / 3, "{}", connected.len());
    connected
}

/// What a server answers to a request from `from`.
async fn ask(to: SocketAddr, from: &str, request: &str) -> String {
    let answer = async {
        let mut stream = connect(to, from).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    };
    let answer = timeout(NOT_DELAYED, answer).await;
    answer.expect("silent connections of another source delay it")
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_do_not_delay_a_certificate_from_another_address() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let _silent = silent(server.tcp().unwrap(), "127.0.0.2").await;
    let calls = async {
        let mut admin = server.remote(Some(&server.admin_dir())).await.unwrap();
        status(&mut admin).await.unwrap();
        status(&mut server.with_key(&key).await).await.unwrap();
    };
    let calls = timeout(NOT_DELAYED, calls).await;
    calls.expect("silent connections of another source delay it");
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_do_not_delay_a_visitor_from_another_address() {
    let exposed = Exposed::saying(HELLO).await;
    let door = exposed.server.expose();
    let _silent = silent(door, "127.0.0.2").await;
    let request = format!(
        "GET {} HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n",
        exposed.url
    );
    let answer = ask(door, "127.0.0.3", &request).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.ends_with("hello"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_do_not_delay_metrics_for_another_address() {
    let server = TestServer::start().await;
    let _silent = silent(server.admin(), "127.0.0.2").await;
    let answer = ask(server.admin(), "127.0.0.3", "GET /metrics HTTP/1.1\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let closed = "k8e_connections_closed_total{listener=\"metrics\"} ";
    assert!(answer.contains(closed), "{answer}");
}

/// Not even those of its own source: it is not one of them any more.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_do_not_end_one_that_has_authenticated() {
    let server = TestServer::start().await;
    let key = server.key("ann").await;
    let mut client = server.with_key(&key).await;
    let sleep = v1::RunStart {
        program: Some(v1::run_start::Program::Argv(v1::Argv {
            args: vec!["sleep".into(), "600".into()],
        })),
        cwd: "/tmp".to_owned(),
        timeout_ms: -1,
        ..Default::default()
    };
    let start = v1::RunRequest {
        message: Some(v1::run_request::Message::Start(sleep)),
    };
    let events = client.run(tokio_stream::iter([start])).await;
    let mut events = events.unwrap().into_inner();
    timeout(SOON, events.message()).await.unwrap().unwrap();
    let _silent = silent(server.tcp().unwrap(), "127.0.0.1").await;
    let ended = timeout(Duration::from_millis(300), events.message()).await;
    assert!(ended.is_err(), "{ended:?}");
    // And a new one has only newer ones to fear.
    let call = async { status(&mut server.with_key(&key).await).await };
    timeout(NOT_DELAYED, call).await.unwrap().unwrap();
}
