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

#[test]
fn use_other_protocols_of_ip() {
    // ICMP (ping), UDP-Lite, SCTP, DCCP, MPTCP, SMC: kernel code that nothing needs. Asking for one would
    // also load its module.
    attempt(
        r#"
flags = (0, 0o4000, 0o2000000, 0o2004000)      # SOCK_NONBLOCK, SOCK_CLOEXEC
for family in (2, 10):
    for flag in flags:
        for kind in (0, 3, 4, 5, 6, 10): refused(41, family, kind | flag, 0)
        for protocol in (1, 17, 33, 58, 132, 136, 255, 256, 262): refused(41, family, 1 | flag, protocol)
        for protocol in (1, 6, 33, 58, 132, 136, 255, 256, 262): refused(41, family, 2 | flag, protocol)
refused(41, 43, 1, 0)                          # SMC as a family
# The kernel looks at 32 bits of each register.
refused(41, 2 | 1 << 32, 1, 262); refused(41, 2, 1 | 1 << 40, 262); refused(41, 2, 1, 262 | 1 << 33)
"#,
    );
}

#[test]
fn use_other_protocols_in_pairs() {
    // A pair of sockets that cannot be one is refused after both were made, and their module loaded.
    attempt(
        r#"
pair = (ctypes.c_int * 2)()
for family in (2, 10, 16, 17, 30, 38, 40): refused(53, family, 1, 132, pair); refused(53, family, 2, 0, pair)
"#,
    );
}

#[test]
fn use_other_protocols_of_netlink() {
    attempt(
        "for protocol in range(1, 32):\n    if protocol != 9: refused(41, 16, 3, protocol); refused(41, 16, 2 | 0o2000000, protocol)",
    );
}

#[test]
fn use_ordinary_sockets() {
    // Not an escape: what programs use must work.
    let server = Server::start();
    let ran = server.session().py(
        "import socket\n\
         for family in (socket.AF_INET, socket.AF_INET6):\n\
        \x20   for kind, protocol in ((1, 0), (1, 6), (2, 0), (2, 17)):\n\
        \x20       for flag in (0, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC): socket.socket(family, kind | flag, protocol).close()\n\
         for kind in (1, 2, 5): socket.socketpair(socket.AF_UNIX, kind)\n\
         s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
         print(s.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR), len(socket.if_nameindex()) > 0)",
    );
    assert_eq!(ran.out(), "1 True\n", "{}", ran.all());
}

#[test]
fn take_powers_over_packets() {
    // Marks, other people's addresses, another's connection, buffers beyond the machine's limit.
    everywhere(
        r#"
import socket
print("tried")
s = socket.socket()
for level, option in ((1, 36), (0, 19), (6, 19), (1, 32), (1, 33), (41, 75), (1, 12)):
    try:
        s.setsockopt(level, option, 7)
        if option not in (12,) and s.getsockopt(level, option) == 7: print("ESCAPED", level, option)
    except OSError: pass
"#,
    );
}

#[test]
fn read_and_replace_the_firewall_by_options() {
    attempt(
        r#"
import socket, fcntl
s = socket.socket()
size = ctypes.c_int(84)
for option in (64, 65): refused(55, s.fileno(), 0, option, (ctypes.c_char * 84)(), ctypes.byref(size), by=(errno.EPERM, errno.ENOPROTOOPT))
refused(54, s.fileno(), 0, 64, (ctypes.c_char * 84)(), 84, by=(errno.EPERM, errno.ENOPROTOOPT))
for request in (0x8914, 0x8916, 0x891c, 0x8922, 0x8924, 0x890b, 0x89a0, 0x8946):   # flags, address, mask, mtu, mac, route, bridge, ethtool
    refused(16, s.fileno(), request, (ctypes.c_char * 128)(*b"lo"), by=(errno.EPERM, errno.ENOPKG, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.ENOTTY, errno.EFAULT))
"#,
    );
}
