//! Commands that follow something: they end with what they follow, or with Ctrl-C.

use k8e_e2e::Server;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Lines, Read as _};
use std::process::{Child, ChildStdout, Stdio};

/// A command whose lines are read as they come.
struct Following {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Following {
    fn start(server: &Server, args: &[&str]) -> Self {
        let mut command = server.command(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn json(&mut self) -> Value {
        let line = self.lines.next().expect("a line").unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    fn interrupt(&self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
    }

    /// The exit code; standard error must be empty.
    fn end(mut self) -> Option<i32> {
        let mut said = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        stderr.read_to_string(&mut said).unwrap();
        assert_eq!(said, "");
        self.child.wait().unwrap().code()
    }
}

#[test]
fn sessions_are_watched() {
    let server = Server::start();
    let first = server.session();
    let mut watch = Following::start(&server, &["sandbox", "sessions", "--watch"]);
    let change = watch.json();
    assert_eq!(
        (&change["type"], &change["session"]["session_id"]),
        (&"added".into(), &first.id.clone().into())
    );
    let second = server.session();
    let change = watch.json();
    assert_eq!(
        (&change["type"], &change["session"]["session_id"]),
        (&"added".into(), &second.id.clone().into())
    );
    // A change that is none: the session was used.
    assert_eq!(first.sh("true").code, 0);
    let allowed = server.k8e(&[
        "sandbox",
        "allow-hosts",
        "a.example",
        "--session-id",
        &first.id,
    ]);
    assert_eq!(allowed.code, 0, "{}", allowed.all());
    let change = watch.json();
    assert_eq!(
        (&change["type"], &change["session"]["session_id"]),
        (&"changed".into(), &first.id.clone().into())
    );
    assert_eq!(
        change["session"]["allowed_hosts"][0], "a.example",
        "{change}"
    );
    second.destroy();
    let change = watch.json();
    assert_eq!(
        (&change["type"], &change["session"]["session_id"]),
        (&"removed".into(), &second.id.clone().into())
    );
    watch.interrupt();
    assert!(watch.lines.next().is_none(), "nothing after Ctrl-C");
    assert_eq!(watch.end(), Some(130));
}

#[test]
fn log_and_events_end_with_their_session() {
    let server = Server::start();
    let session = server.session();
    let mut log = Following::start(&server, &["sandbox", "log", &session.id, "--follow"]);
    let mut events = Following::start(&server, &["sandbox", "events", &session.id, "--follow"]);
    assert_eq!(session.sh("echo first").code, 0);
    assert_eq!(log.lines.next().unwrap().unwrap(), "first");
    assert_eq!(events.json()["kind"], "created");
    // What is printed right before the end is not lost.
    assert_eq!(session.sh("echo last").code, 0);
    session.destroy();
    let rest: Vec<String> = log.lines.by_ref().map(Result::unwrap).collect();
    assert_eq!(rest, ["last"]);
    assert_eq!(log.end(), Some(0));
    let kinds: Vec<String> = events
        .lines
        .by_ref()
        .map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap())
        .map(|event| event["kind"].as_str().unwrap().to_owned())
        .collect();
    let last = kinds.last().expect("more events").clone();
    assert!(["ended", "destroyed"].contains(&last.as_str()), "{kinds:?}");
    assert_eq!(events.end(), Some(0));
}

#[test]
fn ctrl_c_ends_log_and_events() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.sh("echo first").code, 0);
    for command in ["log", "events"] {
        let mut following =
            Following::start(&server, &["sandbox", command, &session.id, "--follow"]);
        following.lines.next().unwrap().unwrap();
        following.interrupt();
        following.lines.by_ref().for_each(drop);
        assert_eq!(following.end(), Some(130), "{command}");
    }
    // They changed nothing.
    assert_eq!(session.sh("echo still").out(), "still\n");
    let missing = server.k8e(&["sandbox", "log", "no-such-session", "--follow"]);
    assert_eq!(missing.code, 1, "{}", missing.all());
}
