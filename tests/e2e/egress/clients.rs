//! What is allowed works, through the programs that people use, and nothing of it is slowed down
//! or broken by who looks on.

use super::{AUTHORITY, everywhere};
use k8e_e2e::internet::{CDN, ELSEWHERE, PACKAGED, PRIVATE};

#[test]
fn curl() {
    everywhere("good.example", |inside| {
        for scheme in ["http", "https"] {
            let story = inside
                .curl(&format!("{scheme}://good.example/path?query"))
                .unwrap();
            assert!(story.contains("/path?query"), "{story}");
        }
        // As some write it.
        let story = inside.curl("https://GOOD.example/capitals").unwrap();
        assert!(story.contains("/capitals"), "{story}");
        let story = inside.curl("http://good.example:80/port").unwrap();
        assert!(story.contains("/port"), "{story}");
        let both = inside
            .curl("http://good.example/one http://good.example/two")
            .unwrap();
        assert_eq!(both.lines().count(), 2, "{both}");
        let posted = inside
            .curl("--data-binary @/usr/bin/curl https://good.example/posted")
            .unwrap();
        assert!(posted.contains("/posted"), "{posted}");
        let posted = inside
            .curl("--data-binary @/usr/bin/curl http://good.example/posted")
            .unwrap();
        assert!(posted.contains("/posted"), "{posted}");
        let chunked = "-H 'Transfer-Encoding: chunked' --data-binary @/usr/bin/curl http://good.example/chunked http://good.example/next";
        let chunked = inside.curl(chunked).unwrap();
        assert_eq!(chunked.lines().count(), 2, "{chunked}");
        assert!(
            inside
                .curl("--head http://good.example/ http://good.example/")
                .unwrap()
                .contains("200 OK")
        );
    });
}

#[test]
fn large_and_unusual_requests() {
    everywhere("good.example", |inside| {
        inside.sh("head -c 5000000 /dev/zero > /tmp/five");
        for scheme in ["http", "https"] {
            let story = |args: &str| {
                let story = inside.curl(&format!("{args} {scheme}://good.example/unusual"));
                let story = story.unwrap_or_else(|| panic!("{args}: {}", inside.story()));
                assert!(story.contains("/unusual"), "{args}: {story}");
            };
            // curl asks before it sends that much.
            story("--data-binary @/tmp/five");
            story("-T /tmp/five");
            story("-H 'Expect:' --data-binary @/tmp/five");
            story("-H \"Cookie: $(head -c 6000 /dev/zero | tr '\\0' c)\"");
            story("-X PROPFIND");
            story("--http1.0");
            story("-H 'Connection: close'");
        }
        let arrived = inside.internet.log().requests();
        assert!(arrived.iter().any(|request| request.method == "PROPFIND"));
    });
}

#[test]
fn a_body_that_waits_for_a_go() {
    // curl asks before it sends more than a megabyte, and goes on by itself after a second.
    everywhere("good.example", |inside| {
        inside.sh("head -c 3000000 /dev/zero > /tmp/three");
        let curl = "-v -o /dev/null -w '%{http_code} %{time_total}' --expect100-timeout 30 \
                    --data-binary @/tmp/three http://good.example/waits 2>&1";
        let story = inside
            .curl(curl)
            .unwrap_or_else(|| panic!("{}", inside.story()));
        assert!(story.contains("> Expect: 100-continue"), "{story}");
        assert!(story.contains("< HTTP/1.1 100 Continue"), "{story}");
        let (_, took) = story.trim().rsplit_once(' ').unwrap();
        let took: f64 = took.parse().unwrap();
        assert!(took < 20.0, "{took}: curl waited in vain");
        // Who is refused is told so before it sends anything.
        let refused = inside.curl(
            "-v --expect100-timeout 30 --data-binary @/tmp/three http://bad.example/waits 2>&1",
        );
        assert_eq!(refused, None);
    });
}

#[test]
fn answers_as_they_come() {
    // Nobody waits for the rest of an answer before its beginning is passed on.
    everywhere("good.example", |inside| {
        for scheme in ["http", "https"] {
            let ran = inside.python(&format!(
                "import urllib.request\n\
                 context = ssl.create_default_context(cafile='{AUTHORITY}')\n\
                 begun = time.time()\n\
                 answer = urllib.request.urlopen('{scheme}://good.example/drip', timeout=10, context=context)\n\
                 lines = [answer.readline() for _ in range(5)]\n\
                 print(lines == [b'drip\\n'] * 5, time.time() - begun < 5)"
            ));
            assert_eq!(ran.out(), "True True\n", "{}", ran.all());
        }
        // Who stops listening is not served on.
        let open = || {
            inside
                .internet
                .log()
                .connections()
                .iter()
                .any(|one| one.open)
        };
        super::becomes("both ends are closed", || !open());
    });
}

