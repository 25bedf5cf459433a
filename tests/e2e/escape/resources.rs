//! Attempts to starve the host and the neighbours.

use k8e_e2e::{Server, Session};
use std::time::{Duration, Instant};

/// The neighbour answers, soon, with the attacker still there.
fn assert_answers(session: &Session<'_>) {
    let start = Instant::now();
    let ran = session.sh("echo $((40 + 2))");
    assert_eq!(ran.out(), "42\n", "{}", ran.all());
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "the neighbour took {:?}",
        start.elapsed()
    );
}

#[test]
fn fork_bomb() {
    let server = Server::start();
    let (attacker, neighbour) = (server.session(), server.session());
    let bomb = attacker.run_json(&["--timeout", "5"], ":(){ :|:& };:; sleep 3; exit 0");
    assert!(
        bomb["limits_hit"]
            .as_array()
            .is_some_and(|hit| hit.iter().any(|kind| kind == "pids")),
        "{bomb}"
    );
    assert_answers(&neighbour);
    let get = server.k8e(&["sandbox", "get", &attacker.id]).json();
    assert!(get["pids_refused"].as_u64().unwrap() > 0, "{get}");
    // Files still work in a sandbox that cannot fork.
    let written = server.k8e_with(&["sandbox", "write", &attacker.id, "after"], b"x");
    assert_eq!(written.code, 0, "{}", written.all());
    attacker.destroy();
    assert_answers(&neighbour);
}

#[test]
fn memory_bomb() {
    let server = Server::start();
    let (attacker, neighbour) = (
        server.session_with(&["--memory", "128MiB"]),
        server.session(),
    );
    let bomb = attacker.run_json(
        &["--lang", "python", "--timeout", "60"],
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
    );
    assert_eq!(bomb["status"], "oom_killed", "{bomb}");
    assert_eq!(bomb["exit_code"], 137, "{bomb}");
    assert_eq!(bomb["limits_hit"][0], "memory", "{bomb}");
    assert_answers(&neighbour);
    assert_answers(&attacker);
}

#[test]
fn memory_bomb_of_small_processes() {
    // Nothing is bigger than the guest, yet the guest must not be the one that goes.
    let server = Server::start();
    let attacker = server.session_with(&["--memory", "32MiB"]);
    let scores = attacker.sh("sleep 0.2; cat /proc/self/oom_score_adj /proc/1/oom_score_adj");
    assert_eq!(scores.out(), "500\n0\n", "{}", scores.all());
    for _ in 0..3 {
        attacker.run(
            &["--timeout", "20"],
            "i=0; while :; do head -c 4M /dev/zero > /dev/shm/$i || exit; i=$((i+1)); done",
        );
        attacker.sh("rm -f /dev/shm/*");
    }
    assert_answers(&attacker);
}

#[test]
fn memory_bomb_in_shared_memory() {
    let server = Server::start();
    let (attacker, neighbour) = (
        server.session_with(&["--memory", "64MiB"]),
        server.session(),
    );
    let ran =
        attacker.sh("head -c 400M /dev/zero > /dev/shm/x; echo \"exit $?\"; rm -f /dev/shm/x");
    assert!(!ran.out().contains("exit 0"), "{}", ran.all());
    assert_answers(&neighbour);
}

#[test]
fn disk_bomb() {
    let server = Server::start();
    let (attacker, neighbour) = (server.session_with(&["--disk", "64MiB"]), server.session());
    for place in ["/workspace", "/tmp", "/usr/lib", "/root", "/var/tmp"] {
        let ran = attacker.sh(&format!(
            "head -c 200M /dev/zero > {place}/bomb; echo \"exit $?\"; rm -f {place}/bomb"
        ));
        assert!(ran.out().contains("exit 1"), "{place}: {}", ran.all());
        assert!(
            ran.err().contains("No space left"),
            "{place}: {}",
            ran.all()
        );
    }
    let image = std::fs::metadata(find_image(&server, "disk.img")).unwrap();
    assert!(image.len() <= 64 << 20 || image.len() == 4 << 30);
    let big = vec![7u8; 100 << 20];
    let written = server.k8e_with(&["sandbox", "write", &attacker.id, "big"], &big);
    assert_eq!(written.code, 1, "{}", written.all());
    assert!(written.out().contains("disk"), "{}", written.all());
    assert_answers(&neighbour);
}

