//! Sees every packet that comes off the cable, for whichever address, port and protocol: what no
//! server listens for must not arrive either.

use super::log::{Destination, Log};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, sockopt};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU32;
use tokio::net::UdpSocket;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;

/// No packet may be missed while this program is busy with something else.
const QUEUE_BYTES: usize = 64 << 20;

/// A destination is in the first bytes; the rest is cut off.
const HEAD_BYTES: usize = 128;

const TCP: u8 = 6;
const UDP: u8 = 17;
const DCCP: u8 = 33;
const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;
const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;

/// Listens to the network that this thread is in.
pub(super) fn listen(log: &Log) {
    for ethertype in [ETHERTYPE_IPV4, ETHERTYPE_IPV6] {
        // Of one type of packet a socket is given only those that come in.
        let protocol = NonZeroU32::new(u32::from(ethertype.to_be())).unwrap();
        let socket = rustix::net::socket_with(
            AddressFamily::PACKET,
            SocketType::DGRAM,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            Some(Protocol::from_raw(protocol)),
        )
        .expect("a packet socket");
        sockopt::set_socket_recv_buffer_size_force(&socket, QUEUE_BYTES).expect("a long queue");
        // Not what the type says, but it only ever receives, and that is the same for both.
        let socket = UdpSocket::from_std(socket.into()).expect("a socket that can be waited for");
        tokio::spawn(watch(socket, log.clone()));
    }
}

async fn watch(socket: UdpSocket, log: Log) {
    loop {
        let mut head = [0; HEAD_BYTES];
        let length = socket.recv(&mut head).await.expect("packets can be read");
        if let Some(destination) = destination(&head[..length]) {
            log.packet(destination);
        }
    }
}

fn destination(packet: &[u8]) -> Option<Destination> {
    let (address, protocol, payload) = match packet.first()? >> 4 {
        4 => {
            let octets: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
            let length = usize::from(packet[0] & 0xf) * 4;
            let is_first = u16::from_be_bytes([packet[6], packet[7]]) & 0x1fff == 0;
            let payload = packet.get(length..).filter(|_| is_first);
            (
                IpAddr::from(Ipv4Addr::from(octets)),
                packet[9],
                payload.unwrap_or_default(),
            )
        }
        _ => {
            let octets: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
            (
                IpAddr::from(Ipv6Addr::from(octets)),
                packet[6],
                &packet[40..],
            )
        }
    };
    let port = match protocol {
        TCP | UDP | DCCP | SCTP | UDP_LITE if payload.len() >= 4 => {
            u16::from_be_bytes([payload[2], payload[3]])
        }
        ICMP | ICMP_V6 if !payload.is_empty() => u16::from(payload[0]),
        _ => 0,
    };
    Some(Destination {
        protocol,
        address,
        port,
    })
}

// === impl Destination ===

impl Destination {
    /// What kernels say to each other unasked: who has which address, and that nobody listens.
    pub(super) fn is_housekeeping(&self) -> bool {
        const UNREACHABLE: u16 = 3;
        match self.protocol {
            ICMP => self.port == UNREACHABLE,
            // Neighbours and groups, the latter behind a hop-by-hop header.
            ICMP_V6 => (130..=143).contains(&self.port),
            0 => self.address.is_multicast(),
            _ => false,
        }
    }
}
