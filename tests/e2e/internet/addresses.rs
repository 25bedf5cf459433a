//! Who is where on the miniature internet. Every other address is there as well, and answers the
//! same: these are the ones that tests name.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The resolver that the server under test asks.
pub const DNS: Ipv4Addr = Ipv4Addr::new(45, 10, 0, 53);
/// A resolver that anybody may ask, as there are real ones: UDP, TCP and TLS.
pub const RESOLVER: Ipv4Addr = Ipv4Addr::new(45, 10, 8, 8);
/// An address with many names on it, good and bad.
pub const CDN: Ipv4Addr = Ipv4Addr::new(45, 10, 1, 1);
/// Somebody else's, with only good names on it.
pub const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(45, 10, 3, 1);
/// Nothing that is sent here may arrive.
pub const ATTACKER: Ipv4Addr = Ipv4Addr::new(45, 10, 2, 66);
/// Where clouds keep the secrets of a machine.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// Where some clouds keep such services outside link-local: Azure (on a public address), Alibaba,
/// Volcengine, UCloud, Oracle.
pub const PLATFORM: [Ipv4Addr; 5] = [
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(100, 96, 0, 96),
    Ipv4Addr::new(100, 80, 80, 80),
    Ipv4Addr::new(192, 0, 0, 192),
];
/// A data base in the private network of the machine.
pub const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 10);
/// The same, over IPv6.
pub const ATTACKER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xbad, 0, 0, 0, 0, 0x66);
/// A machine that the cloud gave an IPv6 address from the public range.
pub const PUBLIC_V6: Ipv6Addr = Ipv6Addr::new(0x2a05, 0xd000, 0, 0, 0, 0, 0, 1);

/// The machine that the server under test runs on, towards the internet.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 2);
/// An address of the machine that looks like anybody's.
pub const HOST_PUBLIC: Ipv4Addr = Ipv4Addr::new(45, 20, 0, 2);
/// The other end of the machine's only cable.
pub const UPLINK: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);

pub(super) const HOST_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x98, 0, 0, 0, 0, 2);
pub(super) const UPLINK_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x98, 0, 0, 0, 0, 1);

/// HTTP.
pub const WEB: u16 = 80;
/// HTTP over TLS.
pub const TLS: u16 = 443;
/// HTTP over TLS where no rule without a port leads.
pub const TLS_ELSEWHERE: u16 = 8443;
/// HTTP as well; a proxy for who asks it to be.
pub const PROXY: u16 = 3128;
/// Repeats what it is told, over TCP and UDP.
pub const ECHO: u16 = 7777;
/// Speaks first, as SSH does, then repeats.
pub const GREETER: u16 = 22;
/// DNS over TLS.
pub const DNS_TLS: u16 = 853;
