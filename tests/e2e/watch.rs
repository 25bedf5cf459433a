//! `k8e sandbox watch` and `k8e sandbox metrics`, on both runtimes.

use k8e_e2e::Server;
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStdout, Stdio};

/// A running `k8e sandbox watch`.
struct Watch {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Watch {
    fn start(server: &Server, args: &[&str]) -> Self {
        let mut command = server.command(&[&["sandbox", "watch"], args].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut watch = Self { child, lines };
        assert_eq!(watch.next()["type"], "started");
        watch
    }

    fn next(&mut self) -> Value {
        let line = self.lines.next().expect("the watch goes on").unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Types and paths up to an event about a path, without that.
    fn until(&mut self, path: &str) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            let event = self.next();
            if event["path"] == path {
                return seen;
            }
            let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
            seen.push(format!("{} {}", text("type"), text("path")));
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn changes_are_printed_as_they_happen(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session();
    session.sh("mkdir -p src/there");
    let mut watch = Watch::start(&server, &[&session.id, "src", "--recursive"]);
    session.sh("cd src; echo x > a; chmod 600 a; mv a there/b; rm there/b; touch end1");
    let events = watch.until("end1");
    let expected = [
        "create a",
        "write a",
        "chmod a",
        "rename_from a",
        "rename_to there/b",
        "remove there/b",
    ];
    assert_eq!(events, expected);
    // New directories, and a tree that is moved.
    session.sh("cd src; mkdir -p new/deep; touch new/deep/f; touch end2");
    let mut events = watch.until("end2");
    // Read while they are made: a file may be reported after the mark.
    session.sh("cd src; touch end3");
    events.extend(watch.until("end3"));
    for path in ["new", "new/deep", "new/deep/f"] {
        let made = events
            .iter()
            .filter(|event| **event == format!("create {path}"));
        assert_eq!(made.count(), 1, "{path}: {events:?}");
    }
    session.sh("cd src; mv new moved; echo x > moved/deep/g; touch end4");
    let events = watch.until("end4");
    assert!(
        events.contains(&"create moved/deep/g".to_owned()),
        "{events:?}"
    );
    // What a file call writes is a change too, and another directory is not watched.
    let path = "src/by-call";
    let written = server.k8e_with(&["sandbox", "write", &session.id, path], b"x");
    assert_eq!(written.code, 0, "{}", written.all());
    watch.until("by-call");
    session.sh("touch elsewhere; touch src/end5");
    let events = watch.until("end5");
    assert!(!events.iter().any(|event| event.contains("elsewhere")));

    // What cannot be watched says so; a watch ends with its directory and with its session.
    for (path, says) in [
        ("missing", "not found"),
        ("elsewhere", "not a directory"),
        ("/etc", "outside"),
    ] {
        let refused = server.k8e(&["sandbox", "watch", &session.id, path]);
        assert_eq!(refused.code, 1, "{}", refused.all());
        let said = refused.all().to_lowercase();
        let found = said.contains(says) || said.contains("no such file");
        assert!(found, "{path}: {said}");
    }
    session.sh("rm -r src");
    let ended = loop {
        let event = watch.next();
        if event.get("error").is_some() {
            break event;
        }
    };
    assert!(ended["error"].to_string().contains("removed or moved"));
    let mut other = Watch::start(&server, &[&session.id, "."]);
    session.destroy();
    let ended = other.next();
    assert!(ended.get("error").is_some(), "{ended}");
    drop((watch, other));
    server.assert_traces(0);
}

#[test]
fn changes_are_printed_as_they_happen_native() {
    changes_are_printed_as_they_happen("native");
}

#[test]
fn changes_are_printed_as_they_happen_gvisor() {
    changes_are_printed_as_they_happen("gvisor");
}

fn a_flood_is_reported_as_lost_events(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session();
    let mut watch = Watch::start(&server, &[&session.id, "."]);
    // Nobody reads the watch meanwhile, and pipes, sockets and queues between are bounded.
    let flood = "import os\nfor n in range(60000):\n    os.close(os.open(f'{n:0200}', os.O_CREAT))\n    os.unlink(f'{n:0200}')\nopen('last', 'w')\n";
    let ran = session.py(flood);
    assert_eq!(ran.code, 0, "{}", ran.all());
    let mut count = 0;
    while watch.next()["type"] != "overflow" {
        count += 1;
    }
    assert!(count < 120_000, "{count}");
    // It goes on, and other calls have not waited for it.
    session.sh("touch after");
    watch.until("after");
}

#[test]
fn a_flood_is_reported_as_lost_events_native() {
    a_flood_is_reported_as_lost_events("native");
}

#[test]
fn a_flood_is_reported_as_lost_events_gvisor() {
    a_flood_is_reported_as_lost_events("gvisor");
}

fn metrics_are_what_the_session_uses(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session_with(&["--memory", "512MiB", "--disk", "1GiB", "--cpus", "1"]);
    let metrics = || {
        let ran = server.k8e(&["sandbox", "metrics", &session.id]);
        assert_eq!(ran.code, 0, "{}", ran.all());
        ran.json()
    };
    let number = |metrics: &Value, key: &str| {
        let number = metrics[key].as_f64();
        number.unwrap_or_else(|| panic!("{key}: {metrics}"))
    };
    let idle = metrics();
    assert_eq!(number(&idle, "memory_total_bytes"), f64::from(512 << 20));
    assert_eq!(number(&idle, "cpus"), 1.0);
    let disk = number(&idle, "disk_total_bytes");
    let gib = f64::from(1 << 30);
    assert!(disk > gib * 0.8 && disk <= gib, "{idle}");
    // A process that uses a CPU and 100 MB of memory, and a file of 50 MB.
    session.sh("head -c 50000000 /dev/zero > big");
    let busy = "x = bytearray(100_000_000)\nx[::4096] = b'1' * len(x[::4096])\nopen('ready', 'w')\nwhile True: pass";
    let started = server.k8e(&[
        "sandbox",
        "run",
        "--background",
        "--session-id",
        &session.id,
        "--lang",
        "python",
        busy,
    ]);
    assert_eq!(started.code, 0, "{}", started.all());
    session.sh("while [ ! -e ready ]; do sleep 0.05; done");
    let busy = metrics();
    let grown = |key: &str| number(&busy, key) - number(&idle, key);
    assert!(grown("memory_used_bytes") > 80e6, "{idle} {busy}");
    assert!(grown("disk_used_bytes") > 40e6, "{idle} {busy}");
    assert!(grown("cpu_time_us") > 1000.0, "{idle} {busy}");
    // The machine has other work too: some of it is enough.
    let percent = number(&busy, "cpu_used_percent");
    assert!(percent > 0.5 && percent < 200.0, "{busy}");
    let missing = server.k8e(&["sandbox", "metrics", "none"]);
    assert_eq!(missing.code, 1, "{}", missing.all());
}

#[test]
fn metrics_are_what_the_session_uses_native() {
    metrics_are_what_the_session_uses("native");
}

#[test]
fn metrics_are_what_the_session_uses_gvisor() {
    metrics_are_what_the_session_uses("gvisor");
}
