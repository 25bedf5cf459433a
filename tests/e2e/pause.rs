//! Sessions that are paused, on both runtimes: nothing in them runs, and all of it goes on.

use k8e_e2e::{Server, Session};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Nothing here takes longer, on a machine that runs other tests as well.
const SOON: Duration = Duration::from_secs(60);

/// Counts as fast as it can, whole numbers only.
const COUNTER: &str =
    "echo $$ > pid; n=0; while :; do n=$((n+1)); echo $n > n.new; mv n.new n; done";

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn counted(session: &Session<'_>) -> u64 {
    let ran = session.sh("cat n 2>/dev/null || echo 0");
    ran.out().trim().parse().unwrap_or(0)
}

/// It counts.
fn counts(session: &Session<'_>) {
    let before = counted(session);
    until("the counter goes on", || counted(session) > before);
}

fn sandbox(server: &Server, words: &[&str]) -> serde_json::Value {
    let ran = server.k8e(&[&["sandbox"], words].concat());
    assert_eq!(ran.code, 0, "{}", ran.all());
    ran.json()
}

fn refused(server: &Server, words: &[&str], text: &str) {
    let ran = server.k8e(&[&["sandbox"], words].concat());
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.out().contains(text), "{}", ran.all());
    assert_eq!(ran.json()["detail"], "precondition", "{}", ran.all());
}

fn bytes(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |file| file.len())
}

fn everything_stands_still_and_goes_on(runtime: &str) {
    let mut server = Server::start_with(&["--default-runtime", runtime]);
    let id = server.session().id;
    let args = ["run", "--background", "--session-id", &id, COUNTER];
    let run = sandbox(&server, &args)["run_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let session = Session {
        server: &server,
        id: id.clone(),
    };
    counts(&session);
    let pid = session.sh("cat pid").out();

    // Somebody reads what a command says.
    let said = tempfile::NamedTempFile::new().unwrap();
    let talk = "while [ ! -e stop ]; do echo talk; sleep 0.02; done; echo end; exit 3";
    let talk = ["sandbox", "run", "--raw", "--session-id", &id, talk];
    let mut reader = server.command(&talk);
    let mut reader = reader
        .stdin(Stdio::null())
        .stdout(said.reopen().unwrap())
        .spawn()
        .unwrap();
    until("it talks", || bytes(said.path()) > 0);

    let answer = sandbox(&server, &["pause", &id]);
    assert_eq!(answer["phase"], "paused", "{answer}");
    // What was said before comes; then nothing does.
    let mut before = u64::MAX;
    until("it stands still", || {
        std::thread::sleep(Duration::from_millis(300));
        std::mem::replace(&mut before, bytes(said.path())) == bytes(said.path())
    });
    assert!(reader.try_wait().unwrap().is_none(), "its stream ended");
    let paused = format!("session {id} is paused: resume it first");
    refused(&server, &["run", "--session-id", &id, "true"], &paused);
    refused(&server, &["read", &id, "n"], &paused);
    refused(&server, &["poll", &run], &paused);
    refused(&server, &["pause", &id], "is not active (phase=paused)");
    let listed = sandbox(&server, &["sessions", "--phase", "paused"]);
    assert_eq!(listed["sessions"][0]["session_id"], id, "{listed}");
    assert_eq!(sandbox(&server, &["get", &id])["background_runs"], 1);

    let answer = sandbox(&server, &["resume", &id]);
    assert_eq!(answer["phase"], "active", "{answer}");
    refused(&server, &["resume", &id], "is not paused (phase=active)");
    until("it talks again", || bytes(said.path()) > before);
    assert_eq!(session.sh("touch stop").code, 0);
    assert_eq!(reader.wait().unwrap().code(), Some(3));
    counts(&session);

    // The next server finds it as it was.
    sandbox(&server, &["pause", &id]);
    server.kill();
    server.restart();
    assert_eq!(sandbox(&server, &["get", &id])["phase"], "paused");
    refused(&server, &["run", "--session-id", &id, "true"], &paused);
    sandbox(&server, &["resume", &id]);
    let session = Session {
        server: &server,
        id: id.clone(),
    };
    counts(&session);
    assert_eq!(session.sh("cat pid").out(), pid, "another process counts");
    let answer = sandbox(&server, &["poll", &run]);
    assert_eq!(answer["status"], "running", "{answer}");
    let answer = sandbox(&server, &["cancel", &run]);
    assert_eq!(answer["status"], "cancelled", "{answer}");

    sandbox(&server, &["pause", &id]);
    session.destroy();
    server.assert_traces(0);
    // What is swept was paused too.
    let other = server.session().id;
    sandbox(&server, &["pause", &other]);
    server.kill();
    for file in ["k8e.db", "k8e.db-wal", "k8e.db-shm"] {
        std::fs::remove_file(server.data_dir().join("store").join(file)).ok();
    }
    server.restart();
    server.assert_traces(0);
}

#[test]
fn everything_stands_still_and_goes_on_native() {
    everything_stands_still_and_goes_on("native");
}

#[test]
fn everything_stands_still_and_goes_on_gvisor() {
    everything_stands_still_and_goes_on("gvisor");
}

/// The clock goes on: what is late is ended when it can be, and the session with it is not.
#[test]
fn a_timeout_that_passed_meanwhile_is_one() {
    let server = Server::start();
    let session = server.session();
    let id = &session.id;
    let command = "echo up > up; sleep 61.5";
    let args = ["run", "--background", "--timeout", "2", "--session-id", id];
    let run = sandbox(&server, &[&args[..], &[command]].concat());
    let run = run["run_id"].as_str().unwrap();
    until("it runs", || session.sh("cat up").code == 0);
    sandbox(&server, &["pause", id]);
    // Longer than its time, and than the deadline of a guest that does not end it.
    std::thread::sleep(Duration::from_secs(13));
    assert_eq!(sandbox(&server, &["get", id])["phase"], "paused");
    sandbox(&server, &["resume", id]);
    let answer = sandbox(&server, &["poll", run, "--wait"]);
    assert_eq!(answer["status"], "timed_out", "{answer}");
    assert_eq!(session.sh("pgrep -fc 'sleep 61[.]5'").out(), "0\n");
}