#[test]
fn disk_bomb_where_disks_are_memory() {
    let server = Server::start_with(&["--memory-disks"]);
    let (attacker, neighbour) = (server.session_with(&["--disk", "64MiB"]), server.session());
    for place in ["/workspace", "/tmp", "/usr/lib"] {
        let ran = attacker.sh(&format!(
            "head -c 200M /dev/zero > {place}/bomb; echo \"exit $?\"; rm -f {place}/bomb"
        ));
        assert!(
            ran.out().contains("exit 1") && ran.err().contains("No space left"),
            "{place}: {}",
            ran.all()
        );
    }
    assert_eq!(attacker.sh("echo kept > f; cat f").out(), "kept\n");
    let status = server.k8e(&["sandbox", "status"]).json();
    assert!(
        status.to_string().contains("in memory"),
        "the server says so: {status}"
    );
    assert_answers(&neighbour);
}

#[test]
fn inode_bomb() {
    let server = Server::start();
    let (attacker, neighbour) = (server.session_with(&["--disk", "32MiB"]), server.session());
    let ran = attacker.py(
        "import os\nos.mkdir('/workspace/b')\ntry:\n    for i in range(10_000_000): open(f'/workspace/b/{i}', 'w').close()\nexcept OSError as e: print('stopped', e.errno)",
    );
    assert!(ran.out().contains("stopped 28"), "{}", ran.all());
    assert_answers(&neighbour);
}

#[test]
fn cpu_hog() {
    let server = Server::start();
    let (attacker, neighbour) = (server.session(), server.session());
    attacker.sh("for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; true");
    for _ in 0..3 {
        assert_answers(&neighbour);
    }
    assert_answers(&attacker);
    attacker.destroy();
}

#[test]
fn open_every_file() {
    let server = Server::start();
    let (attacker, neighbour) = (server.session(), server.session());
    let ran = attacker.py("import os\nfds = []\ntry:\n    while True: fds.append(os.open('/dev/null', 0))\nexcept OSError as e: print('stopped', e.errno, len(fds) <= 65536)");
    assert_eq!(ran.out(), "stopped 24 True\n", "{}", ran.all());
    assert_answers(&neighbour);
}

#[test]
fn flood_with_output() {
    let server = Server::start();
    let (attacker, neighbour) = (server.session(), server.session());
    let flood = attacker.run_json(&["--timeout", "3"], "yes flood; yes flood >&2");
    assert_eq!(flood["status"], "timed_out", "{}", flood["status"]);
    assert_eq!(flood["truncated"], true);
    assert_answers(&neighbour);
}

#[test]
fn use_all_of_the_disk() {
    // What it reads and writes past every cache, in bytes a second, with a limit and with the default one.
    let direct = |flags: &[&str]| {
        let server = Server::start_with(flags);
        let ran = server.session().py(DIRECT);
        let said: Vec<f64> = ran.out().split_whitespace().flat_map(str::parse).collect();
        assert_eq!(said.len(), 2, "the attempt was not made: {}", ran.all());
        said
    };
    let limited = direct(&["--disk-bandwidth", "4MiB"]);
    let few = direct(&["--disk-iops", "16"]);
    let free = direct(&[]);
    for (at, what) in ["written", "read"].into_iter().enumerate() {
        let limit = f64::from(4 << 20);
        assert!(
            limited[at] < limit * 2.0,
            "{what}: {} bytes a second",
            limited[at]
        );
        // 256 KiB each.
        assert!(few[at] < limit * 2.0, "{what}: {} bytes a second", few[at]);
        assert!(
            free[at] > limited[at] * 2.0 && free[at] > few[at] * 2.0,
            "{what}: {} bytes a second without a limit, {} and {} with one",
            free[at],
            limited[at],
            few[at]
        );
    }
}

/// Writes and reads 256 KiB at a time for four seconds each; prints bytes a second.
const DIRECT: &str = r#"
import mmap, os, time
block = mmap.mmap(-1, 256 << 10)
block.write(b"x" * len(block))
file = os.open("/workspace/direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
def rate(act):
    start, done = time.monotonic(), 0
    while time.monotonic() - start < 4:
        for at in range(0, 1 << 20, 256 << 10): done += act(at)
    return done / (time.monotonic() - start)
print(rate(lambda at: os.pwrite(file, block, at)), rate(lambda at: os.preadv(file, [block], at)))
"#;

fn find_image(server: &Server, name: &str) -> std::path::PathBuf {
    let dir = server.data_dir().join("native/sandboxes");
    let entries = std::fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().path().join(name))
        .find(|path| path.exists())
        .expect("an image")
}
