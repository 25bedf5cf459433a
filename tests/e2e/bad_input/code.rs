//! Code that is not there, and far too much of it; output that is no text.

use super::{Api, refused, told};
use k8e_api::client::Client;
use k8e_api::v1;
use k8e_e2e::Server;
use std::time::{Duration, Instant};
use tonic::Code;

const HUNDRED_MB: usize = 100_000_000;

#[test]
fn empty_code() {
    let server = Server::start();
    for code in ["", " ", " \n\t\r\n"] {
        let argument = server.k8e(&["sandbox", "run", code]);
        refused(&argument, &["no code", "argument", "standard input"]);
        let stdin = server.k8e_with(&["sandbox", "run"], code.as_bytes());
        refused(&stdin, &["no code", "argument", "standard input"]);
        let dash = server.k8e_with(&["sandbox", "run", "-"], code.as_bytes());
        refused(&dash, &["no code"]);
    }
    let raw = server.k8e_with(&["sandbox", "run", "--raw"], b"");
    assert_eq!((raw.code, raw.out().as_str()), (1, ""), "{}", raw.all());
    assert!(raw.err().contains("no code"), "{}", raw.all());
    refused(
        &server.k8e(&["sandbox", "exec", "x", "--", ""]),
        &["no command to run"],
    );
    assert!(
        server.session_ids().is_empty(),
        "no session is made for nothing"
    );
    server.assert_traces(0);
}

#[test]
fn code_of_100_mb_on_the_command_line() {
    let server = Server::start();
    let code = vec![b'#'; HUNDRED_MB];
    let start = Instant::now();
    let ran = server.k8e_with(&["sandbox", "run"], &code);
    refused(&ran, &["at most 16777216", "k8e sandbox write"]);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    assert!(
        server.session_ids().is_empty(),
        "it was refused before it was sent"
    );
    // The way out that the message names works.
    let session = server.session();
    let mut script = code;
    script.extend_from_slice(b"\necho done\n");
    let written = server.k8e_with(&["sandbox", "write", &session.id, "big.sh"], &script);
    assert_eq!(written.code, 0, "{}", written.all());
    let ran = session.sh("bash big.sh");
    assert_eq!(ran.out(), "done\n", "{}", ran.err());
}

#[test]
fn code_of_100_mb_over_the_api() {
    let server = Server::start();
    let session = server.session();
    Api::of(&server).call(async |client| {
        // Without the client's own limit.
        let mut stub = (*client).clone().max_encoding_message_size(usize::MAX);
        let run = stub.run(code(&session.id, HUNDRED_MB)).await;
        told(
            run,
            Code::InvalidArgument,
            &["larger than 20971520", "as a file"],
        );
        // It fits into a message, and is still too much.
        let run = stub.run(code(&session.id, 17 << 20)).await;
        told(
            run,
            Code::InvalidArgument,
            &["at most 16777216", "sandbox write"],
        );
        // The same connection goes on.
        assert_eq!(out(client, code(&session.id, 100)).await, "ok\n");
    });
    assert_eq!(session.sh("echo fine").out(), "fine\n");
    server.assert_traces(1);
}

#[test]
fn the_largest_code_runs() {
    let server = Server::start();
    let session = server.session();
    let max = k8e_model::CODE_BYTES_MAX;
    Api::of(&server).call(async |client| {
        assert_eq!(out(client, code(&session.id, max)).await, "ok\n");
    });
}

#[test]
fn output_that_is_not_text() {
    let server = Server::start();
    let session = server.session();
    let json = session.run_json(&[], "printf 'a\\377b'; printf '\\376\\000' >&2");
    assert_eq!(json["stdout"], "a\u{fffd}b", "{json}");
    assert_eq!(json["stdout_base64"], "Yf9i", "{json}");
    assert_eq!(json["stderr_base64"], "/gA=", "{json}");
    let raw = session.sh("printf 'a\\377b\\000'; printf '\\376' >&2");
    assert_eq!(
        (&raw.stdout[..], &raw.stderr[..]),
        (&b"a\xffb\0"[..], &b"\xfe"[..])
    );
    let log = server.k8e(&["sandbox", "log", &session.id]);
    assert_eq!(log.code, 0, "{}", log.all());
    let python = session.py("import sys; sys.stdout.buffer.write(bytes(range(256)) * 4096)");
    assert!(python.stdout == (0..=255u8).cycle().take(256 * 4096).collect::<Vec<_>>());
}

/// A run of bash code of exactly this many bytes.
fn code(
    session: &str,
    bytes: usize,
) -> tokio_stream::Iter<std::array::IntoIter<v1::RunRequest, 1>> {
    let mut text = b"echo ok\n".to_vec();
    text.resize(bytes, b'#');
    let code = v1::Code {
        language: "bash".to_owned(),
        code: text.into(),
    };
    let start = v1::RunStart {
        session_id: session.to_owned(),
        program: Some(v1::run_start::Program::Code(code)),
        ..Default::default()
    };
    let message = Some(v1::run_request::Message::Start(start));
    tokio_stream::iter([v1::RunRequest { message }])
}

async fn out(
    mut client: Client,
    request: tokio_stream::Iter<std::array::IntoIter<v1::RunRequest, 1>>,
) -> String {
    let mut events = client.run(request).await.expect("it runs").into_inner();
    let mut out = Vec::new();
    while let Some(event) = events.message().await.expect("it goes on") {
        if let Some(v1::run_event::Event::Stdout(data)) = event.event {
            out.extend_from_slice(&data);
        }
    }
    String::from_utf8(out).expect("text")
}
