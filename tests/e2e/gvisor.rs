//! Sessions with a kernel of their own. What a driver must do is tested with the driver; this is
//! what a person sees.

use k8e_e2e::Server;
use std::time::{Duration, Instant};

const GVISOR: [&str; 2] = ["--default-runtime", "gvisor"];

#[test]
fn who_does_not_say_gets_a_kernel_of_their_own() {
    // Does not name a default.
    let server = Server::start_with(&["--gvisor-platform", "systrap"]);
    let status = server.k8e(&["sandbox", "status"]).json();
    assert_eq!(status["default_runtime"], "gvisor", "{status}");
    let ran = server.k8e(&["sandbox", "run", "dmesg | head -1"]).json();
    assert_eq!(ran["runtime"], "gvisor", "{ran}");
    assert!(ran["stdout"].as_str().unwrap().contains("gVisor"), "{ran}");
    let ran = server.k8e(&["sandbox", "run", "--runtime", "native", "uname -r"]);
    assert_eq!(ran.json()["runtime"], "native", "{}", ran.all());
    let ran = server.k8e(&["sandbox", "create", "--runtime", "kata"]);
    assert_ne!(ran.code, 0);
    assert!(ran.all().contains("gvisor, native"), "{}", ran.all());
}

#[test]
fn sessions_survive_kill_9() {
    let mut server = Server::start_with(&GVISOR);
    let id = server.session().id;
    let run = |server: &Server, code: &str| {
        let ran = server.k8e(&["sandbox", "run", "--raw", "--session-id", &id, code]);
        assert_eq!(ran.code, 0, "{}", ran.all());
        ran.out()
    };
    run(
        &server,
        "echo mine > file; setsid sleep 1000 >/dev/null 2>&1 & echo $! > pid",
    );
    for _ in 0..3 {
        // One is under way when the server dies.
        let mut create = server.command(&["sandbox", "create"]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(60));
        server.kill();
        create.wait().unwrap();
        server.restart();
        let said = run(&server, "cat file; kill -0 $(cat pid) && echo alive");
        assert_eq!(said, "mine\nalive\n");
    }
    for id in server.session_ids() {
        assert_eq!(server.k8e(&["sandbox", "destroy", &id]).code, 0);
    }
    server.assert_traces(0);
}

#[test]
fn outside_its_kernel_is_nobody() {
    let server = Server::start_with(&GVISOR);
    let session = server.session();
    let said = std::fs::read_to_string(format!("/proc/{}/status", kernel_pid(&server))).unwrap();
    let field = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().split_whitespace().next().unwrap().to_owned()
    };
    // Not a user of this machine, and not one that anybody was given.
    assert!(
        field("Uid:").parse::<u32>().unwrap() >= 0x7000_0000,
        "{said}"
    );
    assert_eq!(field("NoNewPrivs:"), "1", "{said}");
    // A filter.
    assert_eq!(field("Seccomp:"), "2", "{said}");
    session.destroy();
}

#[test]
fn a_kernel_with_nothing_to_do_is_stopped_until_somebody_calls() {
    let server = Server::start_with(&GVISOR);
    let session = server.session();
    let state = || {
        let stat = format!("/proc/{}/stat", kernel_pid(&server));
        let stat = std::fs::read_to_string(stat).unwrap();
        stat.rsplit(") ").next().unwrap().chars().next().unwrap()
    };
    let becomes = |wanted: char| {
        let deadline = Instant::now() + Duration::from_secs(30);
        while state() != wanted {
            assert!(Instant::now() < deadline, "{wanted}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    becomes('T');
    assert_eq!(session.sh("echo again").out(), "again\n");
    becomes('T');
    // Something runs: it goes on running.
    session.sh("setsid sh -c 'while sleep 0.1; do date +%s%N > next; mv next beat; done' >/dev/null 2>&1 &");
    let beat = || session.sh("cat beat").out();
    // Long enough for one in which nothing runs.
    std::thread::sleep(Duration::from_secs(8));
    assert_ne!(state(), 'T');
    let before = beat();
    let deadline = Instant::now() + Duration::from_secs(30);
    while beat() == before {
        assert!(Instant::now() < deadline, "{before}");
    }
    session.sh("pkill -f beat");
    session.destroy();
    server.assert_traces(0);
}

/// Of the only sandbox.
fn kernel_pid(server: &Server) -> i64 {
    let dir = server.data_dir().join("gvisor/sandboxes");
    let dir = std::fs::read_dir(dir).unwrap().next().unwrap().unwrap();
    let record = std::fs::read(dir.path().join("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    record["pid"].as_i64().unwrap()
}