#[test]
fn its_own_addresses() {
    everywhere("good.example", |inside| {
        let ran = inside.python(
            "import threading\n\
             def serve(s):\n    \
             while True:\n        c, _ = s.accept(); c.sendall(b'own'); c.close()\n\
             for family, address in (socket.AF_INET, '0.0.0.0'), (socket.AF_INET6, '::1'):\n    \
             for port in 80, 443, 8000:\n        \
             s = socket.socket(family); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind((address, port)); s.listen()\n        \
             threading.Thread(target=serve, args=(s,), daemon=True).start()\n\
             for port in 80, 443, 8000:\n    \
             for address in '127.0.0.1', '127.1.2.3', 'localhost', '198.18.0.2', '::1', socket.gethostname():\n        \
             try:\n            \
             with socket.create_connection((address, port), 5) as c: said = c.recv(10)\n        \
             except OSError as e: said = e\n        \
             if said != b'own': print(address, port, said)\n\
             u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('0.0.0.0', 5000)); u.settimeout(2)\n\
             for address in '127.0.0.1', '198.18.0.2':\n    \
             c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.settimeout(2); c.sendto(b'own', (address, 5000))\n    \
             try: said, who = u.recvfrom(10); u.sendto(b'back', who); c.recv(10)\n    \
             except OSError as e: print('udp', address, e)",
        );
        assert_eq!(ran.out(), "", "{}", ran.all());
    });
}

#[test]
fn requests_of_python() {
    everywhere("good.example", |inside| {
        let ran = inside.python(&format!(
            "import requests\n\
             for scheme in 'http', 'https':\n    \
             with requests.Session() as session:\n        \
             session.verify = '{AUTHORITY}'\n        \
             for n in range(3): print(session.get(f'{{scheme}}://good.example/{{n}}').json()['target'])\n        \
             print(session.post(f'{{scheme}}://good.example/post', data=b'x' * 100000).json()['host'])"
        ));
        assert_eq!(
            ran.out(),
            "/0\n/1\n/2\ngood.example\n".repeat(2),
            "{}",
            ran.all()
        );
        // Each scheme had one connection, that was kept.
        let connections = inside.internet.log().connections();
        assert_eq!(connections.len(), 2, "{connections:#?}");
    });
}

#[test]
fn pip() {
    everywhere("good.example,pip.example", |inside| {
        inside.internet.zone().address("pip.example", &[CDN]);
        inside.internet.publish_wheel("pip.example");
        inside.may_name("pip.example");
        let said = inside.sh(&format!(
            "cd /tmp && python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check --cert {AUTHORITY} \
             --index-url https://pip.example/simple --target /tmp/packages miniature >&2\n\
             PYTHONPATH=/tmp/packages python3 -c 'import miniature; print(miniature.SAYS)'"
        ));
        assert_eq!(said.trim(), PACKAGED);
    });
}

#[test]
fn npm() {
    everywhere("good.example,npm.example", |inside| {
        inside.internet.zone().address("npm.example", &[CDN]);
        inside.internet.publish_npm("npm.example");
        inside.may_name("npm.example");
        let said = inside.sh(&format!(
            "mkdir -p /tmp/project && cd /tmp/project && export HOME=/tmp\n\
             npm install --no-audit --no-fund --no-update-notifier --cafile {AUTHORITY} --registry https://npm.example/ miniature >&2\n\
             node -p 'require(\"miniature\")'"
        ));
        assert_eq!(said.trim(), PACKAGED);
    });
}

/// What people type works in a new sandbox: no flags, no virtual environment, and programs of a
/// package are found.
#[test]
fn package_managers_as_typed() {
    everywhere("good.example,pip.example,npm.example", |inside| {
        for name in ["pip.example", "npm.example"] {
            inside.internet.zone().address(name, &[CDN]);
            inside.may_name(name);
        }
        inside.internet.publish_wheel("pip.example");
        inside.internet.publish_npm("npm.example");
        let index =
            format!("export PIP_INDEX_URL=https://pip.example/simple PIP_CERT={AUTHORITY}\n");
        for install in ["pip install", "pip3 install", "python3 -m pip install"] {
            let said = inside.sh(&format!(
                "{index}{install} miniature >&2\nminiature\npython3 -m pip uninstall -y miniature >&2"
            ));
            assert_eq!(said.trim(), PACKAGED, "{install}");
        }
        // Not root: it goes below the user's home, which is in PATH too.
        let user = [
            "--user",
            "user",
            "--workdir",
            "/home/user",
            "--timeout",
            "300",
        ];
        let ran = inside.session.run(
            &user,
            &format!("{index}pip install miniature >&2\nminiature"),
        );
        assert_eq!(ran.out().trim(), PACKAGED, "{}", ran.all());
        let said = inside.sh(&format!(
            "export NPM_CONFIG_REGISTRY=https://npm.example/ NPM_CONFIG_CAFILE={AUTHORITY}\n\
             npm install miniature >&2\nnode -p 'require(\"miniature\")'"
        ));
        assert_eq!(said.trim(), PACKAGED);
        let apt = inside.session.sh("apt-get install -y miniature");
        assert_eq!(apt.code, 1, "{}", apt.all());
        assert_eq!(
            apt.err(),
            "apt-get: system packages cannot be installed in this sandbox: its /usr is the host's, without the \
             database of packages. Use pip or npm, or install the package on the machine that runs k8e server: new \
             sessions have it.\n"
        );
    });
}

