//! Links, addresses and routes.

use super::{ADDRESS, CARD, CARD_PEER, GATEWAY};
use crate::netlink::{ACK, CREATE, EXCLUSIVE, Messages, Netlink, REPLACE};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::fs;
use std::io;
use std::net::Ipv4Addr;

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;

const LINK_NAME: u16 = 3;
const LINK_INFO: u16 = 18;
const LINK_SENDS_AT_ONCE: u16 = 63;
const LINK_GATHERS: u16 = 64;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;

const ADDRESS_ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;

const ROUTE_DESTINATION: u16 = 1;
const ROUTE_LINK: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const ROUTE_SOURCE: u16 = 7;

/// The family of all of it.
const IPV4: u8 = 2;
const UP: u32 = libc::IFF_UP as u32;

/// Both ends of the card's link.
const CARD_PREFIX: u8 = 30;

/// Loopback is the first link of every namespace.
const LOOPBACK: u32 = 1;

/// What passes loopback in one piece. A download passes it once more than it would without a gate,
/// and what that costs is counted in pieces, of 64 KiB otherwise. The kernel's own limit is 8 × 64 KiB.
const PIECE_BYTES: u32 = 500_000;

/// How a route's destination is reached.
#[derive(Clone, Copy)]
enum To {
    /// It is here.
    Here,
    /// It is on the link.
    Link,
    /// Somebody on the link knows.
    Gateway,
}

pub(super) fn loopback() -> io::Result<()> {
    let mut messages = Messages::default();
    up(&mut messages, LOOPBACK);
    talk(&messages)
}

/// Loopback, with the sandbox's address.
pub(super) fn own_address() -> io::Result<()> {
    let mut messages = Messages::default();
    up(&mut messages, LOOPBACK);
    address(&mut messages, LOOPBACK, 32);
    talk(&messages)?;
    large_pieces();
    Ok(())
}

/// Linux 6.3 and newer; it works without.
fn large_pieces() {
    let mut messages = Messages::default();
    messages.add(NEW_LINK, ACK, &link(LOOPBACK), |link| {
        link.put(LINK_SENDS_AT_ONCE, &PIECE_BYTES.to_ne_bytes());
        link.put(LINK_GATHERS, &PIECE_BYTES.to_ne_bytes());
    });
    let _ = talk(&messages);
}

/// Every destination is here: a packet to anywhere is delivered in this namespace.
///
/// In the main table, which is asked after the one with the namespace's own addresses.
pub(super) fn everything_is_here() -> io::Result<()> {
    let mut messages = Messages::default();
    route(&mut messages, To::Here, None, LOOPBACK);
    talk(&messages)
}

/// A pair of links in this namespace, the first with the address that its user takes over.
pub(super) fn card() -> io::Result<()> {
    // New links get no address of IPv6. Where there is no IPv6 at all there is no such file.
    match fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        done => done?,
    }
    let mut messages = Messages::default();
    messages.add(NEW_LINK, CREATE | EXCLUSIVE | ACK, &link(0), |link_| {
        link_.text(LINK_NAME, CARD);
        link_.nest(LINK_INFO, |info| {
            info.put(INFO_KIND, b"veth");
            info.nest(INFO_DATA, |data| {
                data.nest(VETH_PEER, |peer| {
                    peer.raw(&link(0)).text(LINK_NAME, CARD_PEER);
                });
            });
        });
    });
    talk(&messages)?;
    let (card, peer) = (index(CARD)?, index(CARD_PEER)?);
    let mut messages = Messages::default();
    up(&mut messages, LOOPBACK);
    address(&mut messages, card, CARD_PREFIX);
    up(&mut messages, card);
    up(&mut messages, peer);
    route(&mut messages, To::Gateway, None, card);
    talk(&messages)
}

/// The sandbox is behind the card's other end.
pub(super) fn route_to_card() -> io::Result<()> {
    let mut messages = Messages::default();
    route(&mut messages, To::Link, Some(ADDRESS), index(CARD_PEER)?);
    talk(&messages)
}

fn address(messages: &mut Messages, link: u32, prefix: u8) {
    let mut fixed = vec![IPV4, prefix, 0, 0];
    fixed.extend_from_slice(&link.to_ne_bytes());
    messages.add(NEW_ADDRESS, CREATE | EXCLUSIVE | ACK, &fixed, |address| {
        address.put(ADDRESS_LOCAL, &ADDRESS.octets());
        address.put(ADDRESS_ADDRESS, &ADDRESS.octets());
    });
}

fn up(messages: &mut Messages, index: u32) {
    messages.add(NEW_LINK, ACK, &link(index), |_| {});
}

/// The fixed part of a message about a link that is to be up.
fn link(index: u32) -> Vec<u8> {
    let mut fixed = vec![0; 4];
    fixed.extend_from_slice(&index.to_ne_bytes());
    let (flags, change) = if index == 0 { (0, 0) } else { (UP, UP) };
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed.extend_from_slice(&change.to_ne_bytes());
    fixed
}

fn route(messages: &mut Messages, to: To, destination: Option<Ipv4Addr>, link: u32) {
    let (scope, kind) = match to {
        To::Here => (libc::RT_SCOPE_HOST, libc::RTN_LOCAL),
        To::Link => (libc::RT_SCOPE_LINK, libc::RTN_UNICAST),
        To::Gateway => (libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST),
    };
    let prefix = if destination.is_some() { 32 } else { 0 };
    let table = libc::RT_TABLE_MAIN;
    let fixed = [
        IPV4,
        prefix,
        0,
        0,
        table,
        libc::RTPROT_STATIC,
        scope,
        kind,
        0,
        0,
        0,
        0,
    ];
    // In place of the default route that a card has had.
    messages.add(NEW_ROUTE, CREATE | REPLACE | ACK, &fixed, |route| {
        if let Some(destination) = destination {
            route.put(ROUTE_DESTINATION, &destination.octets());
        }
        match to {
            To::Gateway => route.put(ROUTE_GATEWAY, &GATEWAY.octets()),
            To::Here if !has_card() => route.put(ROUTE_SOURCE, &ADDRESS.octets()),
            To::Here | To::Link => route,
        };
        route.put(ROUTE_LINK, &link.to_ne_bytes());
    });
}

/// With a card, the sandbox's address is not this namespace's.
fn has_card() -> bool {
    index(CARD).is_ok()
}

fn index(name: &str) -> io::Result<u32> {
    let any = socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok(name_to_index(any, name)?)
}

fn talk(messages: &Messages) -> io::Result<()> {
    Netlink::open(None)?.talk(messages)
}
