//! Attempts by whoever answers for a name: it is allowed, and suddenly somewhere else.

use super::{Inside, World, everywhere};
use k8e_e2e::internet::{
    ATTACKER, ATTACKER_V6, CDN, Data, ELSEWHERE, HOST, HOST_PUBLIC, METADATA, PLATFORM, PRIVATE,
    UPLINK,
};
use serde_json::json;
use std::net::Ipv4Addr;

/// Asks for a name that is first here and then there, and connects to each address that it was
/// ever said to be, and to `there`.
fn rebind(inside: &Inside<'_>, there: &[Ipv4Addr]) {
    for (number, address) in there.iter().enumerate() {
        let name = format!("r{number}.rebind.example");
        let turns = vec![vec![CDN.into()], vec![(*address).into()]];
        inside.internet.zone().turns(&name, 0, turns);
        let direct = format!("d{number}.rebind.example");
        inside.internet.zone().address(&direct, &[*address]);
        let mixed = format!("m{number}.rebind.example");
        inside.internet.zone().address(&mixed, &[*address, CDN]);
        for name in [&name, &direct, &mixed] {
            inside.may_name(name);
        }
        inside.tries(&format!(
            "for name in '{name}', '{direct}', '{mixed}':\n    \
             seen = {{'{address}'}}\n    \
             for turn in range(4):\n        \
             seen.update(resolve(name))\n        \
             for a in seen - {{'{CDN}'}}:\n            \
             reach(a, 80, get(name), wait=0.4); reach(a, 443, hello(name), wait=0.4)\n        \
             time.sleep(0.05)\n    \
             if '{address}' in resolve(name): escaped('told', name)"
        ));
    }
}

const RULES: &str = "good.example,*.rebind.example";

#[test]
fn to_the_machine_itself() {
    everywhere(RULES, |inside| {
        let loopback = Ipv4Addr::LOCALHOST;
        rebind(
            inside,
            &[loopback, HOST, HOST_PUBLIC, Ipv4Addr::UNSPECIFIED],
        );
        assert!(inside.internet.host_log().connections().is_empty());
        inside
            .assert_denied(json!({ "address": HOST_PUBLIC.to_string(), "reason": "this_machine" }));
    });
}

#[test]
fn to_the_metadata_of_the_cloud() {
    everywhere(RULES, |inside| {
        rebind(inside, &[METADATA]);
        inside.assert_denied(json!({ "address": METADATA.to_string() }));
    });
}

#[test]
fn to_the_platform_services_of_clouds() {
    everywhere(RULES, |inside| {
        rebind(inside, &PLATFORM);
        for address in PLATFORM {
            inside.assert_denied(
                json!({ "address": address.to_string(), "port": 80, "reason": "this_machine" }),
            );
        }
    });
}

#[test]
fn to_neighbours() {
    everywhere(RULES, |inside| {
        let sandboxes = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];
        rebind(inside, &[&[PRIVATE, UPLINK][..], &sandboxes].concat());
    });
}

#[test]
fn to_nobody() {
    everywhere(RULES, |inside| {
        let groups = [Ipv4Addr::new(224, 0, 0, 1), Ipv4Addr::BROADCAST];
        rebind(
            inside,
            &[&groups[..], &[Ipv4Addr::new(0, 1, 2, 3)]].concat(),
        );
    });
}

#[test]
fn an_alias_of_a_denied_name() {
    let world = World::start(&["--denied-hosts", "elsewhere.example,*.denied.example"]);
    world.everywhere(
        "good.example,alias.example,long.example,elsewhere.example",
        |inside| {
            let zone = inside.internet.zone();
            zone.alias("alias.example", "elsewhere.example");
            zone.alias("long.example", "x.denied.example");
            zone.alias("x.denied.example", "y.example");
            zone.address("y.example", &[ELSEWHERE]);
            inside.may_name("alias.example");
            inside.may_name("long.example");
            inside.tries(
                "for name in 'alias.example', 'long.example', 'elsewhere.example':\n    \
             if resolve(name): escaped(name)\n    tried(name)\n    \
             reach('45.10.3.1', 443, hello(name)); reach('45.10.3.1', 80, get(name))",
            );
            inside.assert_denied(json!({ "reason": "deny_list" }));
        },
    );
}

#[test]
fn an_alias_of_something_private() {
    everywhere("good.example,alias.example", |inside| {
        let zone = inside.internet.zone();
        zone.alias("alias.example", "inner.example");
        zone.address("inner.example", &[PRIVATE, METADATA]);
        inside.may_name("alias.example");
        inside.tries(&format!(
            "if resolve('alias.example'): escaped()\n\
             for a in '{PRIVATE}', '{METADATA}': reach(a, 443, hello('alias.example')); reach(a, 80, get('alias.example'))"
        ));
    });
}

