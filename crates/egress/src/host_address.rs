//! Which addresses belong to the host: asked from the kernel's routing table (`RTM_GETROUTE`).

use crate::netlink::{Messages, Netlink};
use std::net::Ipv4Addr;

const GET_ROUTE: u16 = 26;
const ROUTE_DESTINATION: u16 = 1;
const IPV4: u8 = 2;

/// Offset of `rtm_type` in the reply: after the netlink header and seven bytes of `struct rtmsg`.
const KIND_AT: usize = 16 + 7;

/// Whether the route to the address is local or broadcast. Asked each time, because addresses come
/// and go and not all of them are on a link. When the kernel gives no answer it counts as local.
pub(crate) fn is_host_address(address: Ipv4Addr) -> bool {
    let mut messages = Messages::default();
    let fixed = [IPV4, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    messages.add(GET_ROUTE, 0, &fixed, |route| {
        route.put(ROUTE_DESTINATION, &address.octets());
    });
    let reply = Netlink::open(None).and_then(|kernel| kernel.query(&messages));
    match reply {
        Ok(reply) => reply.get(KIND_AT) != Some(&libc::RTN_UNICAST),
        // No route: connecting fails and reports that.
        Err(error) => error.raw_os_error() != Some(libc::ENETUNREACH),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_broadcast_belong_to_the_host() {
        assert!(is_host_address(Ipv4Addr::LOCALHOST));
        assert!(is_host_address(Ipv4Addr::new(127, 9, 9, 9)));
        assert!(is_host_address(Ipv4Addr::BROADCAST));
    }
}
