//! Links, addresses and routes of a sandbox's network namespace, by rtnetlink.

use super::{ADDRESS, GATEWAY, VETH_GATE, VETH_SANDBOX};
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
const LINK_GSO_MAX_SIZE: u16 = 63;
const LINK_GRO_MAX_SIZE: u16 = 64;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;

const ADDRESS_ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;

const ROUTE_DESTINATION: u16 = 1;
const ROUTE_LINK: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const ROUTE_SOURCE: u16 = 7;

/// `AF_INET`.
const IPV4: u8 = 2;
const UP: u32 = libc::IFF_UP as u32;

/// Prefix length of the veth link: two addresses, the sandbox's and the gate's.
const VETH_PREFIX: u8 = 30;

/// Interface index of loopback, the first link of every network namespace.
const LOOPBACK: u32 = 1;

/// GSO and GRO segment size of loopback, in bytes (BIG TCP). A download passes loopback once more than
/// without a proxy, and its cost is per segment, which has 64 KiB otherwise. The kernel's limit is
/// 8 × 64 KiB.
const SEGMENT_BYTES: u32 = 500_000;

/// How a route's destination is reached.
#[derive(Clone, Copy)]
enum RouteKind {
    /// Delivered in this namespace.
    Local,
    /// Directly on the link.
    Link,
    /// By the gateway on the link.
    Gateway,
}

pub(super) fn loopback() -> io::Result<()> {
    let mut messages = Messages::default();
    up(&mut messages, LOOPBACK);
    execute(&messages)
}

/// Loopback, with the sandbox's address.
pub(super) fn own_address() -> io::Result<()> {
    let mut messages = Messages::default();
    up(&mut messages, LOOPBACK);
    address(&mut messages, LOOPBACK, 32);
    execute(&messages)?;
    large_segments();
    Ok(())
}

/// BIG TCP on loopback: Linux 6.3 and newer, optional.
fn large_segments() {
    let mut messages = Messages::default();
    messages.add(NEW_LINK, ACK, &link(LOOPBACK), |link| {
        link.put(LINK_GSO_MAX_SIZE, &SEGMENT_BYTES.to_ne_bytes());
        link.put(LINK_GRO_MAX_SIZE, &SEGMENT_BYTES.to_ne_bytes());
    });
    let _ = execute(&messages);
}

/// A local default route: a packet to any destination is delivered in this namespace, where TPROXY
/// takes it.
///
/// In the main routing table, which is looked up after the local table with the namespace's addresses.
pub(super) fn route_all_to_loopback() -> io::Result<()> {
    let mut messages = Messages::default();
    route(&mut messages, RouteKind::Local, None, LOOPBACK);
    execute(&messages)
}

/// A veth pair with both ends in this namespace; the first has the address that the sentry takes over.
pub(super) fn veth() -> io::Result<()> {
    // No IPv6 on new links. On a kernel without IPv6 the file does not exist.
    match fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        done => done?,
    }
    let mut messages = Messages::default();
    messages.add(NEW_LINK, CREATE | EXCLUSIVE | ACK, &link(0), |link_| {
        link_.text(LINK_NAME, VETH_SANDBOX);
        link_.nest(LINK_INFO, |info| {
            info.put(INFO_KIND, b"veth");
            info.nest(INFO_DATA, |data| {
                data.nest(VETH_PEER, |peer| {
                    peer.raw(&link(0)).text(LINK_NAME, VETH_GATE);
                });
            });
        });
    });
    execute(&messages)?;
    let (veth, peer) = (index(VETH_SANDBOX)?, index(VETH_GATE)?);
    let mut messages = Messages::default();
    up(&mut messages, LOOPBACK);
    address(&mut messages, veth, VETH_PREFIX);
    up(&mut messages, veth);
    up(&mut messages, peer);
    route(&mut messages, RouteKind::Gateway, None, veth);
    execute(&messages)
}

/// The route from the gate's end of the veth pair to the sandbox.
pub(super) fn route_to_veth() -> io::Result<()> {
    let mut messages = Messages::default();
    route(
        &mut messages,
        RouteKind::Link,
        Some(ADDRESS),
        index(VETH_GATE)?,
    );
    execute(&messages)
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

/// `struct ifinfomsg` for a link that is set up; with index 0, for a link that is to be made.
fn link(index: u32) -> Vec<u8> {
    let mut fixed = vec![0; 4];
    fixed.extend_from_slice(&index.to_ne_bytes());
    let (flags, change) = if index == 0 { (0, 0) } else { (UP, UP) };
    fixed.extend_from_slice(&flags.to_ne_bytes());
    fixed.extend_from_slice(&change.to_ne_bytes());
    fixed
}

fn route(messages: &mut Messages, to: RouteKind, destination: Option<Ipv4Addr>, link: u32) {
    let (scope, kind) = match to {
        RouteKind::Local => (libc::RT_SCOPE_HOST, libc::RTN_LOCAL),
        RouteKind::Link => (libc::RT_SCOPE_LINK, libc::RTN_UNICAST),
        RouteKind::Gateway => (libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST),
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
    // Replaces the default route that the veth end had.
    messages.add(NEW_ROUTE, CREATE | REPLACE | ACK, &fixed, |route| {
        if let Some(destination) = destination {
            route.put(ROUTE_DESTINATION, &destination.octets());
        }
        match to {
            RouteKind::Gateway => route.put(ROUTE_GATEWAY, &GATEWAY.octets()),
            RouteKind::Local if !has_veth() => route.put(ROUTE_SOURCE, &ADDRESS.octets()),
            RouteKind::Local | RouteKind::Link => route,
        };
        route.put(ROUTE_LINK, &link.to_ne_bytes());
    });
}

/// Whether this is a gVisor sandbox: then its address is the sentry's and not this namespace's.
fn has_veth() -> bool {
    index(VETH_SANDBOX).is_ok()
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

fn execute(messages: &Messages) -> io::Result<()> {
    Netlink::open(None)?.execute(messages)
}
