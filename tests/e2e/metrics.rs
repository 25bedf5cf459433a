//! What those who watch a server see: every number moves when it should, and shows nobody's data.

use k8e_e2e::Server;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(30);

/// On any free port: the log says which.
const METRICS: [&str; 2] = ["--metrics-listen", "127.0.0.1:0"];

/// Values by name and labels, as they are written.
type Metrics = BTreeMap<String, f64>;

#[test]
fn sessions_and_runs_are_counted() {
    let server = Server::start_with(&[&METRICS[..], &["--max-sessions", "2"]].concat());
    let before = metrics(&server);
    assert_eq!(before["k8e_sessions_active{runtime=\"native\"}"], 0.0);
    assert_eq!(before["k8e_build_info{version=\"0.1.0\"}"], 1.0);
    assert!(before["process_resident_memory_bytes"] > 1e6);
    assert!(before["process_open_fds"] > 5.0);
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    let age = now.as_secs_f64() - before["process_start_time_seconds"];
    assert!((0.0..60.0).contains(&age), "{age}");

    let secret = "secret-tenant-name";
    let session = server.session_with(&["--tenant", secret, "--memory", "64MiB"]);
    for code in ["true", "exit 3", "kill -9 $$", "kill -15 $$"] {
        session.sh(code);
    }
    assert_eq!(session.run(&["--timeout", "0.3"], "sleep 60").code, 137);
    let hog = "x = bytearray(200 << 20)";
    let killed = session.run_json(&["--lang", "python"], hog);
    assert_eq!(killed["status"], "oom_killed", "{killed}");
    let missing = server.k8e(&["sandbox", "exec", &session.id, "--", "no-such-program"]);
    assert_ne!(missing.code, 0);
    let write = ["sandbox", "write", &session.id, "secret-file-name"];
    assert_eq!(server.k8e_with(&write, &[7; 12_345]).code, 0);
    let read = server.k8e(&["sandbox", "read", &session.id, "secret-file-name", "--raw"]);
    assert_eq!(read.stdout.len(), 12_345, "{}", read.err());
    let other = server.session();
    let refused = server.k8e(&["sandbox", "create"]);
    assert!(refused.all().contains("exhausted"), "{}", refused.all());

    let during = metrics(&server);
    assert_eq!(during["k8e_sessions_active{runtime=\"native\"}"], 2.0);
    assert_eq!(during["k8e_sessions_max"], 2.0);
    other.destroy();
    session.destroy();

    let after = metrics(&server);
    let run = |outcome: &str| format!("k8e_runs_total{{runtime=\"native\",outcome=\"{outcome}\"}}");
    for (name, by) in [
        (run("exited"), 2.0),
        (run("signalled"), 2.0),
        (run("timed_out"), 1.0),
        (run("oom_killed"), 1.0),
        (run("not_started"), 1.0),
        (run("cancelled"), 0.0),
        (run("failed"), 0.0),
        (created("cold"), 2.0),
        (created("warm"), 0.0),
        (ended("destroyed"), 2.0),
        (ended("died"), 0.0),
        ("k8e_refused_total{reason=\"sessions\"}".to_owned(), 1.0),
        ("k8e_file_written_bytes_total".to_owned(), 12_345.0),
        ("k8e_file_read_bytes_total".to_owned(), 12_345.0),
        (count("k8e_run_start_seconds", "runtime=\"native\""), 6.0),
        (
            count(
                "k8e_session_create_seconds",
                "runtime=\"native\",start=\"cold\"",
            ),
            2.0,
        ),
        (grpc("CreateSession", "OK"), 2.0),
        (grpc("CreateSession", "RESOURCE_EXHAUSTED"), 1.0),
        (grpc("WriteFile", "OK"), 1.0),
        (grpc("DestroySession", "OK"), 2.0),
    ] {
        let was = before.get(&name).copied().unwrap_or(0.0);
        let is = after.get(&name).copied().unwrap_or(0.0);
        assert_eq!(is - was, by, "{name}: {after:#?}");
    }
    assert_eq!(after["k8e_sessions_active{runtime=\"native\"}"], 0.0);

    let shown = get(&server, "/metrics").1;
    for private in [
        session.id.as_str(),
        secret,
        "secret-file-name",
        "no-such-program",
    ] {
        assert!(!shown.contains(private), "{private} in {shown}");
    }
}

