//! Which user owns the client's end of a TCP connection on this machine's loopback (`sock_diag(7)`).
//!
//! The kernel is asked about one connection, so it costs the same however many there are. It looks up addresses, ports and
//! interface, and when it finds no such connection it answers with another socket: a listener on that port, or what is
//! left of a connection that was closed, which has no owner and reads as uid 0. So an answer counts only when every
//! field of it is what was asked for, of an established connection that a process still holds. Anything else is an
//! error, and the client is refused.

use rustix::fd::AsFd;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, getpeername,
    getsockname, netlink, recvfrom, sendto, socket_with,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

// From <linux/netlink.h>, <linux/sock_diag.h>, <linux/inet_diag.h> and <net/tcp_states.h>.
const NLM_F_REQUEST: u16 = 1;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const NO_COOKIE: [u8; 8] = [0xff; 8];
const TCP_ESTABLISHED: u8 = 1;

const SOCK_DIAG: Protocol = netlink::SOCK_DIAG;

const HEADER_BYTES: usize = 16;
/// A header and one `inet_diag_req_v2`.
const REQUEST_BYTES: usize = HEADER_BYTES + 56;
/// A header and one `inet_diag_msg`; attributes may follow.
const ANSWER_BYTES_MIN: usize = HEADER_BYTES + 72;
/// The answer has attributes that we do not ask for, at most a page of them.
const REPLY_BYTES_MAX: usize = 4096;

/// The interface of a socket that is bound to none (`SO_BINDTODEVICE`).
const ANY_INTERFACE: u32 = 0;

/// Why the owner of a connection is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unknown {
    #[error("it does not come from this machine's loopback")]
    NotLoopback,
    #[error("the connection was closed meanwhile")]
    Closed,
    #[error("the kernel cannot be asked (sock_diag)")]
    CannotAsk,
    #[error("the kernel knows no such connection")]
    NoSuchConnection,
    #[error("the kernel answered about another socket, or one that is bound to an interface")]
    AnotherSocket,
    #[error("the client's end is not established, or no process holds it any more")]
    NotEstablished,
}

/// The fields of an `inet_diag_msg` that are looked at, from the client's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Answer {
    state: u8,
    local: SocketAddr,
    remote: SocketAddr,
    interface: u32,
    uid: u32,
    inode: u32,
}

/// The user that owns the socket at the client's end of `stream`, an accepted connection.
pub(crate) fn peer_uid(stream: impl AsFd) -> Result<u32, Unknown> {
    let peer = peer_address(&stream)?;
    let own = getsockname(&stream)
        .ok()
        .and_then(|own| own.try_into().ok());
    let uid = owner(peer, own.ok_or(Unknown::Closed)?)?;
    // As long as our end is open nobody else can have a connection with these addresses and ports. After a reset
    // somebody can: then the answer was about that one.
    if peer_address(&stream)? != peer {
        return Err(Unknown::Closed);
    }
    Ok(uid)
}

/// An error once the connection was reset: the kernel then says that there is no peer.
fn peer_address(stream: impl AsFd) -> Result<SocketAddr, Unknown> {
    let peer = getpeername(stream).ok().flatten();
    let peer = peer.and_then(|peer| peer.try_into().ok());
    peer.ok_or(Unknown::Closed)
}

fn owner(peer: SocketAddr, own: SocketAddr) -> Result<u32, Unknown> {
    let (peer, own) = (canonical(peer), canonical(own));
    if !peer.ip().is_loopback() || !own.ip().is_loopback() {
        return Err(Unknown::NotLoopback);
    }
    let request = request(peer, own).ok_or(Unknown::NotLoopback)?;
    let reply = ask(&request).ok_or(Unknown::CannotAsk)?;
    let answer = parse(&reply).ok_or(Unknown::NoSuchConnection)?;
    check(&answer, peer, own)
}

