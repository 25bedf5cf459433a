//! Who is at the other end of a connection on this machine: the kernel knows (`sock_diag(7)`).
//!
//! One question about one connection, so it costs the same however many there are.

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, sendto,
    socket_with,
};
use std::io;
use std::net::{IpAddr, SocketAddr};

// From <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
const NLM_F_REQUEST: u16 = 1;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const NO_COOKIE: [u8; 8] = [0xff; 8];
const ALL_STATES: u32 = u32::MAX;

const HEADER_BYTES: usize = 16;
/// A header and one `inet_diag_req_v2`.
const REQUEST_BYTES: usize = HEADER_BYTES + 56;
/// Where `inet_diag_msg` has the uid: after four bytes, the socket's id and three numbers.
const UID_AT: usize = HEADER_BYTES + 4 + 48 + 12;
/// The answer has attributes that we do not ask for, at most a page of them.
const REPLY_BYTES_MAX: usize = 4096;

/// The user that owns the socket at the far end of a connection between two addresses of this
/// machine's loopback. None when it is not one, or the kernel does not know it (any more).
pub(crate) fn peer_uid(peer: SocketAddr, own: SocketAddr) -> Option<u32> {
    let (peer, own) = (canonical(peer), canonical(own));
    if !peer.ip().is_loopback() || !own.ip().is_loopback() {
        return None;
    }
    ask(&request(peer, own)?).ok().flatten()
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The far end's socket has our addresses the other way round.
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
    bytes.extend(ALL_STATES.to_ne_bytes());
    bytes.extend(peer.port().to_be_bytes());
    bytes.extend(own.port().to_be_bytes());
    bytes.extend(octets(peer.ip()));
    bytes.extend(octets(own.ip()));
    // Any interface.
    bytes.extend([0; 4]);
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

fn ask(request: &[u8]) -> io::Result<Option<u32>> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(SOCK_DIAG),
    )?;
    let kernel = netlink::SocketAddrNetlink::new(0, 0);
    sendto(&socket, request, SendFlags::empty(), &kernel)?;
    // The kernel has answered by the time the question is sent.
    let mut reply = vec![0; REPLY_BYTES_MAX];
    let (_, bytes) = recv(&socket, reply.as_mut_slice(), RecvFlags::DONTWAIT)?;
    Ok(uid(&reply[..bytes.min(REPLY_BYTES_MAX)]))
}

const SOCK_DIAG: Protocol = netlink::SOCK_DIAG;

/// None when the kernel says that there is no such connection.
fn uid(reply: &[u8]) -> Option<u32> {
    let kind = reply.get(4..6)?;
    if kind != SOCK_DIAG_BY_FAMILY.to_ne_bytes() {
        return None;
    }
    let uid = reply.get(UID_AT..UID_AT + 4)?;
    Some(u32::from_ne_bytes(uid.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn the_kernel_knows_who_connects() {
        let me = rustix::process::geteuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (client, server) = pair(address);
            let peer = server.peer_addr().unwrap();
            let own = server.local_addr().unwrap();
            assert_eq!(peer_uid(peer, own), Some(me), "{address}");
            drop(client);
        }
    }

    #[test]
    fn another_user_is_another_user() {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test needs root: it becomes somebody else"
        );
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connecting = std::thread::spawn(move || {
            // Of this thread alone.
            let nobody = rustix::fs::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            TcpStream::connect(address).unwrap()
        });
        let (server, peer) = listener.accept().unwrap();
        let _client = connecting.join().unwrap();
        assert_eq!(peer_uid(peer, server.local_addr().unwrap()), Some(65534));
    }

    #[test]
    fn who_is_not_here_is_nobody() {
        let own = "127.0.0.1:50051".parse().unwrap();
        assert_eq!(peer_uid("127.0.0.1:1".parse().unwrap(), own), None);
        assert_eq!(peer_uid("192.0.2.1:1".parse().unwrap(), own), None);
        assert_eq!(peer_uid("[::1]:1".parse().unwrap(), own), None);
        assert_eq!(uid(&[]), None);
        assert_eq!(uid(&[2; 20]), None);
    }
}
