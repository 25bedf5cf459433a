//! Who decides what a sandbox may reach, when, and where that can be read.

use super::{GOOD, Inside, RUNTIMES, World, everywhere};
use k8e_e2e::internet::{ATTACKER, CDN, ELSEWHERE};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What `get` says of it.
fn rules(inside: &Inside<'_>) -> Value {
    let got = inside
        .world
        .server
        .k8e(&["sandbox", "get", &inside.session.id]);
    got.json()["allowed_hosts"].clone()
}

fn reaches(inside: &Inside<'_>, name: &str) -> bool {
    inside
        .curl(&format!("--connect-timeout 5 https://{name}/"))
        .is_some()
}

fn change(inside: &Inside<'_>, args: &[&str]) {
    let id = ["--session-id", &inside.session.id];
    let args = [&["sandbox", "allow-hosts"], args, &id].concat();
    let ran = inside.world.server.k8e(&args);
    assert_eq!(ran.code, 0, "{}", ran.all());
}

#[test]
fn who_does_not_say_gets_the_default_list() {
    let world = World::start(&[]);
    // Every name there is, so that it is the list that tells them apart.
    world.internet.zone().address("*", &[CDN]);
    let inside = world.session("native", &[]);
    let listed = rules(&inside);
    let listed = listed.as_array().expect("a list");
    assert!(listed.len() >= 4, "{listed:?}");
    for name in listed.iter().map(|name| name.as_str().unwrap()) {
        let name = name.replace("*.", "any.");
        assert!(reaches(&inside, &name), "{name}: {}", inside.story());
    }
    assert!(!reaches(&inside, GOOD));
    inside.assert_denied(json!({ "protocol": "dns", "name": GOOD }));
}

#[test]
fn a_server_has_a_default_of_its_own() {
    let world = World::start(&["--allowed-hosts", "good.example,*.suffix.example"]);
    let inside = world.session("native", &[]);
    assert_eq!(rules(&inside), json!(["good.example", "*.suffix.example"]));
    inside.works();
    let none = world.session("native", &["--allowed-hosts", "none"]);
    assert_eq!(rules(&none), json!(["none"]));
    assert!(!reaches(&none, GOOD));
}

#[test]
fn none() {
    let world = World::start(&[]);
    for runtime in RUNTIMES {
        let inside = world.session(runtime, &["--allowed-hosts", "none"]);
        inside.tries(&format!(
            "if resolve('good.example'): escaped()\nreach('{CDN}', 443, hello('good.example')); reach('{CDN}', 80, get('good.example')); reach('{ATTACKER}', 7777)"
        ));
        inside.assert_not_asked();
        assert!(inside.internet.reached().is_empty());
        inside.session.destroy();
    }
}

#[test]
fn all() {
    let world = World::start(&[]);
    let made = world
        .server
        .k8e(&["sandbox", "create", "--allowed-hosts", "all"]);
    assert_eq!(made.code, 0, "{}", made.all());
    // Said loudly.
    assert!(made.err().to_lowercase().contains("all"), "{}", made.all());
    world.everywhere("all", |inside| {
        inside.may_reach(ATTACKER, 443);
        inside.may_reach(ATTACKER, 7777);
        inside.may_name("attacker.example");
        assert_eq!(rules(inside), json!(["all"]));
        assert!(reaches(inside, "attacker.example"));
        let ran = inside.python(&format!("print(say('{ATTACKER}', 7777, b'open'))"));
        assert!(ran.out().contains("b'open'"), "{}", ran.all());
    });
}

#[test]
fn names_below_a_name() {
    everywhere("good.example,*.attacker.example", |inside| {
        inside.may_reach(ATTACKER, 443);
        inside.may_name("a.attacker.example");
        inside.may_name("c.b.attacker.example");
        assert!(reaches(inside, "a.attacker.example"));
        assert!(reaches(inside, "c.b.attacker.example"));
        // Not the name itself, and nothing below the other.
        assert!(!reaches(inside, "attacker.example"));
        assert!(!reaches(inside, "a.good.example"));
    });
}

#[test]
fn rules_change_while_it_runs() {
    everywhere("good.example", |inside| {
        inside.may_name("other.example");
        inside.may_name("bad.example");
        assert!(!reaches(inside, "other.example"));
        change(inside, &["--add", "other.example"]);
        assert_eq!(rules(inside), json!(["good.example", "other.example"]));
        assert!(reaches(inside, "other.example") && reaches(inside, GOOD));
        change(inside, &["--remove", "good.example"]);
        assert_eq!(rules(inside), json!(["other.example"]));
        assert!(reaches(inside, "other.example") && !reaches(inside, GOOD));
        change(inside, &["bad.example"]);
        assert!(reaches(inside, "bad.example") && !reaches(inside, "other.example"));
        change(inside, &["--clear"]);
        assert_eq!(rules(inside), json!(["none"]));
        assert!(!reaches(inside, "bad.example") && !reaches(inside, GOOD));
        change(inside, &["good.example"]);
    });
}

