//! Secrets: what a command gets, and where a value is not to be found.

use crate::identity::{cert_dir, key, ran, remote};
use k8e_e2e::Server;
use std::path::Path;

const PLAIN: &str = "hunter2-hunter2-hunter2";

fn set(server: &Server, name: &str, value: &str, flags: &[&str]) {
    let args = [&["secret", "set", name], flags].concat();
    let set = server.k8e_with(&args, value.as_bytes());
    assert_eq!(set.code, 0, "{}", set.all());
}

/// Files below `dir` that have the text in them.
fn found_in(dir: &Path, text: &str) -> Vec<String> {
    let grep = std::process::Command::new("grep")
        .args(["-rlaF", "--exclude=*.img", text])
        .arg(dir)
        .output()
        .unwrap();
    String::from_utf8_lossy(&grep.stdout)
        .lines()
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_command_gets_a_secret_and_nobody_else_does() {
    let mut server = Server::start_with(&["--log", "debug"]);
    set(&server, "github:token", &format!("{PLAIN}\n"), &[]);
    let session = server.session_with(&["--secret", "TOKEN=github:token"]);
    let length = session.sh("printf %s \"$TOKEN\" | wc -c");
    assert_eq!(
        length.out().trim(),
        PLAIN.len().to_string(),
        "{}",
        length.all()
    );
    let right = session.sh(&format!(
        "test \"$TOKEN\" = {}-{}-{}",
        "hunter2", "hunter2", "hunter2"
    ));
    assert_eq!(right.code, 0);
    let by_exec = [
        "sandbox",
        "exec",
        &session.id,
        "--",
        "sh",
        "-c",
        "echo ${#TOKEN}",
    ];
    assert_eq!(server.k8e(&by_exec).json()["stdout"], "23\n");
    assert_ne!(
        server
            .k8e(&["sandbox", "exec", &session.id, "--", "no-such-program"])
            .code,
        0
    );

    let shown = server.k8e(&["sandbox", "get", &session.id]);
    assert_eq!(
        shown.json()["secret_env_vars"],
        serde_json::json!(["TOKEN"])
    );
    for args in [
        &["sandbox", "get", &session.id][..],
        &["sandbox", "events", &session.id],
        &["sandbox", "ps", &session.id],
        &["sandbox", "log", &session.id],
        &["secret", "list"],
        &["audit"],
    ] {
        let ran = server.k8e(args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.all());
        assert!(!ran.all().contains(PLAIN), "{args:?}");
    }
    session.destroy();
    server.stop();
    assert!(!server.log_text().contains(PLAIN));
    assert_eq!(found_in(&server.data_dir(), PLAIN), Vec::<String>::new());
}

#[test]
fn a_secret_changes_with_the_next_command_and_survives_the_server() {
    let mut server = Server::start();
    let id = {
        set(&server, "pw", "one", &[]);
        let session = server.session_with(&["--secret", "PW=pw"]);
        assert_eq!(session.sh("echo $PW").out(), "one\n");
        set(&server, "pw", "two", &[]);
        assert_eq!(session.sh("echo $PW").out(), "two\n");
        session.id.clone()
    };
    server.kill();
    server.restart();
    let run = |server: &Server| server.k8e(&["sandbox", "run", "echo $PW", "--session-id", &id]);
    assert_eq!(run(&server).json()["stdout"], "two\n");
    assert_eq!(server.k8e(&["secret", "delete", "pw"]).code, 0);
    let missing = run(&server);
    assert_eq!(missing.code, 1);
    let missing = missing.json();
    assert_eq!(missing["detail"], "precondition");
    assert!(
        missing["error"]
            .as_str()
            .unwrap()
            .contains("pw:value for variable PW"),
        "{missing}"
    );
    assert_eq!(server.k8e(&["secret", "delete", "pw"]).code, 1);
}

#[test]
fn a_secret_is_its_owners() {
    let server = Server::start_with(&["--listen", "127.0.0.1:0"]);
    let certs = cert_dir(&server);
    let (ann, bob) = (key(&server, "ann", &[]), key(&server, "bob", &[]));
    // Root's own is not theirs.
    set(&server, "pw", "roots", &[]);
    set(&server, "pw", "anns", &["--principal", "ann"]);
    let run = |key: &str| {
        let mut command = remote(&server, certs.path(), key);
        ran(command.args(["sandbox", "run", "echo $PW", "--fresh", "--secret", "PW=pw"]))
    };
    assert_eq!(run(&ann).json()["stdout"], "anns\n");
    let missing = run(&bob);
    assert_eq!(
        missing.json()["detail"],
        "precondition",
        "{}",
        missing.all()
    );
    let listed = ran(remote(&server, certs.path(), &ann).args(["secret", "list"])).json();
    assert_eq!(listed["secrets"].as_array().unwrap().len(), 1);
    assert_eq!(listed["secrets"][0]["owner"], "user:ann");
    let bobs = ran(remote(&server, certs.path(), &bob).args(["secret", "list"])).json();
    assert_eq!(bobs["secrets"].as_array().unwrap().len(), 0);
    let others = ran(remote(&server, certs.path(), &bob).args([
        "secret",
        "delete",
        "pw",
        "--principal",
        "ann",
    ]));
    assert_eq!(others.json()["detail"], "denied");
}

#[test]
fn bad_secrets_are_refused_before_anything_is_sent() {
    let server = Server::start();
    let long = "x".repeat(33 * 1024);
    for (args, value) in [
        (&["secret", "set", "a b"][..], "x"),
        (&["secret", "set", "a:b/c"], "x"),
        (&["secret", "set", "a"], "x\0y"),
        (&["secret", "set", "a"], &long),
        (&["sandbox", "create", "--secret", "A"], ""),
        (
            &["sandbox", "create", "--secret", "A=a", "--secret", "A=b"],
            "",
        ),
        (&["sandbox", "create", "--secret", "A=a:b/c"], ""),
    ] {
        let refused = server.k8e_with(args, value.as_bytes());
        assert_eq!(refused.code, 1, "{args:?}: {}", refused.all());
        assert!(!refused.all().contains(&long));
    }
}