/// A package manager that may not reach its index says so soon: npm's own settings are for 70 seconds.
#[test]
fn package_managers_that_are_denied() {
    everywhere("good.example", |inside| {
        let denied =
            "PIP_INDEX_URL=https://pip.example/simple NPM_CONFIG_REGISTRY=https://npm.example/";
        let ran = inside.session.run(
            &["--timeout", "50"],
            &format!("export {denied}\nnpm install miniature >&2; echo npm $?\npip install miniature >&2; echo pip $?"),
        );
        assert_eq!(ran.out(), "npm 1\npip 1\n", "{}", ran.all());
        let hint = format!(
            "k8e: the sandbox may not reach npm.example, pip.example: \
             `k8e sandbox allow-hosts --session-id {} --add npm.example,pip.example` allows it\n",
            inside.session.id
        );
        assert!(ran.err().ends_with(&hint), "{}", ran.all());
    });
}

#[test]
fn git() {
    everywhere("good.example,git.example", |inside| {
        inside.internet.zone().address("git.example", &[CDN]);
        inside.internet.publish_git("git.example");
        inside.may_name("git.example");
        let said = inside.sh(&format!(
            "cd /tmp && export HOME=/tmp GIT_SSL_CAINFO={AUTHORITY}\n\
             git clone --quiet https://git.example/miniature.git && cat miniature/README"
        ));
        assert_eq!(said, PACKAGED);
    });
}

#[test]
fn a_websocket() {
    everywhere("good.example", |inside| {
        let ran = inside.python(&format!(
            "import websocket\n\
             for url in 'ws://good.example/ws', 'wss://good.example/ws':\n    \
             c = websocket.create_connection(url, timeout=10, sslopt={{'ca_certs': '{AUTHORITY}'}})\n    \
             for text in 'hello', 'x' * 60000:\n        \
             c.send(text); print(c.recv() == text)\n    \
             time.sleep(1); c.ping(); c.send('later'); print(c.recv()); c.close()"
        ));
        assert_eq!(ran.out(), "True\nTrue\nlater\n".repeat(2), "{}", ran.all());
    });
}

#[test]
fn a_large_hello() {
    everywhere("good.example", |inside| {
        // One of OpenSSL's in one record, and larger and in pieces by hand.
        let ran = inside.python(&format!(
            "context = ssl.create_default_context(cafile='{AUTHORITY}')\n\
             context.set_alpn_protocols(['http/1.1'] + [f'protocol-{{n}}-' + 'x' * 40 for n in range(240)])\n\
             s = context.wrap_socket(socket.create_connection(('good.example', 443), 10), server_hostname='good.example')\n\
             s.sendall(get('good.example', '/large', more='Connection: close\\r\\n')); print(b'/large' in b''.join(iter(lambda: s.recv(65536), b'')))\n\
             address = resolve('good.example')[0]\n\
             padding = extension(21, b'\\0' * 30000)\n\
             for data in [[hello('good.example', more=padding)], [hello('good.example', size=100)], [hello('good.example', size=1)]]:\n    \
             print(say(address, 443, pieces=data)[:1])\n\
             whole = hello('good.example'); print(say(address, 443, pieces=[bytes([b]) for b in whole[:100]] + [whole[100:]])[:1])\n\
             print(say(address, 443, records(hello_body(padding, server_name('good.example'))))[:1])"
        ));
        let answered = ran.out().matches("b'\\x16'").count();
        assert!(ran.out().contains("True") && answered == 5, "{}", ran.all());
    });
}