#[test]
fn pools_are_counted() {
    let pool = ["--pool-min", "2", "--pool-max", "2"];
    let server = Server::start_with(&[&METRICS[..], &pool].concat());
    let name = |metric: &str| format!("{metric}{{template=\"host\",runtime=\"native\"}}");
    let claims = |result: &str| {
        format!("k8e_pool_claims_total{{template=\"host\",runtime=\"native\",result=\"{result}\"}}")
    };
    let ready = |metrics: &Metrics| metrics[&name("k8e_pool_ready")] == 2.0;
    let before = until(&server, "2 are ready", ready);
    assert_eq!(before[&name("k8e_pool_target")], 2.0);
    assert_eq!(before[&name("k8e_pool_launches_total")], 2.0);
    assert_eq!(before[&claims("hit")], 0.0);

    server.session().destroy();
    until(&server, "2 are ready again", ready);
    server.session_with(&["--disk", "64MiB"]).destroy();

    let after = metrics(&server);
    assert_eq!(after[&claims("hit")], 1.0);
    assert_eq!(after[&claims("unfit")], 1.0);
    assert_eq!(after[&claims("miss")], 0.0);
    assert_eq!(after[&name("k8e_pool_launches_total")], 3.0);
    assert_eq!(after[&name("k8e_pool_launch_failures_total")], 0.0);
    assert_eq!(after[&name("k8e_pool_deaths_total")], 0.0);
    assert_eq!(after[&name("k8e_pool_claim_seconds_count")], 1.0);
    let bucket = |le: &str| {
        let labels = "template=\"host\",runtime=\"native\"";
        after[&format!("k8e_pool_claim_seconds_bucket{{{labels},le=\"{le}\"}}")]
    };
    assert!(bucket("0.0001") <= bucket("0.01") && bucket("0.01") <= bucket("1"));
    assert_eq!(bucket("+Inf"), 1.0);
    assert_eq!(
        (after[&created("warm")], after[&created("cold")]),
        (1.0, 1.0)
    );
}

