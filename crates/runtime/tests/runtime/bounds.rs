//! Limits and access control: token, DNS rebinding, size limits, idle timeouts, connection and process limits.

use crate::process::{sh, test};
use crate::support::{Runtime, ask, ask_host, connect, eventually, program, read_answer, until};
use serde_json::json;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use tonic::Code;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

const TOKEN: &str = "a-token-that-nobody-guesses";

#[test]
fn requests_need_the_token_and_commands_do_not_inherit_it() {
    let env = [("SANDBOXD_AUTH_TOKEN", TOKEN)];
    test(&[], &env, async |runtime, mut client| {
        let bearer = format!("Bearer {TOKEN}");
        for (api, path, probe) in [
            (runtime.legacy, "/list/", "/"),
            (runtime.rest, "/v1/files/", "/v1/health"),
        ] {
            let with = |value: &str| ask(api, "GET", path, &[("authorization", value)], b"").status;
            assert_eq!(with(&bearer), 200);
            assert_eq!(with("Bearer wrong"), 401);
            assert_eq!(with(TOKEN), 401);
            assert_eq!(ask(api, "GET", path, &[], b"").status, 401);
            assert_eq!(ask(api, "GET", probe, &[], b"").status, 200);
        }
        let refused = client.execute(sh("true")).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);

        let headers = [
            ("authorization", bearer.as_str()),
            ("content-type", "application/json"),
        ];
        let body = br#"{"command": "env"}"#;
        let own = ask(runtime.legacy, "POST", "/execute", &headers, body);
        assert!(own.text().contains("PATH") && !own.text().contains(TOKEN));
    });
}

#[test]
fn a_command_of_the_same_user_cannot_read_the_token() {
    let env = [("SANDBOXD_AUTH_TOKEN", TOKEN), ("SANDBOX_COLOUR", "blue")];
    // Not as root, which may read the memory of every process.
    let runtime = Runtime::as_nobody(&env);
    let pid = runtime.pid().as_raw_nonzero();
    let command = format!("sh -c 'cat /proc/{pid}/environ; cat /proc/self/environ'");
    let body = json!({"command": command}).to_string();
    let bearer = format!("Bearer {TOKEN}");
    let headers = [
        ("authorization", bearer.as_str()),
        ("content-type", "application/json"),
    ];
    let said = ask(
        runtime.legacy,
        "POST",
        "/execute",
        &headers,
        body.as_bytes(),
    )
    .json();
    let stdout = said["stdout"].as_str().unwrap();
    assert!(
        stdout.contains("SANDBOX_COLOUR=blue") && !stdout.contains(TOKEN),
        "{said}"
    );
    assert!(
        said["stderr"].as_str().unwrap().contains("denied"),
        "{said}"
    );
}

/// Statuses that a request with this Host header gets: reading a file, and running a command.
fn as_rebound_page(runtime: &Runtime, host: &str, headers: &[(&str, &str)]) -> [u16; 2] {
    let file = ask_host(host, runtime.rest, "GET", "/v1/files/f", headers, b"");
    let headers = [headers, &[("content-type", "application/json")]].concat();
    let body = br#"{"command": "true"}"#;
    let run = ask_host(host, runtime.legacy, "POST", "/execute", &headers, body);
    [file.status, run.status]
}

#[test]
fn dns_rebinding_is_refused() {
    let runtime = Runtime::with(&["-allowed-hosts=sandbox.example.com"], &[]);
    assert_eq!(runtime.rest("PUT", "/v1/files/f", b"x").status, 204);
    let evil = "evil.example:8080";
    let same_origin = [("origin", "http://evil.example:8080")];
    assert_eq!(as_rebound_page(&runtime, evil, &same_origin), [403, 403]);
    let said = ask_host(evil, runtime.rest, "GET", "/v1/files/f", &[], b"").json();
    assert_eq!(said["code"], "PERMISSION_DENIED");
    assert!(said["message"].as_str().unwrap().contains("-allowed-hosts"));
    // Probes are served for any name; they disclose nothing.
    let probe = ask_host(evil, runtime.rest, "GET", "/v1/health", &[], b"");
    assert_eq!(probe.status, 200);
    let (rest, legacy) = (runtime.rest.to_string(), runtime.legacy.to_string());
    for host in [
        &*rest,
        &*legacy,
        "localhost:1",
        "10.1.2.3:8080",
        "s.default.svc.cluster.local:8888",
        "sandbox.example.com",
    ] {
        assert_eq!(as_rebound_page(&runtime, host, &[]), [200, 200], "{host}");
    }

    // A web page does not have the token, so with one the name is not checked.
    let runtime = Runtime::with(&[], &[("SANDBOXD_AUTH_TOKEN", TOKEN)]);
    let bearer = format!("Bearer {TOKEN}");
    let shown = [("authorization", bearer.as_str())];
    assert_eq!(as_rebound_page(&runtime, evil, &[]), [401, 401]);
    assert_eq!(as_rebound_page(&runtime, evil, &shown), [404, 200]);
}

#[test]
fn uploads_over_the_limit_are_refused_and_leave_no_file() {
    let runtime = Runtime::with(&["-max-upload-bytes=100000"], &[]);
    let answer = runtime.rest("PUT", "/v1/files/x", &vec![0; 100_001]);
    assert_eq!(
        (answer.status, &answer.json()["code"]),
        (413, &json!("INVALID_ARGUMENT"))
    );
    assert_eq!(std::fs::read_dir(runtime.root()).unwrap().count(), 0);
    assert_eq!(
        runtime.rest("PUT", "/v1/files/x", &vec![0; 100_000]).status,
        204
    );
    let huge = format!("{{\"command\": \"true {}\"}}", "x".repeat(5_000_000));
    assert_eq!(
        runtime.legacy("POST", "/execute", huge.as_bytes()).status,
        413
    );
    let long = format!("/v1/files/{}", "x".repeat(40_000));
    assert_eq!(runtime.rest("GET", &long, b"").status, 431);
    let many: Vec<(String, String)> = (0..100)
        .map(|n| (format!("h{n}"), "x".to_owned()))
        .collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    assert_eq!(
        ask(runtime.rest, "GET", "/v1/health", &many, b"").status,
        431
    );
}

