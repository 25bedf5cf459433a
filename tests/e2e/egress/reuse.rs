//! Attempts with what was allowed once: to somebody else, or until somebody changed it.

use super::{Inside, PRELUDE, RUNTIMES, World, becomes, everywhere};
use k8e_e2e::internet::{CDN, ELSEWHERE, PRIVATE};
use serde_json::json;
use std::net::Ipv4Addr;

/// Keeps listening to `/drip` in the background; `/tmp/{name}` has what was heard, and `ended` when
/// it is over.
fn listen_on(inside: &Inside<'_>, name: &str, url: &str) {
    inside.sh(&format!(
        "setsid sh -c 'curl -sSN --cacert /tmp/ca.pem {url}/drip > /tmp/{name} 2>&1; echo ended >> /tmp/{name}' >/dev/null 2>&1 &\n\
         for n in $(seq 100); do grep -q drip /tmp/{name} 2>/dev/null && exit 0; sleep 0.1; done; cat /tmp/{name}; exit 1"
    ));
}

fn has_ended(inside: &Inside<'_>, name: &str) -> bool {
    inside.sh(&format!("cat /tmp/{name}")).ends_with("ended\n")
}

/// How many connections to an address are open, as those who were connected to see it.
fn open_at(inside: &Inside<'_>, address: Ipv4Addr) -> usize {
    let connections = inside.internet.log().connections();
    let open = connections
        .iter()
        .filter(|one| one.open && one.local.ip() == address);
    open.count()
}

#[test]
fn a_connection_kept_open_across_a_change() {
    let world = World::start(&[]);
    world.everywhere("good.example,elsewhere.example", |inside| {
        inside.may_name("elsewhere.example");
        inside.may_reach(ELSEWHERE, 80);
        inside.may_reach(ELSEWHERE, 443);
        listen_on(inside, "plain", "http://elsewhere.example");
        listen_on(inside, "tls", "https://elsewhere.example");
        listen_on(inside, "stays", "https://good.example");
        assert_eq!(open_at(inside, ELSEWHERE), 2);
        inside.allow("good.example");
        becomes("cut where they were connected to", || open_at(inside, ELSEWHERE) == 0);
        becomes("cut inside", || has_ended(inside, "plain") && has_ended(inside, "tls"));
        assert!(!has_ended(inside, "stays"));
        assert_eq!(open_at(inside, CDN), 1);
        inside.internet.forget();
        inside.tries(&format!(
            "reach('{ELSEWHERE}', 443, hello('elsewhere.example')); reach('{ELSEWHERE}', 80, get('elsewhere.example'))"
        ));
        inside.assert_not_reached(ELSEWHERE);
        inside.assert_denied(json!({ "name": "elsewhere.example", "reason": "policy_changed" }));
    });
}

#[test]
fn what_is_said_on_a_connection_kept_open() {
    // Connections without a name, and one that was HTTP once: each speaks until it is cut.
    let rules =
        "good.example,elsewhere.example,elsewhere.example:7777,45.10.4.0/24:7777,10.99.0.0/24:5432";
    everywhere(rules, |inside| {
        inside.may_name("elsewhere.example");
        let places = [
            (ELSEWHERE, 80),
            (ELSEWHERE, 443),
            (ELSEWHERE, 7777),
            (Ipv4Addr::new(45, 10, 4, 4), 7777),
            (PRIVATE, 5432),
        ];
        for (address, port) in places {
            inside.may_reach(address, port);
        }
        let talk = format!(
            "import threading, websocket\n\
             def keep(name, send, receive):\n    \
             open('/tmp/talks', 'a').write(name + ' ')\n    \
             try:\n        \
             while True:\n            \
             send('before' if not os.path.exists('/tmp/changed') else 'k8e-secret')\n            \
             if not receive(): break\n            \
             time.sleep(0.02)\n    \
             except Exception: pass\n    \
             open('/tmp/cut', 'a').write(name + ' ')\n\
             def plain(name, address, port):\n    \
             s = socket.create_connection((address, port), 10); threading.Thread(target=keep, args=(name, lambda t: s.sendall(t.encode()), lambda: s.recv(100))).start()\n\
             plain('host', resolve('elsewhere.example')[0], 7777); plain('network', '45.10.4.4', 7777); plain('private', '{PRIVATE}', 5432)\n\
             for url in 'ws://elsewhere.example/ws', 'wss://elsewhere.example/ws':\n    \
             c = websocket.create_connection(url, timeout=10, sslopt={{'ca_certs': '/tmp/ca.pem'}}); threading.Thread(target=keep, args=(url, c.send, c.recv)).start()\n"
        );
        inside.sh(&format!(
            "cat > /tmp/talk.py <<'EOF'\n{PRELUDE}\n{talk}\nEOF\nsetsid python3 /tmp/talk.py > /tmp/said 2>&1 &\n\
             for n in $(seq 200); do [ $(wc -w < /tmp/talks) = 5 ] && exit 0; sleep 0.1; done 2>/dev/null; cat /tmp/said; exit 1"
        ));
        let open = || {
            places
                .iter()
                .map(|(address, _)| open_at(inside, *address))
                .sum::<usize>()
        };
        // One place is counted for each of its ports.
        assert!(open() >= 5, "{}", inside.story());
        inside.allow("good.example");
        // What is said from now on arrives nowhere.
        inside.sh("touch /tmp/changed");
        becomes("cut where they were connected to", || open() == 0);
        let cut = || inside.sh("wc -w < /tmp/cut").trim() == "5";
        becomes("cut inside", cut);
    });
}

