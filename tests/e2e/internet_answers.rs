//! The miniature internet itself: what must not be reached from a sandbox is there, and answers
//! those on the host who ask. Else no test that nothing arrived would prove anything.

use k8e_e2e::internet::{
    ATTACKER, ATTACKER_V6, CDN, DNS, Data, HOST_PUBLIC, Internet, METADATA, PRIVATE, RESOLVER,
};
use std::net::{IpAddr, Ipv4Addr};

/// Asks with curl on the host; what was answered.
fn curl(internet: &Internet, args: &[&str]) -> String {
    let ca = internet.files("authority").join("ca.pem");
    std::fs::write(&ca, internet.authority()).unwrap();
    let common = ["--silent", "--show-error", "--max-time", "20", "--cacert"];
    let args = [&common[..], &[ca.to_str().unwrap()], args].concat();
    let output = internet.on_host("curl", &args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "curl {args:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs Python on the host; what it printed.
fn python(internet: &Internet, script: &str) -> String {
    let output = internet.on_host("/usr/bin/python3", &["-c", script]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asks a resolver, and prints flags, the number of answers, and their data.
const ASK: &str = r#"
import socket, struct, ssl
def question(name, kind=1):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\0"
    return struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack(">HH", kind, 1)
def udp(server, name, kind=1):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)
    s.sendto(question(name, kind), (server, 53))
    return s.recv(65535)
def exchange(s, name, kind=1):
    q = question(name, kind); s.sendall(struct.pack(">H", len(q)) + q)
    f = s.makefile("rb"); n, = struct.unpack(">H", f.read(2)); return f.read(n)
def tcp(server, name, kind=1):
    return exchange(socket.create_connection((server, 53), 5), name, kind)
def tls(server, name):
    c = ssl._create_unverified_context()
    return exchange(c.wrap_socket(socket.create_connection((server, 853), 5)), name)
def show(m):
    _, flags, _, answers, _, _ = struct.unpack(">6H", m[:12])
    print(f"{flags:04x}", answers, ".".join(map(str, m[-4:])) if answers else "-")
"#;

#[test]
fn every_name_at_every_address_answers() {
    let internet = Internet::start();
    let at = |name: &str, port: u16, address: IpAddr| format!("{name}:{port}:{address}");
    for (name, address) in [
        ("good.example", IpAddr::from(CDN)),
        ("bad.example", CDN.into()),
        ("attacker.example", ATTACKER.into()),
        ("metadata.example", METADATA.into()),
        ("private.example", PRIVATE.into()),
        ("anything.example", Ipv4Addr::new(8, 8, 8, 8).into()),
        ("sixth.example", ATTACKER_V6.into()),
        ("itself.example", HOST_PUBLIC.into()),
    ] {
        for (scheme, port) in [
            ("http", 80),
            ("https", 443),
            ("http", 3128),
            ("https", 8443),
        ] {
            let resolve = at(name, port, address);
            let url = format!("{scheme}://{name}:{port}/some/where");
            let story = curl(&internet, &["--resolve", &resolve, &url]);
            let story: serde_json::Value = serde_json::from_str(&story).unwrap();
            assert_eq!(story["address"], address.to_string());
            let shown = scheme == "https";
            assert_eq!(story["tls_name"].as_str(), shown.then_some(name));
            assert!(story["host"].as_str().unwrap().starts_with(name), "{story}");
        }
    }
    let requests = internet.log().requests();
    assert_eq!(requests.len(), 28, "{requests:#?}");
    assert_eq!(internet.host_log().requests().len(), 4);
    assert!(
        requests
            .iter()
            .all(|request| request.target == "/some/where")
    );
    let connections = internet.log().connections();
    assert_eq!(connections.len(), 28);
    // Raw, a name in a ClientHello can be read.
    assert!(internet.log().contains(b"metadata.example"));
    let reached = internet.reached();
    assert!(
        reached
            .keys()
            .any(|to| to.address == METADATA && to.port == 8443)
    );
    assert!(
        reached
            .keys()
            .any(|to| to.address == ATTACKER_V6 && to.port == 443)
    );
    assert!(internet.reached_host().keys().any(|to| to.port == 443));
    internet.forget();
    assert!(internet.reached().is_empty(), "{:?}", internet.reached());
    assert!(internet.reached_host().is_empty());
}

#[test]
fn resolvers_answer_over_udp_tcp_and_tls() {
    let internet = Internet::start();
    let many: Vec<Ipv4Addr> = (0..200).map(|n| Ipv4Addr::new(45, 10, 4, n)).collect();
    internet.zone().address("many.example", &many);
    internet.zone().alias("alias.example", "chain.example");
    internet.zone().alias("chain.example", "good.example");
    let turns = vec![vec![CDN.into()], vec![PRIVATE.into()]];
    internet.zone().turns("turns.example", 0, turns);
    let six = vec![Data::Address(ATTACKER_V6.into())];
    internet.zone().turns("six.example", 60, vec![six]);
    let said = python(
        &internet,
        &format!(
            "{ASK}\nd, r = '{DNS}', '{RESOLVER}'\n\
             for ask in udp, tcp:\n    for server in d, r: show(ask(server, 'gOOd.example'))\n\
             show(tls(r, 'good.example'))\n\
             show(udp(d, 'alias.example')); show(udp(d, 'a.b.good.example'))\n\
             show(udp(d, 'none.example')); show(udp(d, 'many.example')); show(tcp(d, 'many.example'))\n\
             for _ in range(3): show(udp(d, 'turns.example'))\n\
             show(udp(d, 'six.example')); show(udp(d, 'six.example', 28))"
        ),
    );
    let cdn = format!("8180 1 {CDN}");
    let expected = [
        &cdn,
        &cdn,
        &cdn,
        &cdn,
        &cdn,
        &format!("8180 3 {CDN}"),
        &cdn,
        "8183 0 -",
        "8380 0 -",
        "8180 200 45.10.4.199",
        &cdn,
        &format!("8180 1 {PRIVATE}"),
        &format!("8180 1 {PRIVATE}"),
        "8180 0 -",
        "8180 1 0.0.0.102",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected, "{said}");
    let queries = internet.log().queries();
    assert_eq!(queries.len(), expected.len());
    assert_eq!(queries[0].name, "gOOd.example");
    assert_eq!(queries[1].local.ip(), RESOLVER);
    // Programs that use the resolver of the system would find it as well.
    assert!(internet.reached().keys().all(|to| to.address == RESOLVER));
}

#[test]
fn ports_that_speak_something_else_answer() {
    let internet = Internet::start();
    let said = python(
        &internet,
        &format!(
            r#"
import socket
for port in 7777, 5432:
    s = socket.create_connection(("{ATTACKER}", port), 5); s.sendall(b"tcp " + str(port).encode())
    print(s.recv(100).decode())
s = socket.create_connection(("{CDN}", 22), 5); print(s.recv(100).decode().strip())
for address in "{ATTACKER}", "{METADATA}", "{PRIVATE}", "{HOST_PUBLIC}":
    for port in 443, 123, 53, 7777:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)
        s.sendto(f"udp {{address}} {{port}}".encode(), (address, port)); print(s.recv(100).decode())
"#
        ),
    );
    assert!(
        said.starts_with("tcp 7777\ntcp 5432\nSSH-2.0-miniature\n"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 3 + 16, "{said}");
    assert_eq!(internet.log().datagrams().len(), 12);
    assert!(internet.log().contains(b"udp 169.254.169.254 123"));
    assert!(internet.log().connections().iter().all(|one| !one.open));
}

#[test]
fn packets_that_nobody_listens_for_are_seen() {
    let internet = Internet::start();
    python(
        &internet,
        &format!(
            r#"
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b"x", ("{ATTACKER}", 9999))
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); s.sendto(b"\x08\0\xf7\xff\0\0\0\0", ("{CDN}", 0))
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 132); s.sendto(b"\0\1\0\2" + b"\0" * 12, ("{CDN}", 0))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.bind(("10.98.0.2", 0))
s.sendto(b"x", ("255.255.255.255", 67)); s.sendto(b"x", ("224.0.0.251", 5353))
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); s.sendto(b"x", ("{ATTACKER_V6}", 443))
"#
        ),
    );
    internet.settle();
    let reached = internet.reached();
    let seen = |protocol: u8, address: &str, port: u16| {
        let address: IpAddr = address.parse().unwrap();
        let is = |to: &k8e_e2e::internet::Destination| {
            (to.protocol, to.address, to.port) == (protocol, address, port)
        };
        assert!(
            reached.keys().any(is),
            "{protocol} {address} {port}: {reached:#?}"
        );
    };
    seen(17, &ATTACKER.to_string(), 9999);
    seen(1, &CDN.to_string(), 8);
    seen(132, &CDN.to_string(), 2);
    seen(17, "255.255.255.255", 67);
    seen(17, "224.0.0.251", 5353);
    seen(17, &ATTACKER_V6.to_string(), 443);
}