#[test]
fn idle_http_connections_are_closed() {
    let runtime = Runtime::with(&["-http-idle-timeout=500ms"], &[]);
    let mut rest = Vec::new();
    // No bytes, half a head, and no second request.
    for said in ["", "GET / HT", "GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n"] {
        let mut stream = connect(runtime.rest);
        stream.write_all(said.as_bytes()).unwrap();
        let _ = stream.read_to_end(&mut rest);
    }
    let mut stream = connect(runtime.rest);
    let head = b"PUT /v1/files/x HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf";
    stream.write_all(head).unwrap();
    assert_eq!(read_answer(&mut stream).status, 408);
    assert_eq!(std::fs::read_dir(runtime.root()).unwrap().count(), 0);
}

#[test]
fn idle_grpc_connections_are_closed() {
    let flags = ["-http-idle-timeout=500ms"];
    test(&flags, &[], async |runtime, mut client| {
        let call = sh("echo ready; sleep 1.5; echo done");
        let mut call = client.start(call, None).await.unwrap();
        call.says("ready").await;
        // No bytes, and a connection without calls: preface and empty SETTINGS.
        for said in ["", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"] {
            let mut stream = connect(runtime.grpc);
            stream.write_all(said.as_bytes()).unwrap();
            let ended = stream.read_to_end(&mut Vec::new());
            let waits = ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
            assert!(!waits, "still open: {said:?}");
        }
        // A connection with a call in progress is not idle, even without traffic.
        call.says("done").await;
    });
}

#[test]
fn the_number_of_commands_is_limited() {
    test(&["-max-processes=2"], &[], async |runtime, mut client| {
        let mut first = client
            .start(sh("echo ready; sleep 1000"), None)
            .await
            .unwrap();
        let _second = client.start(sh("sleep 1000"), None).await.unwrap();
        first.says("ready").await;
        let refused = client.execute(sh("true")).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        let answer = runtime.legacy("POST", "/execute", br#"{"command": "true"}"#);
        assert_eq!(answer.status, 503, "{answer:?}");
        drop(first);
        eventually("there is room", || {
            runtime
                .legacy("POST", "/execute", br#"{"command": "true"}"#)
                .status
                == 200
        })
        .await;
    });
}

/// One too many from inside the pod is closed at once, and there is room again when another ends.
#[test]
fn connections_from_inside_are_limited() {
    // As many as the server takes from inside.
    const INSIDE_MAX: usize = 192;
    let runtime = Runtime::with(&["-http-idle-timeout=10m"], &[]);
    let mut open: Vec<_> = (0..INSIDE_MAX).map(|_| connect(runtime.rest)).collect();
    // Each is answered, and so is known to be one of those that are counted.
    let served = open.iter_mut().all(health);
    assert!(served, "{INSIDE_MAX} connections fit");
    assert!(
        !health(&mut connect(runtime.rest)),
        "one too many was served"
    );
    open.pop();
    until("there is room", || health(&mut connect(runtime.rest)));
    assert!(open.iter_mut().all(health), "kept");
}

/// From outside, one too many is kept in the kernel's queue until another ends. The addresses are of a
/// network namespace of their own, and no loopback addresses: its server takes them for other machines'.
#[test]
fn many_connections_wait_their_turn_as_root() {
    let mut namespace = Command::new("unshare");
    let script = "ip link set lo up && ip address add 192.0.2.1/32 dev lo && \
                  ip address add 192.0.2.2/32 dev lo && exec python3 -c \"$0\" \"$@\"";
    namespace.args(["--net", "--kill-child", "--fork", "sh", "-c", script]);
    let dir = tempfile::tempdir().unwrap();
    let ended = namespace
        .arg(include_str!("outside.py"))
        .args([program(), dir.path().into()])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "waited its turn\n");
}

/// Whether a request is answered; the connection is kept.
fn health(stream: &mut TcpStream) -> bool {
    let request = b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n";
    let mut begin = [0; 12];
    let asked = stream.write_all(request);
    let is_ok = asked.and_then(|()| stream.read_exact(&mut begin)).is_ok();
    if !is_ok {
        return false;
    }
    assert_eq!(&begin, b"HTTP/1.1 200");
    // The rest of it ends with the body, which is a JSON object.
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() && byte != *b"}" {}
    true
}

#[test]
fn reflection_describes_the_service() {
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let runtime = Runtime::start();
    tokio.block_on(async {
        let channel = tonic::transport::Channel::from_shared(format!("http://{}", runtime.grpc));
        let channel = channel.unwrap().connect().await.unwrap();
        let ask = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::FileContainingSymbol(
                "process.v1.ProcessService".to_owned(),
            )),
        };
        let mut client = ServerReflectionClient::new(channel);
        let asked = futures::stream::iter([ask]);
        let mut told = client
            .server_reflection_info(asked)
            .await
            .unwrap()
            .into_inner();
        let told = format!(
            "{:?}",
            told.message().await.unwrap().unwrap().message_response
        );
        assert!(told.contains("FileDescriptorResponse"), "{told}");
    });
}