#[test]
fn an_answer_that_lasts_no_time() {
    everywhere("good.example,*.rebind.example", |inside| {
        // Public and private in turn, each answer good for no second at all.
        let turn = |n: usize| vec![if n.is_multiple_of(2) { CDN } else { METADATA }.into()];
        inside
            .internet
            .zone()
            .turns("zero.rebind.example", 0, (0..200).map(turn).collect());
        inside.may_name("zero.rebind.example");
        inside.tries(&format!(
            "for n in range(30):\n    \
             for a in resolve('zero.rebind.example'):\n        \
             if a != '{CDN}': escaped(a)\n        \
             say(a, 80, get('zero.rebind.example', '/turn'))\n    \
             reach('{METADATA}', 80, get('zero.rebind.example'))"
        ));
    });
}

#[test]
fn a_huge_answer() {
    everywhere("good.example,*.rebind.example", |inside| {
        let zone = inside.internet.zone();
        let many = |count: u16| -> Vec<Ipv4Addr> {
            (0..count)
                .map(|n| Ipv4Addr::from(u32::from(Ipv4Addr::new(45, 11, 0, 0)) + u32::from(n)))
                .collect()
        };
        zone.address("many.rebind.example", &many(200));
        // As much as a message can hold.
        zone.address("all.rebind.example", &many(4000));
        let mut mixed = vec![PRIVATE; 200];
        mixed.push(CDN);
        zone.address("mixed.rebind.example", &mixed);
        for name in ["many", "all", "mixed"] {
            inside.may_name(&format!("{name}.rebind.example"));
        }
        for address in many(4000) {
            inside.may_reach(address, 80);
        }
        let ran = inside.tries(&format!(
            "many = resolve('many.rebind.example'); print('many', len(many))\n\
             if not many or not say(many[0], 80, get('many.rebind.example', '/many')): print('many failed')\n\
             print('all', len(resolve('all.rebind.example')))\n\
             if '{PRIVATE}' in resolve('mixed.rebind.example'): escaped('mixed')\n\
             reach('{ATTACKER}', 80, get('many.rebind.example')); reach('45.12.0.1', 80, get('all.rebind.example'))\n\
             reach('{PRIVATE}', 80, get('mixed.rebind.example'))"
        ));
        assert!(!ran.out().contains("many failed"), "{}", ran.all());
    });
}

#[test]
fn records_that_nobody_asked_for() {
    everywhere("good.example,*.rebind.example", |inside| {
        let stray = |name: &str, address: Ipv4Addr| Data::Stray(name.to_owned(), address.into());
        let answer = vec![
            stray("good.example", ATTACKER),
            CDN.into(),
            stray("good.example", ATTACKER),
            stray("other.rebind.example", ATTACKER),
            stray("bad.example", CDN),
        ];
        inside
            .internet
            .zone()
            .turns("stray.rebind.example", 300, vec![answer]);
        inside.may_name("stray.rebind.example");
        inside.tries(&format!(
            "if '{ATTACKER}' in resolve('stray.rebind.example'): escaped('told')\n\
             for name in 'good.example', 'other.rebind.example', 'stray.rebind.example':\n    \
             reach('{ATTACKER}', 443, hello(name)); reach('{ATTACKER}', 80, get(name))\n\
             reach('{CDN}', 443, hello('bad.example'))"
        ));
        inside.may_name("other.rebind.example");
    });
}

#[test]
fn an_address_of_ipv6() {
    everywhere("good.example,*.rebind.example", |inside| {
        let six = vec![Data::Address(ATTACKER_V6.into())];
        inside
            .internet
            .zone()
            .turns("six.rebind.example", 300, vec![six]);
        inside.may_name("six.rebind.example");
        inside.tries(
            "try:\n    found = socket.getaddrinfo('six.rebind.example', 443)\nexcept OSError: found = []\n\
             tried(found)\nfor kind in found: escaped(kind)",
        );
        assert_eq!(
            inside.curl("-k https://six.rebind.example/k8e-secret"),
            None
        );
    });
}

#[test]
fn a_circle_of_aliases_and_a_resolver_that_fails() {
    everywhere("good.example,*.rebind.example", |inside| {
        let zone = inside.internet.zone();
        zone.alias("a.rebind.example", "b.rebind.example");
        zone.alias("b.rebind.example", "a.rebind.example");
        zone.turns("fails.rebind.example", 0, vec![vec![Data::Failure]]);
        zone.turns("silent.rebind.example", 0, vec![vec![Data::Silence]]);
        for name in ["a", "b", "fails", "silent"] {
            inside.may_name(&format!("{name}.rebind.example"));
        }
        // Others are answered meanwhile.
        inside.tries(
            "import threading\n\
             for name in 'a', 'b', 'fails', 'silent':\n    \
             threading.Thread(target=lambda: ask_udp(GATEWAY, question(name + '.rebind.example'), wait=5)).start()\n\
             begun = time.time(); found = resolve('good.example'); tried(found, time.time() - begun)\n\
             if not found: escaped('nobody was answered')",
        );
    });
}
