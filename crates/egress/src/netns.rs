//! The listening sockets of a gate, opened inside a sandbox's network namespace.
//!
//! A socket belongs to the namespace of the thread that made it, for as long as it lives. So a
//! privileged process enters the namespace with `setns`, opens the sockets ([`Sockets::open_in`])
//! and passes them to the server as file descriptors; the server needs no privilege over the namespace.

use crate::sys;
use crate::tproxy::{DNS_PORT, GATE_PORT, GATEWAY};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

/// Listen backlog: more than the connections that a sandbox may have open.
const BACKLOG: i32 = 1024;

/// All sockets of a gate, non-blocking.
#[derive(Debug)]
pub struct Sockets {
    pub(crate) dns_udp: UdpSocket,
    pub(crate) dns_tcp: TcpListener,
    pub(crate) tcp: TcpListener,
    pub(crate) udp: UdpSocket,
}

// === impl Sockets ===

impl Sockets {
    /// Moves the calling thread into `namespace` (`setns`), where it stays, and opens the sockets.
    ///
    /// # Errors
    ///
    /// When a socket cannot be made, or a program inside has bound its port.
    pub fn open_in(namespace: BorrowedFd<'_>) -> io::Result<Self> {
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        let udp = bind(Type::DGRAM, Protocol::UDP, GATE_PORT)?;
        sys::tell_original_destination(udp.as_fd())?;
        Ok(Self {
            dns_udp: bind(Type::DGRAM, Protocol::UDP, DNS_PORT)?.into(),
            dns_tcp: listen(DNS_PORT)?,
            tcp: listen(GATE_PORT)?,
            udp: udp.into(),
        })
    }

    /// The file descriptors, to pass to another process; see [`Sockets::from_descriptors`].
    #[must_use]
    pub fn into_descriptors(self) -> [OwnedFd; 4] {
        [
            self.dns_udp.into(),
            self.dns_tcp.into(),
            self.tcp.into(),
            self.udp.into(),
        ]
    }