#[test]
fn a_request_in_pieces() {
    everywhere("good.example", |inside| {
        let ran = inside.python(
            "whole = get('good.example', '/pieces', more='X: ' + 'y' * 5000 + '\\r\\n')\n\
             address = resolve('good.example')[0]\n\
             print(b'/pieces' in say(address, 80, pieces=[bytes([b]) for b in whole[:60]] + [whole[60:100], whole[100:]]))\n\
             s = socket.create_connection((address, 80), 10); s.settimeout(10)\n\
             s.sendall(get('good.example', '/one') + get('good.example', '/two') + get('good.example', '/three', more='Connection: close\\r\\n'))\n\
             print(b''.join(iter(lambda: s.recv(65536), b'')).count(b'HTTP/1.1 200'))",
        );
        assert!(
            ran.out().contains("True") && ran.out().ends_with("3\n"),
            "{}",
            ran.all()
        );
    });
}

#[test]
fn a_port_of_a_host() {
    let rules = "good.example,good.example:8443,good.example:7777,elsewhere.example:22";
    everywhere(rules, |inside| {
        inside.may_name("elsewhere.example");
        inside.may_reach(CDN, 8443);
        inside.may_reach(CDN, 7777);
        inside.may_reach(ELSEWHERE, 22);
        let story = inside.curl("https://good.example:8443/other").unwrap();
        assert!(story.contains("/other"), "{story}");
        // One who speaks first, and one who goes on when only one side has ended.
        let ran = inside.python(
            "s = socket.create_connection(('elsewhere.example', 22), 10); s.settimeout(10); print(s.recv(100))\n\
             s = socket.create_connection(('good.example', 7777), 10); s.settimeout(10)\n\
             s.sendall(b'half' * 1000); s.shutdown(socket.SHUT_WR)\n\
             print(len(b''.join(iter(lambda: s.recv(65536), b''))))\n\
             reach(resolve('elsewhere.example')[0], 443, hello('elsewhere.example'))",
        );
        assert!(
            ran.out().contains("b'SSH-2.0-miniature\\r\\n'\n4000\n"),
            "{}",
            ran.all()
        );
        assert!(!ran.out().contains("ESCAPED"), "{}", ran.all());
    });
}

#[test]
fn a_port_of_a_network() {
    let rules = "good.example,10.99.0.0/24:5432,45.10.3.1:22";
    everywhere(rules, |inside| {
        inside.may_reach(PRIVATE, 5432);
        inside.may_reach(ELSEWHERE, 22);
        let ran = inside.python(&format!(
            "print(say('{PRIVATE}', 5432, b'data base')); print(say('{ELSEWHERE}', 22, b''))"
        ));
        assert!(ran.out().contains("b'data base'"), "{}", ran.all());
        assert!(
            ran.out().contains("b'SSH-2.0-miniature\\r\\n'"),
            "{}",
            ran.all()
        );
    });
}

#[test]
fn a_private_address_of_a_name_that_a_network_covers() {
    everywhere("good.example,inner.example,10.99.0.0/24:443", |inside| {
        inside.internet.zone().address("inner.example", &[PRIVATE]);
        inside.may_name("inner.example");
        inside.may_reach(PRIVATE, 443);
        let story = inside.curl("https://inner.example/inner").unwrap();
        assert!(story.contains(&PRIVATE.to_string()), "{story}");
    });
}

#[test]
fn an_alias() {
    everywhere("good.example,alias.example", |inside| {
        inside
            .internet
            .zone()
            .alias("alias.example", "chain.example");
        inside
            .internet
            .zone()
            .alias("chain.example", "elsewhere.example");
        inside.may_name("alias.example");
        inside.may_reach(ELSEWHERE, 443);
        let story = inside.curl("https://alias.example/alias").unwrap();
        assert!(story.contains(&ELSEWHERE.to_string()), "{story}");
    });
}

#[test]
fn a_large_download() {
    everywhere("good.example", |inside| {
        for scheme in ["http", "https"] {
            let got = inside.curl(&format!(
                "--max-time 120 -o /dev/null -w '%{{size_download}}' {scheme}://good.example/bytes/200000000"
            ));
            assert_eq!(got.as_deref(), Some("200000000"));
        }
    });
}

#[test]
fn many_connections_at_once() {
    everywhere("good.example", |inside| {
        let said = inside.sh(&format!(
            "cd /tmp; seq 40 | xargs -P 40 -I N curl -sSf --max-time 60 --cacert {AUTHORITY} -o out.N -w '%{{size_download}}\\n' https://good.example/bytes/300000"
        ));
        assert_eq!(said, "300000\n".repeat(40));
    });
}

#[test]
fn who_is_not_there() {
    // It is allowed and does not answer: that is seen at once, not after minutes.
    everywhere("good.example,good.example:9", |inside| {
        inside.may_reach(CDN, 9);
        let ran = inside.python(
            "begun = time.time(); say(resolve('good.example')[0], 9, b'x', wait=20); print(time.time() - begun < 10)",
        );
        assert!(ran.out().ends_with("True\n"), "{}", ran.all());
    });
}
