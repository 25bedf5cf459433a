//! Sockets in somebody else's network namespace.
//!
//! A socket belongs to the namespace of the thread that made it, for as long as it lives. So one
//! thread, which does nothing else, goes into a sandbox's namespace, makes the sockets, and goes on
//! to the next.

use crate::EgressError;
use crate::sys;
use crate::wire::{DNS_PORT, GATE_PORT, GATEWAY};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc;
use tokio::sync::oneshot;

/// What a program may have waiting: more than it may have open.
const BACKLOG: i32 = 1024;

/// Goes into namespaces.
pub(crate) struct Worker(mpsc::Sender<Job>);

/// Everything a gate listens on. Ready for tokio: they do not block.
pub(crate) struct Sockets {
    pub(crate) dns_udp: UdpSocket,
    pub(crate) dns_tcp: TcpListener,
    pub(crate) tcp: TcpListener,
    pub(crate) udp: UdpSocket,
}

struct Job {
    namespace: OwnedFd,
    done: oneshot::Sender<io::Result<Sockets>>,
}

// === impl Worker ===

impl Worker {
    pub(crate) fn start() -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        std::thread::Builder::new()
            .name("egress-netns".to_owned())
            .spawn(move || {
                for job in inbox {
                    // Whoever asked may have gone.
                    let _ = job.done.send(enter(&job.namespace));
                }
            })?;
        Ok(Self(jobs))
    }

    pub(crate) async fn sockets(&self, namespace: OwnedFd) -> Result<Sockets, EgressError> {
        let (done, sockets) = oneshot::channel();
        let job = Job { namespace, done };
        self.0.send(job).map_err(|_| EgressError::NoWorker)?;
        let sockets = sockets.await.map_err(|_| EgressError::NoWorker)?;
        sockets.map_err(EgressError::step(
            "listen in the sandbox's network namespace",
        ))
    }
}

fn enter(namespace: &OwnedFd) -> io::Result<Sockets> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    let udp = bind(Type::DGRAM, Protocol::UDP, GATE_PORT)?;
    sys::tell_original_destination(udp.as_fd())?;
    Ok(Sockets {
        dns_udp: bind(Type::DGRAM, Protocol::UDP, DNS_PORT)?.into(),
        dns_tcp: listen(DNS_PORT)?,
        tcp: listen(GATE_PORT)?,
        udp: udp.into(),
    })
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = bind(Type::STREAM, Protocol::TCP, port)?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn bind(kind: Type, protocol: Protocol, port: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, kind.nonblocking(), Some(protocol))?;
    // Connections of an earlier server may still be closing.
    socket.set_reuse_address(kind == Type::STREAM)?;
    // Takes what is meant for other addresses.
    socket.set_ip_transparent_v4(true)?;
    socket.bind(&SocketAddrV4::new(GATEWAY, port).into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{self, ADDRESS};
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpStream};
    use std::time::Duration;

    const SOMEBODY: Ipv4Addr = Ipv4Addr::new(45, 10, 1, 1);

    /// On a thread of its own, which is in a namespace that is wired like a sandbox's.
    fn inside<T: Send>(test: impl FnOnce(Sockets) -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                sys::new_namespace().expect("this test makes a network namespace: run it as root");
                wire::shared_kernel().unwrap();
                let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
                test(enter(&namespace.into()).unwrap())
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
    fn a_connection_to_anywhere_arrives_at_the_gate_with_the_address_it_was_for() {
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
    fn names_are_asked_of_the_gateway_and_of_nobody_else() {
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
    fn without_a_gate_a_connection_is_refused_at_once() {
        inside(|sockets| {
            drop(sockets);
            let to = SocketAddrV4::new(SOMEBODY, 443).into();
            let refused = TcpStream::connect_timeout(&to, Duration::from_secs(5)).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        });
    }

    #[test]
    fn inside_programs_talk_to_each_other() {
        inside(|sockets| {
            for address in [Ipv4Addr::LOCALHOST, ADDRESS] {
                let server = TcpListener::bind((address, 443)).unwrap();
                TcpStream::connect((address, 443)).unwrap();
                server.accept().unwrap();
            }
            assert!(sockets.tcp.accept().is_err());
        });
    }

    #[test]
    fn a_card_leads_to_the_gate() {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                sys::new_namespace().unwrap();
                wire::card().unwrap();
                wire::connect_card().unwrap();
                let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
                enter(&namespace.into()).unwrap();
            });
            inside.join().unwrap();
        });
    }
}