    /// The sockets from [`Sockets::into_descriptors`], in that order; none unless there are four.
    #[must_use]
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let [dns_udp, dns_tcp, tcp, udp] = <[OwnedFd; 4]>::try_from(descriptors).ok()?;
        Some(Self {
            dns_udp: dns_udp.into(),
            dns_tcp: dns_tcp.into(),
            tcp: tcp.into(),
            udp: udp.into(),
        })
    }
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = bind(Type::STREAM, Protocol::TCP, port)?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn bind(kind: Type, protocol: Protocol, port: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, kind.nonblocking(), Some(protocol))?;
    // Connections of an earlier server may be in TIME_WAIT.
    socket.set_reuse_address(kind == Type::STREAM)?;
    // TPROXY: accept what is addressed to any host.
    socket.set_ip_transparent_v4(true)?;
    socket.bind(&SocketAddrV4::new(GATEWAY, port).into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tproxy::{self, ADDRESS};
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpStream};
    use std::time::Duration;

    const SOMEBODY: Ipv4Addr = Ipv4Addr::new(45, 10, 1, 1);

    /// Runs `test` on a thread in a network namespace that is set up like a native sandbox's.
    fn inside<T: Send>(test: impl FnOnce(Sockets) -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                sys::new_namespace().expect("this test makes a network namespace: run it as root");
                tproxy::shared_kernel().unwrap();
                let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
                let opened = Sockets::open_in(namespace.as_fd()).unwrap();
                // As if another process had passed them.
                let handed = opened.into_descriptors().into();
                test(Sockets::from_descriptors(handed).unwrap())
            });
            inside.join().unwrap()
        })
    }

    fn wait(socket: &impl std::os::fd::AsFd) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let limit = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        let ready = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit));
        assert_eq!(ready.unwrap(), 1, "nothing arrived");
    }

    #[test]
    fn tproxy_delivers_every_connection_with_its_original_destination() {
        inside(|sockets| {
            for port in [443, 22, GATE_PORT, DNS_PORT] {
                let to = SocketAddrV4::new(SOMEBODY, port);
                let mut client = TcpStream::connect(to).unwrap();
                wait(&sockets.tcp);
                let (mut server, from) = sockets.tcp.accept().unwrap();
                assert_eq!(server.local_addr().unwrap(), to.into());
                assert_eq!(from.ip(), ADDRESS);
                server.write_all(b"hello").unwrap();
                drop(server);
                let mut said = String::new();
                client.read_to_string(&mut said).unwrap();
                assert_eq!(said, "hello");
            }
        });
    }

    #[test]
    fn dns_queries_to_the_gateway_reach_the_dns_socket_and_others_do_not() {
        inside(|sockets| {
            let client = UdpSocket::bind((ADDRESS, 0)).unwrap();
            client.send_to(b"who", (GATEWAY, DNS_PORT)).unwrap();
            wait(&sockets.dns_udp);
            let mut bytes = [0; 16];
            let (length, from) = sockets.dns_udp.recv_from(&mut bytes).unwrap();
            assert_eq!(
                (&bytes[..length], from),
                (&b"who"[..], client.local_addr().unwrap())
            );
            sockets.dns_udp.send_to(b"me", from).unwrap();
            wait(&client);
            let (_, from) = client.recv_from(&mut bytes).unwrap();
            assert_eq!(from, SocketAddrV4::new(GATEWAY, DNS_PORT).into());
            TcpStream::connect((GATEWAY, DNS_PORT)).unwrap();
            wait(&sockets.dns_tcp);
            client.send_to(b"who", (SOMEBODY, DNS_PORT)).unwrap();
            wait(&sockets.udp);
            let told = sys::original_destination(&sockets.udp).unwrap();
            assert_eq!(told, Some(SocketAddrV4::new(SOMEBODY, DNS_PORT)));
            assert!(sockets.dns_udp.recv_from(&mut bytes).is_err());
        });
    }

    #[test]
    fn without_listening_sockets_a_connection_is_reset() {
        inside(|sockets| {
            drop(sockets);
            let to = SocketAddrV4::new(SOMEBODY, 443).into();
            let refused = TcpStream::connect_timeout(&to, Duration::from_secs(5)).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        });
    }

    #[test]
    fn programs_inside_connect_to_each_other() {
        inside(|sockets| {
            for address in [Ipv4Addr::LOCALHOST, ADDRESS] {
                let server = TcpListener::bind((address, 443)).unwrap();
                TcpStream::connect((address, 443)).unwrap();
                server.accept().unwrap();
            }
            assert!(sockets.tcp.accept().is_err());
        });
    }

    /// Runs `ip` in the namespace of the calling thread.
    fn ip(args: &str) {
        let mut ip = std::process::Command::new("ip");
        let status = ip.args(args.split(' ')).status().expect("iproute2");
        assert!(status.success(), "ip {args}: {status}");
    }

    /// The veth end is moved to a namespace of its own, whose network stack then is to the gate what that
    /// of a user-space kernel is: it has the interface, the sandbox's address, and a route to the gateway.
    #[test]
    fn a_veth_leads_to_the_gate() {
        const PORTS: [u16; 3] = [443, 22, GATE_PORT];
        let (thread_sender, thread) = std::sync::mpsc::channel();
        let (moved_sender, moved) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let kernel = scope.spawn(move || {
                sys::new_namespace().unwrap();
                thread_sender.send(rustix::thread::gettid()).unwrap();
                moved.recv().expect("the interface");
                ip(&format!("address add {ADDRESS}/30 dev eth0"));
                ip("link set eth0 up");
                ip(&format!("route add default via {GATEWAY}"));
                for port in PORTS {
                    let to = SocketAddrV4::new(SOMEBODY, port).into();
                    let limit = Duration::from_secs(10);
                    let mut client = TcpStream::connect_timeout(&to, limit).unwrap();
                    let mut reply = String::new();
                    client.read_to_string(&mut reply).unwrap();
                    assert_eq!(reply, "hello");
                }
            });
            let gate = scope.spawn(move || {
                sys::new_namespace().unwrap();
                tproxy::veth().unwrap();
                tproxy::connect_veth().unwrap();
                let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
                let sockets = Sockets::open_in(namespace.as_fd()).unwrap();
                let thread = thread.recv().unwrap().as_raw_nonzero();
                ip(&format!("link set eth0 netns {thread}"));
                moved_sender.send(()).unwrap();
                for port in PORTS {
                    wait(&sockets.tcp);
                    let (mut server, from) = sockets.tcp.accept().unwrap();
                    let to = SocketAddrV4::new(SOMEBODY, port);
                    assert_eq!(server.local_addr().unwrap(), to.into());
                    assert_eq!(from.ip(), ADDRESS);
                    server.write_all(b"hello").unwrap();
                }
            });
            gate.join().unwrap();
            kernel.join().unwrap();
        });
    }
}
