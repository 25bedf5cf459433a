//! Which addresses are this machine's own.

use crate::netlink::{Messages, Netlink};
use std::net::Ipv4Addr;

const GET_ROUTE: u16 = 26;
const ROUTE_DESTINATION: u16 = 1;
const IPV4: u8 = 2;

/// Where the kind of a route is in a message about it: after the head and seven bytes.
const KIND_AT: usize = 16 + 7;

/// Asks the kernel how it would send there. Addresses come and go, and not all that are its own
/// are on a link. One that cannot be asked about counts as its own.
pub(crate) fn is_local(address: Ipv4Addr) -> bool {
    let mut messages = Messages::default();
    let fixed = [IPV4, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    messages.add(GET_ROUTE, 0, &fixed, |route| {
        route.put(ROUTE_DESTINATION, &address.octets());
    });
    let reply = Netlink::open(None).and_then(|kernel| kernel.ask(&messages));
    match reply {
        Ok(reply) => reply.get(KIND_AT) != Some(&libc::RTN_UNICAST),
        // It would send nowhere: then nobody is reached, and the connection says why.
        Err(error) => error.raw_os_error() != Some(libc::ENETUNREACH),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_broadcast_are_ours() {
        assert!(is_local(Ipv4Addr::LOCALHOST));
        assert!(is_local(Ipv4Addr::new(127, 9, 9, 9)));
        assert!(is_local(Ipv4Addr::BROADCAST));
    }
}
