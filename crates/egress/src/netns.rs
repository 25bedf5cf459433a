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