#[test]
fn what_an_earlier_server_left_is_told_apart() {
    let mut server = Server::start_with(&METRICS);
    let kept = server.session().id;
    let lost = server.session().id;
    server.kill();
    // The sandbox of one of them is gone when the server comes back.
    let dir = server.data_dir().join("native/sandboxes");
    let sandbox = std::fs::read_dir(dir).unwrap().flatten().next().unwrap();
    let record = std::fs::read(sandbox.path().join("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let pid = i32::try_from(record["pid"].as_i64().unwrap()).unwrap();
    let pid = Pid::from_raw(pid).unwrap();
    let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    pidfd_send_signal(&process, Signal::KILL).unwrap();
    poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
    server.restart();
    let one_lives = |now: &Metrics| {
        let over = now[&ended("lost")] + now[&ended("died")];
        now["k8e_sessions_active{runtime=\"native\"}"] == 1.0 && over > 0.0
    };
    let after = until(&server, "one lives", one_lives);
    // One whose process nobody has waited for yet is taken over first, and dies then.
    let (lost_by, died) = (after[&ended("lost")], after[&ended("died")]);
    assert_eq!(lost_by + died, 1.0, "{after:#?}");
    let recovered = after["k8e_sessions_recovered_total{runtime=\"native\"}"];
    assert_eq!(recovered, 2.0 - lost_by, "{after:#?}");
    assert_eq!(after[&created("cold")], 0.0);
    let living = server.session_ids();
    assert!(living == [kept] || living == [lost], "{living:?}");
}

#[test]
fn health_is_told() {
    let server = Server::start_with(&METRICS);
    assert_eq!(get(&server, "/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(get(&server, "/readyz"), (200, "ok\n".to_owned()));
    assert_eq!(get(&server, "/anything").0, 404);
}

#[test]
fn an_address_that_is_taken_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = tempfile::tempdir().unwrap();
    let server = std::process::Command::new(k8e_e2e::binary())
        .args(["server", "--listen", "none", "--pool-max", "0"])
        .args(["--metrics-listen", &address, "--data-dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&server.stderr).into_owned();
    assert_eq!(server.status.code(), Some(1), "{said}");
    assert!(
        said.contains("--metrics-listen") && said.contains(&address),
        "{said}"
    );
}

fn created(start: &str) -> String {
    format!("k8e_sessions_created_total{{runtime=\"native\",start=\"{start}\"}}")
}

fn ended(reason: &str) -> String {
    format!("k8e_sessions_ended_total{{runtime=\"native\",reason=\"{reason}\"}}")
}

fn grpc(method: &str, code: &str) -> String {
    format!("k8e_grpc_requests_total{{method=\"k8e.v1.Sandboxes/{method}\",code=\"{code}\"}}")
}

fn count(histogram: &str, labels: &str) -> String {
    format!("{histogram}_count{{{labels}}}")
}

fn until(server: &Server, what: &str, is: impl Fn(&Metrics) -> bool) -> Metrics {
    let deadline = Instant::now() + WAIT;
    loop {
        let metrics = metrics(server);
        if is(&metrics) {
            return metrics;
        }
        assert!(Instant::now() < deadline, "{what}: {metrics:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Reads every line; one that is not as Prometheus wants it fails the test.
fn metrics(server: &Server) -> Metrics {
    let (status, text) = get(server, "/metrics");
    assert_eq!(status, 200, "{text}");
    let mut metrics = Metrics::new();
    let mut types: BTreeMap<String, String> = BTreeMap::new();
    let mut described = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').expect("a help line has words");
            assert!(!words.is_empty(), "{line}");
            assert!(!described.contains(&name.to_owned()), "twice: {line}");
            described.push(name.to_owned());
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a type line has a type");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(
                described.contains(&name.to_owned()),
                "not described: {line}"
            );
            let twice = types.insert(name.to_owned(), kind.to_owned());
            assert_eq!(twice, None, "{line}");
        } else {
            let (series, value) = line.rsplit_once(' ').expect("a sample has a value");
            check_series(series, &types);
            let value: f64 = value.parse().expect("a value is a number");
            assert_eq!(metrics.insert(series.to_owned(), value), None, "{line}");
        }
    }
    assert!(metrics.len() > 50, "{text}");
    metrics
}

fn check_series(series: &str, types: &BTreeMap<String, String>) {
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}').expect("closed")),
        None => (series, ""),
    };
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    assert!(name.chars().all(word), "{series}");
    assert!(
        name.starts_with("k8e_") || name.starts_with("process_"),
        "{series}"
    );
    let parts = ["_bucket", "_sum", "_count"];
    let family = parts.iter().find_map(|part| {
        let family = name.strip_suffix(part)?;
        (types.get(family).map(String::as_str) == Some("histogram")).then_some(family)
    });
    let kind = types.get(family.unwrap_or(name));
    let kind = kind.unwrap_or_else(|| panic!("no type: {series}"));
    assert_eq!(kind == "counter", name.ends_with("_total"), "{series}");
    for label in labels.split(',').filter(|label| !label.is_empty()) {
        let (label, value) = label.split_once('=').expect("a label has a value");
        let known = [
            "runtime", "template", "result", "start", "reason", "outcome", "method", "code",
            "version", "le",
        ];
        assert!(known.contains(&label), "{series}");
        assert!(
            value.len() > 2 && value.starts_with('"') && value.ends_with('"'),
            "{series}"
        );
    }
}

fn get(server: &Server, path: &str) -> (u16, String) {
    let log = server.log_text();
    // The last one: a server that was started again has another.
    let (_, address) = log.rsplit_once("metrics: http://").expect("it says where");
    let (address, _) = address.split_once('/').unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap();
    (status.parse().unwrap(), body.to_owned())
}
