//! Which session `k8e sandbox run` uses, and what becomes of it when something is stopped.

use k8e_e2e::Server;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Longest wait for something that is under way, on a machine that runs other tests as well.
const WAIT: Duration = Duration::from_secs(60);

fn run(server: &Server, flags: &[&str], code: &str) -> Value {
    let ran = server.k8e(&[&["sandbox", "run"], flags, &[code]].concat());
    assert_eq!(ran.code, 0, "{}", ran.all());
    ran.json()
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().unwrap().to_owned()
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn kinds(server: &Server, session: &str) -> Vec<String> {
    let events = server.k8e(&["sandbox", "events", session]).json();
    let events = events["events"].as_array().unwrap().iter();
    events
        .map(|event| event["kind"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_run_uses_only_what_a_run_with_the_same_flags_made() {
    let mut server = Server::start();
    let status = |server: &Server| server.k8e(&["sandbox", "status"]).json();
    assert_eq!(status(&server)["session_id"], "");
    let plain = run(&server, &[], "echo kept > f");
    assert_eq!(plain["session_created"], true, "{plain}");
    // The newest of the tenant, and not what a run made.
    let created = server.session();
    let again = run(&server, &[], "cat f");
    assert_eq!(again["stdout"], "kept\n", "{again}");
    assert_eq!(again["session_created"], false, "{again}");
    assert_eq!(id(&again), id(&plain));
    let mut seen = vec![created.id, id(&plain)];
    let others: [&[&str]; 5] = [
        &["--allowed-hosts", "all"],
        &["--memory", "256MiB"],
        &["--idle-timeout", "2h"],
        &["--label", "a=b"],
        &["--pids", "64"],
    ];
    for flags in others {
        let first = run(&server, flags, "test ! -e f && touch g");
        assert!(!seen.contains(&id(&first)), "{flags:?}: {first}");
        assert_eq!(first["session_created"], true, "{first}");
        let second = run(&server, flags, "test -e g");
        assert_eq!(id(&second), id(&first), "{flags:?}");
        seen.push(id(&first));
    }
    assert_eq!(status(&server)["session_id"], *id(&plain));
    // A server that starts again chooses as before.
    server.stop();
    server.restart();
    assert_eq!(status(&server)["session_id"], *id(&plain));
    assert_eq!(run(&server, &[], "cat f")["stdout"], "kept\n");
    let hosts = run(&server, others[0], "test -e g");
    assert_eq!(id(&hosts), seen[2]);
    // What it may reach now counts, not what it was made with.
    let changed = ["sandbox", "allow-hosts", "--session-id", &seen[1], "all"];
    assert_eq!(server.k8e(&changed).code, 0);
    let narrow = run(&server, &[], "test ! -e f");
    assert_eq!(narrow["session_created"], true, "{narrow}");
}

#[test]
fn a_session_whose_first_command_does_not_start_is_not_kept() {
    let server = Server::start();
    let missing = ["sandbox", "run", "--secret", "A=nobody-set-it", "true"];
    let ran = server.k8e(&missing);
    assert_ne!(ran.code, 0, "{}", ran.all());
    assert!(ran.all().contains("nobody-set-it"), "{}", ran.all());
    assert_eq!(server.session_ids(), [] as [String; 0]);
    server.assert_traces(0);
}

#[test]
fn new_files_are_announced_after_an_idle_session_ended() {
    let server = Server::start();
    let idle = ["--idle-timeout", "1s"];
    let first = run(&server, &idle, "touch f");
    wait_for("an idle session ends", || {
        server.session_ids().is_empty().then_some(())
    });
    let second = run(&server, &idle, "test ! -e f");
    assert_eq!(second["session_created"], true, "{second}");
    assert_ne!(id(&second), id(&first));
}

/// Starts a run in a session of its own, and returns its process and session.
fn fresh_run(server: &Server) -> (std::process::Child, String) {
    let client = server
        .command(&["sandbox", "run", "--fresh", "--timeout", "10m", "sleep 600"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let session = wait_for("the run starts", || {
        let mut ids = server.session_ids().into_iter();
        ids.find(|id| kinds(server, id).contains(&"run_started".to_owned()))
    });
    (client, session)
}

#[test]
fn ctrl_c_ends_a_fresh_run_and_its_session() {
    let server = Server::start();
    let (mut client, session) = fresh_run(&server);
    kill_process(Pid::from_child(&client), Signal::INT).unwrap();
    client.wait().unwrap();
    wait_for("the session ends", || {
        let got = server.k8e(&["sandbox", "get", &session]).json();
        (got["phase"] == "ended").then_some(())
    });
    assert!(kinds(&server, &session).contains(&"run_ended".to_owned()));
    server.assert_traces(0);
}

#[test]
fn a_stopped_server_ends_a_fresh_run_and_its_session() {
    let mut server = Server::start();
    let kept = server.session();
    let kept = kept.id;
    let (mut client, session) = fresh_run(&server);
    assert_ne!(session, kept);
    server.stop();
    assert_ne!(client.wait().unwrap().code(), Some(0));
    let log = server.log_text();
    assert!(!log.contains("events come faster"), "{log}");
    // Nothing is left for the next server to clean up but the session that was made to stay.
    server.assert_traces(1);
    server.restart();
    assert_eq!(server.session_ids(), [kept]);
    let kinds = kinds(&server, &session);
    let count = |kind: &str| kinds.iter().filter(|one| *one == kind).count();
    assert_eq!(
        (count("run_started"), count("run_ended")),
        (1, 1),
        "{kinds:?}"
    );
}

#[test]
fn a_broken_gvisor_is_not_replaced_by_native() {
    let programs = tempfile::tempdir().unwrap();
    let runsc = programs.path().join("runsc");
    std::fs::write(&runsc, "#!/bin/sh\nexit 1\n").unwrap();
    std::fs::set_permissions(&runsc, std::fs::Permissions::from_mode(0o755)).unwrap();
    // Names no default.
    let server = Server::start_with_programs(programs.path(), &["--gvisor-platform", "systrap"]);
    let ran = server.k8e(&["sandbox", "run", "true"]);
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.all().contains("gvisor is installed"), "{}", ran.all());
    assert_eq!(server.session_ids(), [] as [String; 0]);
    let status = server.k8e(&["sandbox", "status"]).json();
    assert_eq!(status["default_runtime"], "gvisor", "{status}");
    let gvisor = &status["runtimes"][0];
    assert_eq!(gvisor["usable"], false, "{status}");
    let reason = gvisor["reason"].as_str().unwrap();
    assert!(reason.contains("does not work now"), "{status}");
    // Somebody said so.
    let native = run(&server, &["--runtime", "native"], "true");
    assert_eq!(native["runtime"], "native", "{native}");
    drop(server);
    let flags = ["--default-runtime", "native"];
    let server = Server::start_with_programs(programs.path(), &flags);
    assert_eq!(run(&server, &[], "true")["runtime"], "native");
}