#[test]
fn what_the_server_denies_nobody_allows() {
    let world = World::start(&[
        "--denied-hosts",
        "bad.example,*.attacker.example,45.10.3.0/24",
    ]);
    let rules = "good.example,bad.example,*.attacker.example,elsewhere.example,45.10.3.0/24:7777";
    world.everywhere(rules, |inside| {
        for name in ["bad.example", "a.attacker.example"] {
            assert!(!reaches(inside, name), "{name}");
            inside.assert_denied(json!({ "name": name, "reason": "deny_list" }));
        }
        // The name is not denied, its address is.
        inside.may_name("elsewhere.example");
        inside.tries(&format!(
            "reach('{ELSEWHERE}', 7777); reach('{CDN}', 443, hello('bad.example')); reach('{CDN}', 80, get('bad.example'))"
        ));
        assert!(!reaches(inside, "elsewhere.example"));
        change(inside, &["all"]);
        assert!(!reaches(inside, "bad.example"));
        inside.tries(&format!(
            "reach('{ELSEWHERE}', 7777); reach('{CDN}', 443, hello('bad.example')); reach('{CDN}', 80, get('bad.example'))"
        ));
    });
}

#[test]
fn what_is_denied_to_one_tenant() {
    let world = World::start(&["--denied-hosts", "acme=other.example"]);
    for runtime in RUNTIMES {
        let acme = [
            "--tenant",
            "acme",
            "--allowed-hosts",
            "good.example,other.example",
        ];
        let acme = world.session(runtime, &acme);
        assert!(!reaches(&acme, "other.example"));
        acme.assert_denied(json!({ "name": "other.example", "reason": "deny_list" }));
        acme.works();
        acme.assert_bounds();
        let rest = [
            "--tenant",
            "rest",
            "--allowed-hosts",
            "good.example,other.example",
        ];
        let rest = world.session(runtime, &rest);
        assert!(reaches(&rest, "other.example"));
        acme.session.destroy();
        rest.session.destroy();
    }
}

#[test]
fn a_single_run_has_rules_as_well() {
    let world = World::start(&[]);
    for runtime in RUNTIMES {
        let flags = [
            "sandbox",
            "run",
            "--raw",
            "--runtime",
            runtime,
            "--allowed-hosts",
            GOOD,
        ];
        let run = |code: &str| {
            let tenant = ["--tenant", runtime];
            world.server.k8e(&[&flags[..], &tenant, &[code]].concat())
        };
        let ran = run("curl -sSf http://good.example/run");
        assert!(ran.out().contains("/run"), "{}", ran.all());
        let ran = run("curl -sSf --max-time 10 http://bad.example/run");
        assert_ne!(ran.code, 0, "{}", ran.all());
    }
}

#[test]
fn rules_that_are_none_are_refused() {
    let world = World::start(&[]);
    let inside = world.session("native", &["--allowed-hosts", GOOD]);
    for rule in [
        "good example",
        "*.*.example",
        "*",
        "http://good.example",
        "good.example:0",
        "good.example:99999",
        "10.0.0.0/33:80",
        "all,good.example",
        "none,good.example",
        "@nobody",
        "-bad.example",
        "good.example:",
        "::1",
        "ex*mple.example",
        "good.example/path",
    ] {
        let id = &inside.session.id;
        let create = ["sandbox", "create", "--allowed-hosts", rule];
        let update = ["sandbox", "allow-hosts", rule, "--session-id", id];
        for args in [&create[..], &update] {
            let ran = world.server.k8e(args);
            assert_ne!(ran.code, 0, "{rule}: {}", ran.all());
        }
    }
    assert_eq!(rules(&inside), json!([GOOD]));
}

#[test]
fn connections_are_counted() {
    let world = World::start(&["--egress-connections-max", "8"]);
    world.everywhere(GOOD, |inside| {
        let ran = inside.python(
            "address = resolve('good.example')[0]; held = []; served = 0\n\
             for n in range(30):\n    \
             s = socket.socket(); s.settimeout(2); held.append(s)\n    \
             try:\n        s.connect((address, 80)); s.sendall(get('good.example', '/counted')); served += b' 200 ' in s.recv(1000)\n    \
             except OSError: pass\n\
             print('served', served)\n\
             for s in held: s.close()",
        );
        let served = ran.out().trim().rsplit(' ').next().unwrap().parse::<u32>();
        let served = served.unwrap();
        assert!((1..=8).contains(&served), "{}", ran.all());
        inside.assert_denied(json!({ "reason": "too_many_connections" }));
    });
}

