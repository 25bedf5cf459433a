//! Attempts to reach anything over the network that nobody allowed. What rules about hosts are worth
//! is tried by `egress`, with somebody to reach.

use super::{attempt, everywhere, everywhere_sh};
use k8e_e2e::Server;
use std::net::TcpListener;

#[test]
fn find_another_interface() {
    // gVisor's own stack has a card, whose other end is the gate.
    everywhere(
        "import socket\nprint('tried')\nif {n for _, n in socket.if_nameindex()} - {'lo', 'eth0'}: print('ESCAPED')",
    );
}

#[test]
fn reach_the_hosts_loopback() {
    let host = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = host.local_addr().unwrap().port();
    everywhere(&format!(
        "import socket\nprint('tried')\nfor address in ('127.0.0.1', '::1', '0.0.0.0'):\n    try:\n        socket.create_connection((address, {port}), 2); print('ESCAPED')\n    except OSError: pass"
    ));
}

#[test]
fn reach_the_outside() {
    // Addresses reserved for documentation, where nobody is, and a cloud's metadata. The gate takes every
    // connection; it must answer none.
    everywhere(
        r#"
import socket
for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "169.254.169.254")):
    print("tried", address)
    for kind, port in ((socket.SOCK_STREAM, 443), (socket.SOCK_STREAM, 22), (socket.SOCK_DGRAM, 53)):
        s = socket.socket(family, kind); s.settimeout(3)
        try:
            s.connect((address, port)); s.send(b"hello\n")
            said = s.recv(100)
            if said: print("ESCAPED", address, kind, said)
        except OSError: pass
"#,
    );
}

#[test]
fn open_raw_and_packet_and_vsock_sockets() {
    attempt(
        r#"
for family in (17, 40, 38, 15, 31, 29, 30, 44):   # PACKET VSOCK ALG KEY BLUETOOTH CAN TIPC XDP
    refused(41, family, 3, 0); refused(41, family, 1, 0)
refused(41, 2, 3, 1); refused(41, 10, 3, 58)       # raw ICMP
for protocol in (4, 6, 12, 15, 21): refused(41, 16, 3, protocol)  # netlink: diag, xfrm, netfilter, uevent, crypto
"#,
    );
}

#[test]
fn configure_the_network() {
    everywhere(
        r#"
import socket, struct
print("tried")
s = socket.socket(16, 3, 0)
def send(kind, body):
    s.send(struct.pack("=IHHII", 16 + len(body), kind, 5 | 0x600, 1, 0) + body)
    reply = s.recv(4096)
    return struct.unpack("=i", reply[16:20])[0]
if send(16, struct.pack("=BxHiII", 0, 0, 0, 0, 0) + struct.pack("=HH", 8, 3) + b"k8e\0") == 0: print("ESCAPED link")
if send(20, struct.pack("=BBBBI", 2, 24, 0, 0, 1) + struct.pack("=HH4s", 8, 2, b"\x0a\x00\x00\x01")) == 0: print("ESCAPED address")
"#,
    );
}

#[test]
fn change_the_firewall() {
    everywhere_sh(
        "echo tried; for t in 'iptables -P INPUT DROP' 'nft add table inet x' 'ip link add d type dummy' 'ip addr add 10.0.0.1/8 dev lo'; do $t 2>/dev/null && echo ESCAPED $t; done; true",
    );
}

#[test]
fn reach_an_abstract_socket_of_the_host() {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};
    let name = format!("k8e-escape-{}", std::process::id());
    let _listener =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    everywhere(&format!(
        "import socket\nprint('tried')\ns = socket.socket(socket.AF_UNIX)\ntry:\n    s.connect('\\0{name}'); print('ESCAPED')\nexcept OSError: pass"
    ));
}

#[test]
fn serve_on_its_own_loopback() {
    // Not an escape: what a sandbox may do must work.
    let server = Server::start();
    let ran = server.session().py(
        "import socket\ns = socket.create_server(('127.0.0.1', 80))\nc = socket.create_connection(('localhost', 80))\nprint('ok')",
    );
    assert_eq!(ran.out(), "ok\n", "{}", ran.all());
}