#[test]
fn an_address_that_a_name_had_that_is_no_longer_allowed() {
    let world = World::start(&[]);
    world.everywhere("good.example,elsewhere.example:7777", |inside| {
        inside.may_name("elsewhere.example");
        inside.may_reach(ELSEWHERE, 7777);
        let ran = inside.python("print(say(resolve('elsewhere.example')[0], 7777, b'before'))");
        assert!(ran.out().contains("b'before'"), "{}", ran.all());
        inside.allow("good.example,good.example:7777");
        inside.internet.forget();
        inside.tries(&format!("reach('{ELSEWHERE}', 7777)"));
        inside.assert_not_reached(ELSEWHERE);
    });
}

#[test]
fn what_another_session_asked_for() {
    let world = World::start(&[]);
    for runtime in RUNTIMES {
        let other = world.session(runtime, &["--allowed-hosts", "elsewhere.example:7777"]);
        let ran = other.python("print(say(resolve('elsewhere.example')[0], 7777, b'other'))");
        assert!(ran.out().contains("b'other'"), "{}", ran.all());
        world.everywhere("good.example,good.example:7777", |inside| {
            inside.tries(&format!(
                "reach('{ELSEWHERE}', 7777); reach('{ELSEWHERE}', 443, hello('elsewhere.example')); reach('{ELSEWHERE}', 443, hello('good.example'))"
            ));
            inside.assert_not_reached(ELSEWHERE);
        });
        other.session.destroy();
    }
}

#[test]
fn what_a_session_had_that_is_over() {
    // Warm sandboxes: the next session gets one that was made before the first was over.
    let world = World::start(&["--pool-min", "1", "--pool-max", "2"]);
    for runtime in RUNTIMES {
        let first = world.session(
            runtime,
            &[
                "--allowed-hosts",
                "elsewhere.example,elsewhere.example:7777",
            ],
        );
        listen_on(&first, "open", "https://elsewhere.example");
        let ran = first.python("print(say(resolve('elsewhere.example')[0], 7777, b'first'))");
        assert!(ran.out().contains("b'first'"), "{}", ran.all());
        first.session.destroy();
        becomes("cut at the end of its session", || {
            open_at(&first, ELSEWHERE) == 0
        });
        world.everywhere("good.example", |inside| {
            inside.tries(&format!(
                "reach('{ELSEWHERE}', 7777); reach('{ELSEWHERE}', 443, hello('elsewhere.example')); reach('{ELSEWHERE}', 80, get('elsewhere.example'))"
            ));
            inside.assert_not_reached(ELSEWHERE);
        });
    }
}

#[test]
fn what_a_session_had_before_a_crash() {
    let mut world = World::start(&["--pool-min", "1", "--pool-max", "2"]);
    for runtime in RUNTIMES {
        let rules = "elsewhere.example,elsewhere.example:7777";
        let id = {
            let first = world.session(runtime, &["--allowed-hosts", rules]);
            listen_on(&first, "open", "https://elsewhere.example");
            first.session.id.clone()
        };
        world.server.kill();
        let open = || {
            world
                .internet
                .log()
                .connections()
                .iter()
                .any(|one| one.open)
        };
        becomes("cut by the crash", || !open());
        world.server.restart();
        assert_eq!(world.server.k8e(&["sandbox", "destroy", &id]).code, 0);
        world.everywhere("good.example", |inside| {
            inside.tries(&format!(
                "reach('{ELSEWHERE}', 7777); reach('{ELSEWHERE}', 443, hello('elsewhere.example')); reach('{ELSEWHERE}', 80, get('elsewhere.example'))"
            ));
            inside.assert_not_reached(ELSEWHERE);
        });
    }
}