/// The owner, if the answer is about the client's end of this very connection.
fn check(answer: &Answer, peer: SocketAddr, own: SocketAddr) -> Result<u32, Unknown> {
    if (answer.local, answer.remote) != (peer, own) || answer.interface != ANY_INTERFACE {
        return Err(Unknown::AnotherSocket);
    }
    // A socket that is closed, or was never accepted, belongs to no file: its uid is root's, and means nothing.
    if answer.state != TCP_ESTABLISHED || answer.inode == 0 {
        return Err(Unknown::NotEstablished);
    }
    Ok(answer.uid)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The client's socket has our addresses the other way round.
fn request(peer: SocketAddr, own: SocketAddr) -> Option<Vec<u8>> {
    let family = match (peer, own) {
        (SocketAddr::V4(_), SocketAddr::V4(_)) => AF_INET,
        (SocketAddr::V6(_), SocketAddr::V6(_)) => AF_INET6,
        _ => return None,
    };
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend(u32::try_from(REQUEST_BYTES).ok()?.to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and port: there is one question, and the kernel knows who asks.
    bytes.extend([0; 8]);
    bytes.extend([family, IPPROTO_TCP, 0, 0]);
    // The kernel does not look at it for a single socket; the answer is checked.
    bytes.extend((1_u32 << TCP_ESTABLISHED).to_ne_bytes());
    bytes.extend(peer.port().to_be_bytes());
    bytes.extend(own.port().to_be_bytes());
    bytes.extend(octets(peer.ip()));
    bytes.extend(octets(own.ip()));
    bytes.extend(ANY_INTERFACE.to_ne_bytes());
    bytes.extend(NO_COOKIE);
    Some(bytes)
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// What the kernel, and nobody else, answers.
fn ask(request: &[u8]) -> Option<Vec<u8>> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(SOCK_DIAG),
    )
    .ok()?;
    let kernel = netlink::SocketAddrNetlink::new(0, 0);
    sendto(&socket, request, SendFlags::empty(), &kernel).ok()?;
    // The kernel has answered by the time the question is sent.
    let mut reply = vec![0; REPLY_BYTES_MAX];
    let (_, bytes, from) = recvfrom(&socket, reply.as_mut_slice(), RecvFlags::DONTWAIT).ok()?;
    let from = netlink::SocketAddrNetlink::try_from(from?).ok()?;
    reply.truncate(bytes);
    (from.pid() == 0).then_some(reply)
}

/// None when it is no description of a socket: an error, most likely that there is no such connection.
fn parse(reply: &[u8]) -> Option<Answer> {
    let length = u32::from_ne_bytes(field(reply, 0)?);
    let kind = u16::from_ne_bytes(field(reply, 4)?);
    let length = usize::try_from(length).ok()?;
    if kind != SOCK_DIAG_BY_FAMILY || length < ANSWER_BYTES_MIN || length > reply.len() {
        return None;
    }
    let message = reply.get(HEADER_BYTES..length)?;
    let [family, state] = field(message, 0)?;
    // A client may have an IPv6 socket and use it for IPv4: then its addresses are IPv4-mapped ones.
    let address = |at| -> Option<IpAddr> {
        match family {
            AF_INET => Some(Ipv4Addr::from(field::<4>(message, at)?).into()),
            AF_INET6 => Some(Ipv6Addr::from(field::<16>(message, at)?).to_canonical()),
            _ => None,
        }
    };
    let port = |at| field(message, at).map(u16::from_be_bytes);
    let number = |at| field(message, at).map(u32::from_ne_bytes);
    Some(Answer {
        state,
        local: SocketAddr::new(address(8)?, port(4)?),
        remote: SocketAddr::new(address(24)?, port(6)?),
        interface: number(40)?,
        uid: number(64)?,
        inode: number(68)?,
    })
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use tokio::net::TcpSocket;

    const NOBODY: u32 = 65534;
    const ADDRESSES: [&str; 2] = ["127.0.0.1:0", "[::1]:0"];

    /// Runs `connect` as a user without privileges, and returns its result with the accepted connection.
    fn accepted<T: Send + 'static>(
        listener: &TcpListener,
        connect: impl FnOnce(SocketAddr) -> T + Send + 'static,
    ) -> (T, TcpStream) {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test needs root: it becomes somebody else"
        );
        let address = listener.local_addr().unwrap();
        let connecting = std::thread::spawn(move || {
            // Of this thread alone.
            let nobody = rustix::fs::Uid::from_raw(NOBODY);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            connect(address)
        });
        let (server, _) = listener.accept().unwrap();
        (connecting.join().unwrap(), server)
    }

    fn addresses(server: &TcpStream) -> (SocketAddr, SocketAddr) {
        (server.peer_addr().unwrap(), server.local_addr().unwrap())
    }

    /// A connection whose socket is bound to the loopback device.
    fn connect_on_loopback_device(to: SocketAddr) -> TcpStream {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let socket = if to.is_ipv4() {
                TcpSocket::new_v4()
            } else {
                TcpSocket::new_v6()
            };
            let socket = socket.unwrap();
            // Lets somebody else listen on the same port later.
            socket.set_reuseaddr(true).unwrap();
            socket.bind_device(Some(b"lo")).unwrap();
            socket.bind(SocketAddr::new(to.ip(), 0)).unwrap();
            let stream = socket.connect(to).await.unwrap().into_std().unwrap();
            stream.set_nonblocking(false).unwrap();
            stream
        })
    }

    #[test]
    fn the_owner_of_a_connection_is_known_as_root() {
        let me = rustix::process::geteuid().as_raw();
        for address in ADDRESSES {
            let listener = TcpListener::bind(address).unwrap();
            let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            assert_eq!(peer_uid(&server), Ok(me), "{address}");
            let (_client, server) = accepted(&listener, |to| TcpStream::connect(to).unwrap());
            assert_eq!(peer_uid(&server), Ok(NOBODY), "{address}");
        }
    }

    #[test]
    fn an_ipv6_socket_that_speaks_ipv4_is_known_as_root() {
        let listener = TcpListener::bind("[::]:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for address in ["127.0.0.1", "::ffff:127.0.0.1"] {
            let to = SocketAddr::new(address.parse().unwrap(), port);
            let (_client, server) = accepted(&listener, move |_| TcpStream::connect(to).unwrap());
            assert_eq!(peer_uid(&server), Ok(NOBODY), "{address}");
        }
    }

    /// The kernel finds no unbound socket with these addresses, and answers with root's listener.
    #[test]
    fn a_socket_on_the_loopback_device_is_not_taken_for_a_listener_as_root() {
        for address in ADDRESSES {
            let listener = TcpListener::bind(address).unwrap();
            let everywhere = if listener.local_addr().unwrap().is_ipv4() {
                "0.0.0.0"
            } else {
                "::"
            };
            let attempt = |_| {
                let (client, server) = accepted(&listener, connect_on_loopback_device);
                let port = server.peer_addr().unwrap().port();
                // Somebody else may have it at another address.
                let roots = TcpListener::bind((everywhere, port)).ok()?;
                Some((client, server, roots))
            };
            let (_client, server, _roots) = (0..100).find_map(attempt).unwrap();
            assert_eq!(peer_uid(&server), Err(Unknown::AnotherSocket), "{address}");
        }
    }

    /// What is left of a closed connection has no owner, and reads as root's.
    #[test]
    fn a_closed_socket_belongs_to_nobody_as_root() {
        for address in ADDRESSES {
            let listener = TcpListener::bind(address).unwrap();
            let (client, mut server) = accepted(&listener, |to| TcpStream::connect(to).unwrap());
            let (peer, own) = addresses(&server);
            drop(client);
            assert_eq!(server.read(&mut [0]).unwrap(), 0, "FIN_WAIT2");
            let refused = peer_uid(&server);
            assert!(
                matches!(
                    refused,
                    Err(Unknown::NotEstablished | Unknown::NoSuchConnection)
                ),
                "{address}: FIN_WAIT2 {refused:?}"
            );
            server.shutdown(Shutdown::Write).unwrap();
            let refused = owner(peer, own);
            assert!(
                matches!(
                    refused,
                    Err(Unknown::NotEstablished | Unknown::NoSuchConnection)
                ),
                "{address}: TIME_WAIT {refused:?}"
            );
        }
    }

    #[test]
    fn a_half_closed_socket_is_not_established() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
        assert_eq!(peer_uid(&server), Err(Unknown::NotEstablished));
    }

    #[test]
    fn a_connection_that_was_reset_has_no_owner() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let at_once = Some(std::time::Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(&client, at_once).unwrap();
        drop(client);
        assert!(server.read(&mut [0]).is_err(), "reset");
        assert_eq!(peer_uid(&server), Err(Unknown::Closed));
    }

    /// Connections that nobody accepted are established and belong to nobody.
    #[test]
    fn a_connection_that_was_not_accepted_belongs_to_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, own) = addresses(&client);
        assert_eq!(owner(peer, own), Err(Unknown::NotEstablished));
    }

    #[test]
    fn other_addresses_are_refused() {
        let own = "127.0.0.1:50051".parse().unwrap();
        let refused = |peer: &str| owner(peer.parse().unwrap(), own);
        assert_eq!(refused("127.0.0.1:1"), Err(Unknown::NoSuchConnection));
        assert_eq!(refused("192.0.2.1:1"), Err(Unknown::NotLoopback));
        assert_eq!(refused("[::1]:1"), Err(Unknown::NotLoopback));
    }

    #[test]
    fn every_field_of_an_answer_counts() {
        let (peer, own) = (
            "127.0.0.1:7".parse().unwrap(),
            "127.0.0.1:8".parse().unwrap(),
        );
        let right = Answer {
            state: TCP_ESTABLISHED,
            local: peer,
            remote: own,
            interface: ANY_INTERFACE,
            uid: 7,
            inode: 1,
        };
        assert_eq!(check(&right, peer, own), Ok(7));
        let other = "127.0.0.1:9".parse().unwrap();
        for (wrong, why) in [
            (
                Answer {
                    local: other,
                    ..right
                },
                Unknown::AnotherSocket,
            ),
            (
                Answer {
                    remote: other,
                    ..right
                },
                Unknown::AnotherSocket,
            ),
            (
                Answer {
                    interface: 1,
                    ..right
                },
                Unknown::AnotherSocket,
            ),
            (Answer { inode: 0, ..right }, Unknown::NotEstablished),
        ] {
            assert_eq!(check(&wrong, peer, own), Err(why), "{wrong:?}");
        }
        for state in (0..=12).filter(|state| *state != TCP_ESTABLISHED) {
            let wrong = Answer { state, ..right };
            assert_eq!(check(&wrong, peer, own), Err(Unknown::NotEstablished));
        }
    }

    #[test]
    fn what_is_no_answer_is_none() {
        let (peer, own) = (
            "127.0.0.1:7".parse().unwrap(),
            "127.0.0.1:8".parse().unwrap(),
        );
        assert_eq!(request(peer, own).unwrap().len(), REQUEST_BYTES);
        assert_eq!(parse(&[]), None);
        assert_eq!(parse(&[2; 20]), None);
        let mut reply = vec![0; ANSWER_BYTES_MIN];
        reply[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        reply[HEADER_BYTES] = AF_INET;
        for (length, parsed) in [
            (0, false),
            (ANSWER_BYTES_MIN - 1, false),
            (ANSWER_BYTES_MIN, true),
            (ANSWER_BYTES_MIN + 1, false),
        ] {
            let length = u32::try_from(length).unwrap();
            reply[..4].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(parse(&reply).is_some(), parsed, "{length}");
        }
    }
}
