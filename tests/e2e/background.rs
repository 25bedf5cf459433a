//! Commands that outlive the call that started them, on both runtimes.

use k8e_e2e::{Ran, Server};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Starts a background run and says which.
fn start(server: &Server, session: &str, flags: &[&str], code: &str) -> String {
    let ran = start_with(server, session, flags, code);
    assert_eq!(ran.code, 0, "{}", ran.all());
    let answer = ran.json();
    assert_eq!(answer["status"], "started", "{answer}");
    assert_eq!(answer["session_id"], session, "{answer}");
    answer["run_id"].as_str().unwrap().to_owned()
}

fn start_with(server: &Server, session: &str, flags: &[&str], code: &str) -> Ran {
    let args = ["sandbox", "run", "--background", "--session-id", session];
    server.k8e(&[&args, flags, &[code]].concat())
}

fn poll(server: &Server, run: &str) -> Value {
    let ran = server.k8e(&["sandbox", "poll", run]);
    assert_eq!(ran.code, 0, "{}", ran.all());
    ran.json()
}

/// Polls until it is as wanted.
fn until(server: &Server, run: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let answer = poll(server, run);
        if wanted(&answer) {
            return answer;
        }
        assert!(Instant::now() < deadline, "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn over(server: &Server, run: &str) -> Value {
    until(server, run, |answer| answer["status"] != "running")
}

fn runs_go_on_by_themselves(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session();
    // Five that are over, a sixth and more.
    for code in [0, 1, 3, 42, 255] {
        let script = format!("echo out; echo err >&2; exit {code}");
        let run = start(&server, &session.id, &[], &script);
        let answer = over(&server, &run);
        assert_eq!(answer["status"], "completed", "{answer}");
        assert_eq!(answer["exit_code"], code, "{answer}");
        assert_eq!(answer["stdout"], "out\n", "{answer}");
        assert_eq!(answer["stderr"], "err\n", "{answer}");
        assert_eq!(answer["truncated"], false, "{answer}");
    }
    let killed = start(&server, &session.id, &[], "kill -9 $$");
    assert_eq!(over(&server, &killed)["exit_code"], 137);
    let binary = start(&server, &session.id, &[], r"printf '\377\000\001'");
    assert_eq!(over(&server, &binary)["stdout_base64"], "/wAB");
    let late = start(
        &server,
        &session.id,
        &["--timeout", "1"],
        "echo x; sleep 60.75 & sleep 60.75",
    );
    let answer = over(&server, &late);
    assert_eq!(answer["status"], "timed_out", "{answer}");
    assert_eq!(answer["stdout"], "x\n", "{answer}");
    let much = start(
        &server,
        &session.id,
        &[],
        "head -c 5000000 /dev/zero | tr '\\0' y",
    );
    let answer = over(&server, &much);
    assert_eq!(answer["stdout"].as_str().unwrap().len(), 1 << 20);
    assert_eq!(answer["truncated"], true);

    // Five that run are all it takes; one that ends makes room.
    let beat = "while :; do echo beat; sleep 60.25; done";
    let running: Vec<_> = (0..5)
        .map(|_| start(&server, &session.id, &[], beat))
        .collect();
    let sixth = start_with(&server, &session.id, &[], "true");
    assert_eq!(sixth.code, 1, "{}", sixth.all());
    assert!(sixth.out().contains("5 background runs"), "{}", sixth.all());
    let got = server.k8e(&["sandbox", "get", &session.id]).json();
    assert_eq!(got["background_runs"], 5, "{got}");
    for run in &running {
        until(&server, run, |answer| answer["stdout"] == "beat\n");
    }
    let cancelled = server.k8e(&["sandbox", "cancel", &running[0]]).json();
    assert_eq!(cancelled["status"], "cancelled", "{cancelled}");
    assert_eq!(cancelled["stdout"], "beat\n", "{cancelled}");
    start(&server, &session.id, &[], "true");
    let left = session.sh("pgrep -fc 'sleep 60[.]25'");
    assert_eq!(left.out(), "4\n", "{}", left.all());
    assert_eq!(session.sh("pgrep -fc 'sleep 60[.]75'").out(), "0\n");

    // What it says as it comes, and its exit code.
    let run = start(
        &server,
        &session.id,
        &[],
        "for n in 1 2 3; do echo $n; sleep 0.1; done; exit 6",
    );
    let followed = server.k8e(&["sandbox", "poll", &run, "--follow"]);
    assert_eq!((followed.code, &*followed.out()), (6, "1\n2\n3\n"));
    let waited = server.k8e(&["sandbox", "poll", &run, "--wait"]);
    assert_eq!((waited.code, &waited.json()["exit_code"]), (0, &6.into()));
    let listed = server.k8e(&["sandbox", "runs", &session.id]).json();
    assert_eq!(listed["runs"].as_array().unwrap().len(), 16, "{listed}");

    // The session's end is theirs, and they are told of for a while.
    session.destroy();
    let answer = over(&server, &running[1]);
    assert_eq!(answer["status"], "cancelled", "{answer}");
    assert_eq!(poll(&server, &run)["exit_code"], 6);
    for words in [["poll", "run-none"], ["cancel", "run-none"]] {
        let ran = server.k8e(&[&["sandbox"], &words[..]].concat());
        assert_eq!(ran.code, 1);
        assert!(ran.out().contains("not found"), "{}", ran.all());
    }
    server.assert_traces(0);
}

#[test]
fn runs_go_on_by_themselves_native() {
    runs_go_on_by_themselves("native");
}

#[test]
fn runs_go_on_by_themselves_gvisor() {
    runs_go_on_by_themselves("gvisor");
}

fn runs_survive_kill_9(runtime: &str) {
    let mut server = Server::start_with(&["--default-runtime", runtime]);
    let id = server.session().id;
    let done = start(&server, &id, &[], "echo done; exit 4");
    over(&server, &done);
    let meanwhile = start(&server, &id, &[], "echo a; sleep 1; echo b; exit 5");
    let long = start(&server, &id, &[], "echo up; sleep 60.5; echo never");
    until(&server, &long, |answer| answer["stdout"] == "up\n");
    server.kill();
    std::thread::sleep(Duration::from_millis(1500));
    server.restart();
    let answer = poll(&server, &done);
    assert_eq!(
        (&answer["stdout"], &answer["exit_code"]),
        (&"done\n".into(), &4.into())
    );
    let answer = over(&server, &meanwhile);
    assert_eq!(answer["status"], "completed", "{answer}");
    assert_eq!(
        (&answer["stdout"], &answer["exit_code"]),
        (&"a\nb\n".into(), &5.into())
    );
    let answer = poll(&server, &long);
    assert_eq!(
        (&answer["status"], &answer["stdout"]),
        (&"running".into(), &"up\n".into())
    );
    let answer = server.k8e(&["sandbox", "cancel", &long]).json();
    assert_eq!(answer["status"], "cancelled", "{answer}");
}

#[test]
fn runs_survive_kill_9_native() {
    runs_survive_kill_9("native");
}

#[test]
fn runs_survive_kill_9_gvisor() {
    runs_survive_kill_9("gvisor");
}