#[test]
fn connections_are_kept_and_upgraded() {
    let internet = Internet::start();
    let said = python(
        &internet,
        &format!(
            r#"
import http.client, socket
c = http.client.HTTPConnection("{CDN}", 80, timeout=5)
for host in "good.example", "bad.example":
    c.request("GET", "/", headers={{"Host": host}}); print(host in c.getresponse().read().decode())
s = socket.create_connection(("{CDN}", 80), 5)
s.sendall(b"GET /ws HTTP/1.1\r\nHost: good.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
          b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
head = b""
while b"\r\n\r\n" not in head: head += s.recv(1)
print(b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head)
s.sendall(b"\x81\x85" + b"\0\0\0\0" + b"hello"); print(s.recv(100))
s = socket.create_connection(("{ATTACKER}", 3128), 5)
s.sendall(b"CONNECT bad.example:443 HTTP/1.1\r\nHost: bad.example:443\r\n\r\n"); print(b" 200 " in s.recv(1000))
s.sendall(b"through"); print(s.recv(100))
"#
        ),
    );
    assert_eq!(
        said,
        "True\nTrue\nTrue\nb'\\x81\\x05hello'\nTrue\nb'through'\n"
    );
    assert_eq!(internet.log().connections().len(), 3);
    assert_eq!(internet.log().requests().len(), 4);
}

#[test]
fn large_answers_and_redirects() {
    let internet = Internet::start();
    let resolve = format!("good.example:443:{CDN}");
    let get = |args: &[&str]| curl(&internet, &[&["--resolve", &resolve], args].concat());
    let size = ["--output", "/dev/null", "--write-out", "%{size_download}"];
    let big = get(&[&size[..], &["https://good.example/bytes/200000000"]].concat());
    assert_eq!(big, "200000000");
    let url = "https://good.example/redirect?to=http://45.10.2.66/there";
    let there = get(&["--location", url]);
    assert!(there.contains("45.10.2.66"), "{there}");
}

#[test]
fn packages_and_a_repository_can_be_fetched() {
    let internet = Internet::start();
    internet.publish_wheel("pip.example");
    internet.publish_npm("npm.example");
    internet.publish_git("git.example");
    let get = |name: &str, path: &str| {
        let resolve = format!("{name}:443:{CDN}");
        let url = format!("https://{name}/{path}");
        curl(
            &internet,
            &["--fail", "--resolve", &resolve, "--output", "-", &url],
        )
    };
    let page = get("pip.example", "simple/miniature/");
    assert!(page.contains("miniature-1.0-py3-none-any.whl"), "{page}");
    let wheel = get(
        "pip.example",
        "simple/miniature/miniature-1.0-py3-none-any.whl",
    );
    assert!(wheel.starts_with("PK"));
    let about = get("npm.example", "miniature");
    assert!(about.contains("miniature-1.0.0.tgz"), "{about}");
    get("npm.example", "miniature/-/miniature-1.0.0.tgz");
    let refs = get(
        "git.example",
        "miniature.git/info/refs?service=git-upload-pack",
    );
    assert!(refs.contains("refs/heads/main"), "{refs}");
}