#[test]
fn bytes_are_counted() {
    const BANDWIDTH: u32 = 2 << 20;
    let world = World::start(&["--egress-bandwidth", "2MiB"]);
    world.everywhere(GOOD, |inside| {
        let begun = Instant::now();
        let bytes = BANDWIDTH * 4;
        let got = inside.curl(&format!(
            "--max-time 60 -o /dev/null -w '%{{size_download}}' https://good.example/bytes/{bytes}"
        ));
        assert_eq!(got, Some(bytes.to_string()));
        // What may come at once is a second's worth at most.
        let took = begun.elapsed();
        assert!(took > Duration::from_millis(2500), "{took:?}");
        assert!(took < Duration::from_secs(20), "{took:?}");
    });
}

#[test]
fn somebody_takes_away_the_rules_of_the_hosts_firewall() {
    let world = World::start(&[]);
    world.everywhere(GOOD, |inside| {
        let flush = || {
            let output = inside.internet.on_host("/usr/sbin/nft", &["flush", "ruleset"]);
            assert!(output.status.success(), "{output:?}");
        };
        let attempts = format!(
            "reach('{ATTACKER}', 443, hello('bad.example')); reach('{ATTACKER}', 80, get('bad.example')); reach('{CDN}', 443, hello('bad.example')); datagram('{ATTACKER}', 443)"
        );
        inside.tries(&attempts);
        flush();
        inside.tries(&attempts);
        inside.works();
        // As Docker does: whatever is not its own is dropped, or all is let through.
        let set = "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy accept; }";
        let output = inside.internet.on_host("/usr/sbin/nft", &[set]);
        assert!(output.status.success(), "{output:?}");
        let sysctl = "echo 1 > /proc/sys/net/ipv4/ip_forward";
        assert!(inside.internet.on_host("sh", &["-c", sysctl]).status.success());
        inside.tries(&attempts);
        flush();
    });
}

#[test]
fn what_was_let_through_is_told_as_well() {
    everywhere(GOOD, |inside| {
        inside.works();
        let told = inside
            .world
            .server
            .k8e(&["sandbox", "egress", &inside.session.id])
            .json();
        assert_eq!(told["session_id"], inside.session.id.as_str());
        let flows = told["flows"].as_array().unwrap();
        let allowed = |flow: &&Value| {
            flow["verdict"] == "allowed" && flow["protocol"] == "tcp" && flow["name"] == GOOD
        };
        let flow = flows.iter().find(allowed);
        let flow = flow.unwrap_or_else(|| panic!("{flows:#?}"));
        assert_eq!(flow["address"], CDN.to_string());
        assert_eq!(flow["port"], 443);
        assert_eq!(flow["rule"], GOOD);
        assert!(flow["count"].as_u64() >= Some(1), "{flow}");
    });
}

#[test]
fn verdicts_are_counted() {
    let world = World::start(&["--metrics-listen", "127.0.0.1:9464"]);
    let inside = world.session("native", &["--allowed-hosts", GOOD]);
    inside.works();
    inside.tries(&format!(
        "resolve('secret-name.example'); reach('{CDN}', 443, hello('secret-name.example')); datagram('{ATTACKER}', 443)"
    ));
    inside.assert_denied(json!({ "protocol": "udp" }));
    let args = ["-sSf", "http://127.0.0.1:9464/metrics"];
    let output = inside.internet.on_host("curl", &args);
    let metrics = String::from_utf8(output.stdout).unwrap();
    let flows: Vec<&str> = metrics
        .lines()
        .filter(|line| line.starts_with("k8e_egress_flows_total{"))
        .collect();
    for labels in [
        ["allowed", "tcp", ""],
        ["denied", "dns", "not_allowed"],
        ["denied", "tcp", "not_allowed"],
        ["denied", "udp", "protocol"],
    ] {
        let labels = labels.map(|label| format!("\"{label}\""));
        let is = |line: &&&str| labels.iter().all(|label| line.contains(label));
        assert!(flows.iter().any(|line| is(&line)), "{labels:?}: {flows:#?}");
    }
    // What a sandbox chose is nobody's label.
    assert!(!metrics.contains("secret-name") && !metrics.contains("good.example"));
}
