//! The commands about what a session may reach. That it is so is tested elsewhere.

use k8e_e2e::{Ran, Server};
use std::process::Stdio;

/// `allow-hosts` of a session.
fn allow(server: &Server, id: &str, args: &[&str]) -> Ran {
    let start = ["sandbox", "allow-hosts", "--session-id", id];
    server.k8e(&[&start, args].concat())
}

#[test]
fn a_list_is_asked_for_changed_and_survives_a_crash() {
    let mut server = Server::start();
    let made = server.k8e(&[
        "sandbox",
        "create",
        "--allowed-hosts",
        "Example.com,*.b.example:22",
    ]);
    let made = made.json();
    let id = made["session_id"].as_str().unwrap();
    let hosts = |server: &Server| {
        let shown = server.k8e(&["sandbox", "get", id]).json();
        shown["allowed_hosts"].to_string()
    };
    let asked = r#"["example.com","*.b.example:22"]"#;
    assert_eq!(made["allowed_hosts"].to_string(), asked);
    assert_eq!(hosts(&server), asked);
    let listed = server.k8e(&["sandbox", "sessions"]).json();
    assert_eq!(listed["sessions"][0]["allowed_hosts"].to_string(), asked);

    for (args, want) in [
        (&["a.example,b.example"][..], r#"["a.example","b.example"]"#),
        (
            &["--add", "c.example", "--remove", "A.example"],
            r#"["b.example","c.example"]"#,
        ),
        (&[], r#"["b.example","c.example"]"#),
        (
            &["--hosts", "d.example", "e.example", "--add", "f.example"],
            r#"["d.example"]"#,
        ),
        (&["--clear", "d.example"], r#"["none"]"#),
        (&["--add", "10.0.0.0/8:5432"], r#"["10.0.0.0/8:5432"]"#),
    ] {
        let changed = allow(&server, id, args);
        assert_eq!(changed.code, 0, "{args:?}: {}", changed.all());
        assert_eq!(
            changed.json()["allowed_hosts"].to_string(),
            want,
            "{args:?}"
        );
        assert_eq!(changed.json()["session_id"], id);
        assert_eq!(hosts(&server), want, "{args:?}");
    }
    server.kill();
    server.restart();
    assert_eq!(hosts(&server), r#"["10.0.0.0/8:5432"]"#);
}

#[test]
fn all_is_warned_about_and_nonsense_is_refused() {
    let server = Server::start();
    let session = server.session_with(&["--allowed-hosts", "none"]);
    let all = allow(&server, &session.id, &["all"]);
    assert_eq!(
        (all.code, &all.json()["allowed_hosts"][0]),
        (0, &"all".into())
    );
    assert!(all.all().contains("warning"), "{}", all.all());
    for args in [
        &["https://a.example"][..],
        &["--add", "none"],
        &["--add", "a.example"],
    ] {
        let refused = allow(&server, &session.id, args);
        assert_eq!(refused.code, 1, "{args:?}: {}", refused.all());
        assert_eq!(refused.json()["detail"], "invalid", "{args:?}");
    }
    let nobody = allow(&server, "nobody", &["a.example"]);
    assert_eq!(
        (nobody.code, &nobody.json()["detail"]),
        (1, &"not_found".into())
    );
    let unnamed = server.k8e(&["sandbox", "allow-hosts", "a.example"]);
    assert_eq!(unnamed.code, 1);
    let both = [
        "sandbox",
        "run",
        "true",
        "--session-id",
        &session.id,
        "--allowed-hosts",
        "none",
    ];
    assert_eq!(server.k8e(&both).code, 1);
}

#[test]
fn a_session_that_names_none_gets_the_servers() {
    let server = Server::start_with(&["--allowed-hosts", "a.example", "--allowed-hosts", "@npm"]);
    let session = server.session();
    let shown = server.k8e(&["sandbox", "get", &session.id]).json();
    assert_eq!(shown["allowed_hosts"][0], "a.example");
    assert!(shown["allowed_hosts"].as_array().unwrap().len() > 1);
    let status = server.k8e(&["sandbox", "status"]).json();
    assert!(status["network"].as_str().unwrap().contains("a.example"));
}

#[test]
fn flows_are_json_when_nobody_looks() {
    let server = Server::start();
    let session = server.session();
    let shown = server.k8e(&["sandbox", "egress", &session.id, "--denied"]);
    assert_eq!(shown.code, 0, "{}", shown.all());
    assert_eq!(shown.json()["session_id"], session.id.as_str());
    assert!(shown.json()["flows"].is_array());

    let mut follows = server
        .command(&["sandbox", "egress", &session.id, "--follow"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(follows.try_wait().unwrap().is_none(), "it goes on");
    server.k8e(&["sandbox", "destroy", &session.id]);
    assert_eq!(follows.wait().unwrap().code(), Some(0));
}
