//! `k8e doctor`: problems have a fix, and it finds them from both sides. `k8e e2b env`: what E2B's clients need.

use k8e_e2e::{Ran, Server, binary, install, passable_tempdir};
use serde_json::Value;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

fn k8e(args: &[&str], home: &std::path::Path) -> Command {
    let mut command = Command::new(binary());
    command.args(args).env("HOME", home).stdin(Stdio::null());
    for name in [
        "K8E_SANDBOX_ENDPOINT",
        "K8E_NO_AUTOSTART",
        "CLAUDE_CONFIG_DIR",
        "CODEX_HOME",
    ] {
        command.env_remove(name);
    }
    command
}

fn ran(command: &mut Command) -> Ran {
    crate::identity::ran(command)
}

fn named<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

#[test]
fn everything_is_fine_or_it_says_what_is_not() {
    let server = Server::start();
    let home = tempfile::tempdir().unwrap();
    let data = server.data_dir();
    let data = data.to_str().unwrap();
    let fine = ran(&mut k8e(
        &["doctor", "--json", "--data-dir", data],
        home.path(),
    ));
    let report = fine.json();
    assert_eq!(fine.code, 0, "{report:#}");
    assert_eq!(
        (&report["ok"], &report["problems"]),
        (&true.into(), &0.into())
    );
    for name in [
        "endpoint",
        "connection",
        "version",
        "runtimes",
        "sessions",
        "machine",
    ] {
        assert_eq!(named(&report, name)["ok"], true, "{report:#}");
        assert!(named(&report, name)["fix"].is_null(), "{report:#}");
    }
    let text = ran(&mut k8e(&["doctor", "--data-dir", data], home.path()));
    assert_eq!(text.code, 0, "{}", text.all());
    assert!(
        text.out().ends_with("\nno problem was found\n"),
        "{}",
        text.all()
    );

    // A skill of another version.
    let skill = home.path().join(".claude/skills/k8e-sandbox");
    std::fs::create_dir_all(&skill).unwrap();
    std::fs::write(
        skill.join("SKILL.md"),
        "---\nmetadata:\n  generator: k8e 0.0.1\n---\n",
    )
    .unwrap();
    let stale = ran(&mut k8e(
        &["doctor", "--json", "--data-dir", data],
        home.path(),
    ));
    assert_eq!(stale.code, 1, "{}", stale.all());
    assert_eq!(
        named(&stale.json(), "skills")["fix"],
        "`k8e skill install claude`"
    );
}

#[test]
fn a_server_that_cannot_be_reached_is_a_problem_with_a_fix() {
    let home = passable_tempdir("k8e-doctor-");
    let data = home.path().join("data");
    let data = data.to_str().unwrap();
    // Root would start one: no problem, and none is started.
    let root = ran(&mut k8e(
        &["doctor", "--json", "--data-dir", data],
        home.path(),
    ));
    assert_eq!(root.code, 0, "{}", root.all());
    let detail = named(&root.json(), "connection")["detail"].to_string();
    assert!(detail.contains("starts one"), "{detail}");
    assert!(!std::path::Path::new(data).join("k8e.sock").exists());

    let copy = home.path().join("k8e");
    install(&binary(), &copy);
    let real = k8e(&["doctor", "--json", "--data-dir", data], home.path());
    let mut other = Command::new(&copy);
    other.args(real.get_args()).env("HOME", home.path());
    other
        .env_remove("K8E_SANDBOX_ENDPOINT")
        .stdin(Stdio::null());
    let nobody = ran(other.uid(65534).gid(65534));
    assert_eq!(nobody.code, 1, "{}", nobody.all());
    let report = nobody.json();
    assert!(
        named(&report, "connection")["fix"]
            .to_string()
            .contains("sudo k8e server"),
        "{report:#}"
    );
    assert!(
        named(&report, "machine")["detail"]
            .to_string()
            .contains("sudo k8e doctor"),
        "{report:#}"
    );

    // A server that runs, and is not for everybody.
    let server = Server::start();
    let running = server.data_dir();
    let mut other = Command::new(&copy);
    other.args(["doctor", "--json", "--data-dir"]).arg(&running);
    other
        .env("HOME", home.path())
        .env_remove("K8E_SANDBOX_ENDPOINT");
    let nobody = ran(other.stdin(Stdio::null()).uid(65534).gid(65534));
    let report = nobody.json();
    assert_eq!(nobody.code, 1, "{report:#}");
    assert!(
        named(&report, "connection")["fix"]
            .to_string()
            .contains("usermod -aG k8e"),
        "{report:#}"
    );

    for (endpoint, name, word) in [
        ("not an endpoint", "endpoint", "K8E_SANDBOX_ENDPOINT"),
        ("127.0.0.1:1", "connection", "k8e login"),
        (
            "unix:///no-such-directory/k8e.sock",
            "connection",
            "--endpoint",
        ),
    ] {
        let ran = ran(&mut k8e(
            &["doctor", "--json", "--endpoint", endpoint],
            home.path(),
        ));
        let report = ran.json();
        assert_eq!(ran.code, 1, "{report:#}");
        assert_eq!(named(&report, name)["ok"], false, "{report:#}");
        assert!(
            named(&report, name)["fix"].to_string().contains(word),
            "{report:#}"
        );
    }
    let text = ran(&mut k8e(
        &["doctor", "--endpoint", "127.0.0.1:1"],
        home.path(),
    ));
    assert_eq!(text.code, 1, "{}", text.all());
    assert!(
        text.out().contains("1 problem: do what its → says"),
        "{}",
        text.all()
    );
}

#[test]
fn the_environment_of_e2b_clients_can_be_evaluated() {
    let server = Server::start_with(&["--e2b-listen", "127.0.0.1:0"]);
    let log = server.log_text();
    let at = log.find("E2B API: http://").expect("the log says where");
    let url = log[at..].trim_start_matches("E2B API: ");
    let url = url.split_whitespace().next().unwrap().to_owned();
    let made = server.k8e(&["e2b", "env", "--new-key", "me", "--url", &format!("{url}/")]);
    assert_eq!((made.code, made.err().as_str()), (0, ""), "{}", made.all());
    // Evaluated by a shell it reaches the server, with a key that is valid.
    let script = format!(
        "{}\ntest \"$E2B_API_URL\" = '{url}' && test \"$E2B_SANDBOX_URL\" = '{url}' && \
         curl -sS -o /dev/null -w '%{{http_code}}' -H \"X-API-Key: $E2B_API_KEY\" \"$E2B_API_URL/v2/sandboxes\"",
        made.out()
    );
    let curl = ran(Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::null()));
    assert_eq!(curl.out(), "200", "{}", curl.all());

    let key = format!("k8e_{}", "0a".repeat(32));
    let json = server.k8e(&["e2b", "env", "--key", &key, "--shell", "json"]);
    assert_eq!(json.code, 0, "{}", json.all());
    assert_eq!(json.json()["E2B_API_KEY"], key.replace("k8e_", "e2b_"));
    for (args, word) in [
        (&["e2b", "env"][..], "--new-key NAME"),
        (&["e2b", "env", "--key", "short"], "no API key"),
        (
            &["e2b", "env", "--key", &key, "--url", "nowhere"],
            "http://127.0.0.1:3676",
        ),
        (&["e2b", "env", "--new-key", "me"], "me"),
    ] {
        let failed = server.k8e(args);
        assert_eq!(
            (failed.code, failed.out().as_str()),
            (1, ""),
            "{}",
            failed.all()
        );
        assert!(failed.err().contains(word), "{args:?}: {}", failed.all());
    }
}
