//! Sessions that live in the sandbox of another, on both runtimes.

use k8e_e2e::{Server, Session};
use std::time::{Duration, Instant};

fn sandbox(server: &Server, words: &[&str]) -> serde_json::Value {
    let ran = server.k8e(&[&["sandbox"], words].concat());
    assert_eq!(ran.code, 0, "{}", ran.all());
    ran.json()
}

fn sub_agent<'a>(server: &'a Server, parent: &str, flags: &[&str]) -> Session<'a> {
    let made = sandbox(server, &[&["subagent", parent], flags].concat());
    assert_eq!(made["parent_session_id"], parent, "{made}");
    let id = made["session_id"].as_str().unwrap().to_owned();
    assert!(id.starts_with(&format!("{parent}-sub-")), "{id}");
    Session { server, id }
}

/// How many processes sleep that long. The pattern does not match who asks.
fn sleepers(session: &Session<'_>, seconds: &str) -> String {
    let pattern = seconds.replace('.', "[.]");
    session.sh(&format!("pgrep -fc '^sleep {pattern}'")).out()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn they_share_a_sandbox_and_nothing_else(runtime: &str) {
    let mut server = Server::start_with(&["--default-runtime", runtime]);
    let parent = server.session_with(&["--env", "GIVEN=yes"]).id;
    let child = {
        let session = Session {
            server: &server,
            id: parent.clone(),
        };
        assert_eq!(session.sh("echo mine > file").code, 0);
        let child = sub_agent(&server, &parent, &["--path", "a/b", "--type", "coder"]);
        // K8E's could not run anything.
        let ran = child.sh("pwd; cat ../../file; echo $K8E_PARENT_SESSION_ID $GIVEN; echo x > own");
        let want = format!("/workspace/a/b\nmine\n{parent} yes\n");
        assert_eq!(ran.out(), want, "{}", ran.all());
        assert_eq!(session.sh("cat a/b/own").out(), "x\n");
        assert_eq!(sandbox(&server, &["get", &child.id])["agent_type"], "coder");
        // Each leaves one process behind, has one in the background and its own history.
        for (id, left, runs) in [(&session, "62.5", "62.25"), (&child, "63.5", "63.25")] {
            let leave = format!("setsid sleep {left} >/dev/null 2>&1 &");
            assert_eq!(id.sh(&leave).code, 0);
            let run = format!("exec sleep {runs}");
            sandbox(
                &server,
                &["run", "--background", "--session-id", &id.id, &run],
            );
            until("they run", || {
                sleepers(id, left) == "1\n" && sleepers(id, runs) == "1\n"
            });
            let listed = sandbox(&server, &["runs", &id.id]);
            assert_eq!(listed["runs"].as_array().unwrap().len(), 1, "{listed}");
        }
        let log = server.k8e(&["sandbox", "log", &parent]).out();
        assert!(!log.contains("/workspace/a/b"), "{log}");
        server.assert_traces(1);
        let deep = server.k8e(&["sandbox", "subagent", &child.id]);
        assert!(deep.out().contains("max depth 1 reached"), "{}", deep.all());
        assert_eq!(deep.json()["detail"], "denied", "{}", deep.all());
        let hosts = server.k8e(&["sandbox", "allow-hosts", "--session-id", &child.id, "none"]);
        assert!(
            hosts.out().contains("shares its network"),
            "{}",
            hosts.all()
        );
        child.id
    };
    server.kill();
    server.restart();
    let (session, child) = (
        Session {
            server: &server,
            id: parent.clone(),
        },
        Session {
            server: &server,
            id: child,
        },
    );
    assert_eq!(child.sh("cat own").out(), "x\n");
    assert_eq!(sleepers(&child, "63.25"), "1\n");

    // What it started ends with it, and nothing else does.
    let id = child.id.clone();
    child.destroy();
    for (seconds, left) in [
        ("63.5", "0\n"),
        ("63.25", "0\n"),
        ("62.5", "1\n"),
        ("62.25", "1\n"),
    ] {
        assert_eq!(sleepers(&session, seconds), left, "sleep {seconds}");
    }
    assert_eq!(session.sh("cat a/b/own").out(), "x\n");
    assert_eq!(sandbox(&server, &["get", &id])["phase"], "ended");
    assert!(
        server
            .k8e(&["sandbox", "log", &id])
            .out()
            .contains("/workspace/a/b")
    );

    // The parent takes the rest along.
    let (one, two) = (
        sub_agent(&server, &parent, &[]),
        sub_agent(&server, &parent, &[]),
    );
    sandbox(&server, &["pause", &parent]);
    let paused = one.sh("true");
    assert!(
        paused
            .all()
            .contains(&format!("session {parent} is paused")),
        "{}",
        paused.all()
    );
    sandbox(&server, &["resume", &parent]);
    assert_eq!(one.sh("echo on").out(), "on\n");
    session.destroy();
    for child in [one, two] {
        let got = sandbox(&server, &["get", &child.id]);
        assert_eq!(got["phase"], "ended", "{got}");
        assert_eq!(got["reason"], format!("its parent {parent} ended"));
    }
    server.assert_traces(0);
}

#[test]
fn they_share_a_sandbox_and_nothing_else_native() {
    they_share_a_sandbox_and_nothing_else("native");
}

#[test]
fn they_share_a_sandbox_and_nothing_else_gvisor() {
    they_share_a_sandbox_and_nothing_else("gvisor");
}
