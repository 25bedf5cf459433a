//! Warm pools, with real sandboxes.

use k8e_e2e::Server;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(30);

/// The sandboxes that a pool of 3 has, ready or under way.
const POOL: [&str; 4] = ["--pool-min", "3", "--pool-max", "3"];

#[test]
fn a_session_gets_a_warm_sandbox_with_the_limits_it_asks_for() {
    let server = Server::start_with(&POOL);
    pool_until(&server, "3 are ready", |pool| pool["ready"] == 3);

    // Less than the default, more than the default, and just that.
    for (memory, mib) in [("64MiB", 64), ("1GiB", 1024), ("512MiB", 512)] {
        let flags = ["--memory", memory, "--pids", "40", "--cpus", "0.5"];
        let session = server.session_with(&flags);
        assert_eq!(start_of(&server, &session.id), "warm");
        let shm = session.sh("df --output=size -BM /dev/shm | tail -1 | tr -d ' M'");
        assert_eq!(shm.out(), format!("{}\n", mib / 2), "{}", shm.all());
        let held = session.py(&allocate(mib - 40));
        assert_eq!(held.out(), "held\n", "{memory}: {}", held.all());
        let killed = session.run_json(&["--lang", "python"], &allocate(mib + 40));
        assert_eq!(killed["status"], "oom_killed", "{memory}: {killed}");
        session.destroy();
        pool_until(&server, "3 are ready again", |pool| pool["ready"] == 3);
    }
    let session = server.session_with(&["--pids", "20"]);
    let forks = session.sh("for i in $(seq 30); do sleep 5 & done; wait");
    assert!(forks.err().contains("fork"), "{}", forks.all());
    session.destroy();

    let session = server.session_with(&["--disk", "64MiB"]);
    assert_eq!(start_of(&server, &session.id), "cold");
    session.destroy();

    let pool = pool_until(&server, "3 are ready again", |pool| pool["ready"] == 3);
    assert_eq!(pool["claims"], 4, "{pool}");
    assert_eq!(pool["hit_rate"], 1.0, "{pool}");
    assert_eq!(pool["unfit"], 1, "{pool}");
    assert!(pool["claim_p50_ms"].as_f64().unwrap() > 0.0, "{pool}");
    server.assert_traces(3);
}

#[test]
fn a_pool_ends_with_its_server_however_that_ends() {
    let mut server = Server::start_with(&POOL);
    pool_until(&server, "3 are ready", |pool| pool["ready"] == 3);
    let session = server.session_with(&["--session-id", "kept"]);
    assert_eq!(session.sh("echo here > file").code, 0);
    pool_until(&server, "3 are ready again", |pool| pool["ready"] == 3);

    // The friendly way nothing is left but the session's.
    server.stop();
    server.assert_traces(1);

    // The hard way the next server removes what is left, and only that.
    server.restart();
    pool_until(&server, "3 are ready again", |pool| pool["ready"] == 3);
    let before = sandboxes(&server);
    assert_eq!(before.len(), 4);
    server.kill();
    server.assert_traces(4);
    server.restart();
    pool_until(&server, "3 are ready again", |pool| pool["ready"] == 3);
    server.assert_traces(4);
    let after = sandboxes(&server);
    let stayed = after.iter().filter(|id| before.contains(id)).count();
    assert_eq!(stayed, 1, "before: {before:?}, after: {after:?}");
    let ran = server.k8e(&[
        "sandbox",
        "run",
        "--raw",
        "--session-id",
        "kept",
        "cat file",
    ]);
    assert_eq!(ran.out(), "here\n", "{}", ran.all());
    let warm = server.session();
    assert_eq!(start_of(&server, &warm.id), "warm");
    warm.destroy();
    assert_eq!(server.k8e(&["sandbox", "destroy", "kept"]).code, 0);
    server.stop();
    server.assert_traces(0);
}

#[test]
fn a_warm_sandbox_that_dies_is_replaced() {
    let server = Server::start_with(&POOL);
    pool_until(&server, "3 are ready", |pool| pool["ready"] == 3);
    for id in sandboxes(&server) {
        kill(&server, &id);
        let session = server.session();
        assert_eq!(session.sh("echo ok").out(), "ok\n");
        session.destroy();
    }
    pool_until(&server, "3 are ready again", |pool| pool["ready"] == 3);
    server.assert_traces(3);
}

fn pool_until(server: &Server, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + WAIT;
    loop {
        let shown = server.k8e(&["sandbox", "pool"]);
        let pool = shown.json()["pools"][0].clone();
        assert_eq!(pool["runtime"], "native", "{}", shown.all());
        if is(&pool) {
            return pool;
        }
        assert!(Instant::now() < deadline, "{what}: {pool}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a session was made with a warm sandbox.
fn start_of(server: &Server, id: &str) -> String {
    let events = server.k8e(&["sandbox", "events", id]).out();
    for start in ["warm", "cold"] {
        if events.contains(&format!("\"{start}\"")) {
            return start.to_owned();
        }
    }
    panic!("no start in the events: {events}");
}

fn sandboxes(server: &Server) -> Vec<String> {
    let dir = server.data_dir().join("native/sandboxes");
    let names = std::fs::read_dir(dir).unwrap().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Kills a sandbox's first process, as its record names it.
fn kill(server: &Server, id: &str) {
    let record = server
        .data_dir()
        .join("native/sandboxes")
        .join(id)
        .join("record.json");
    // Claimed and destroyed by an earlier round.
    let Ok(record) = std::fs::read(record) else {
        return;
    };
    let record: Value = serde_json::from_slice(&record).unwrap();
    let pid = i32::try_from(record["pid"].as_i64().unwrap()).unwrap();
    let pid = Pid::from_raw(pid).unwrap();
    let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    pidfd_send_signal(&process, Signal::KILL).unwrap();
    // Nobody can tell one that is about to die from one that lives.
    poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
}

/// Python that holds that many MiB for a moment.
fn allocate(mib: u32) -> String {
    format!("x = bytearray({mib} << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('held')")
}
