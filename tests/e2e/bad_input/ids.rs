//! Sessions that are not there, and names that no session can have.

use super::{Api, argv, refused, told};
use k8e_api::v1;
use k8e_e2e::Server;
use tonic::Code;

/// Every command that names a session.
const COMMANDS: &[&[&str]] = &[
    &["run", "true", "--session-id"],
    &["get"],
    &["destroy"],
    &["ps"],
    &["events"],
    &["list"],
];

#[test]
fn an_unknown_session() {
    let server = Server::start();
    for command in COMMANDS {
        let ran = server.k8e(&[&["sandbox"], *command, &["nobody"]].concat());
        refused(&ran, &["session nobody not found"]);
        assert_eq!(ran.json()["detail"], "not_found", "{}", ran.all());
    }
    for command in [
        &["exec", "nobody", "--", "true"][..],
        &["read", "nobody", "f"],
        &["stat", "nobody", "f"],
        &["mkdir", "nobody", "f"],
        &["mv", "nobody", "f", "g"],
        &["rm", "nobody", "f"],
    ] {
        let ran = server.k8e(&[&["sandbox"], command].concat());
        refused(&ran, &["session nobody not found"]);
    }
    let written = server.k8e_with(&["sandbox", "write", "nobody", "f"], &[7; 1 << 20]);
    refused(&written, &["session nobody not found"]);
    let raw = server.k8e(&["sandbox", "run", "--raw", "--session-id", "nobody", "true"]);
    assert_eq!(
        (raw.code, raw.out().as_str()),
        (1, ""),
        "raw output is the command's alone: {}",
        raw.all()
    );
    assert!(raw.err().contains("not found"), "{}", raw.all());
    let log = server.k8e(&["sandbox", "log", "nobody"]);
    assert_eq!(log.code, 1, "{}", log.all());
    assert!(log.err().contains("not found"), "{}", log.all());
    assert!(server.session_ids().is_empty());
    server.assert_traces(0);
}

#[test]
fn a_bad_id() {
    let server = Server::start();
    let long = "a".repeat(64);
    let huge = "a".repeat(100_000);
    for id in ["Upper", "../x", "a_b", "-a", "a-", ".", "é", &long, &huge] {
        let args = ["sandbox", "create", &format!("--session-id={id}")];
        refused(&server.k8e(&args), &["session id", "1 to 63 lower-case"]);
        let args = ["sandbox", "run", "true", &format!("--session-id={id}")];
        refused(&server.k8e(&args), &["session id", "1 to 63 lower-case"]);
        for command in ["get", "destroy", "ps", "events", "list"] {
            let ran = server.k8e(&["sandbox", command, "--", id]);
            refused(&ran, &["session id", "1 to 63 lower-case"]);
        }
        let args = ["sandbox", "create", &format!("--tenant={id}")];
        refused(&server.k8e(&args), &["tenant", "1 to 63 lower-case"]);
    }
    server.assert_traces(0);
}

#[test]
fn a_nul_in_an_id() {
    let server = Server::start();
    Api::of(&server).call(async |mut client| {
        let words = &["session id", "\\0", "lower-case"];
        for id in ["a\0b", "\0", "a\0"] {
            let session_id = id.to_owned();
            let request = v1::CreateSessionRequest {
                session_id,
                ..Default::default()
            };
            told(
                client.create_session(request).await,
                Code::InvalidArgument,
                words,
            );
            let session_id = id.to_owned();
            let request = v1::GetSessionRequest { session_id };
            told(
                client.get_session(request).await,
                Code::InvalidArgument,
                words,
            );
            let session_id = id.to_owned();
            let request = v1::DestroySessionRequest { session_id };
            told(
                client.destroy_session(request).await,
                Code::InvalidArgument,
                words,
            );
            let run = client.run(tokio_stream::iter([argv(id, &["true"])])).await;
            told(run, Code::InvalidArgument, words);
        }
        let status = client.get_status(v1::GetStatusRequest {}).await;
        assert_eq!(
            status
                .expect("the server answers")
                .get_ref()
                .sessions_active,
            0
        );
    });
    server.assert_traces(0);
}
