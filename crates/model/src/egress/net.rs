//! IPv4 networks, and which addresses are nobody's to reach.

use super::shown;
use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;
use std::sync::LazyLock;

/// A range of IPv4 addresses with a common prefix; the bits after the prefix are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ipv4Net {
    address: Ipv4Addr,
    prefix: u8,
}

/// Addresses that no rule can open: this machine and its links, what is no unicast address, and the
/// metadata and platform services of clouds. Data, in `never.txt`, with the source of each entry.
const NEVER_TEXT: &str = include_str!("never.txt");

static NEVER: LazyLock<Vec<Ipv4Net>> = LazyLock::new(|| {
    let entries = never_entries().filter(|entry| !entry.contains(':'));
    entries
        .map(|entry| {
            entry
                .parse()
                .expect("a test reads every entry of never.txt")
        })
        .collect()
});

/// Addresses that are not on the public internet, besides those: a rule must name them.
const NOT_PUBLIC: [Ipv4Net; 9] = [
    net(10, 0, 0, 0, 8),
    net(100, 64, 0, 0, 10), // shared by carriers; some clouds keep services there (never.txt)
    net(172, 16, 0, 0, 12),
    net(192, 0, 0, 0, 24),
    net(192, 0, 2, 0, 24), // documentation, three of them
    net(192, 168, 0, 0, 16),
    net(198, 18, 0, 0, 15), // benchmarks; inside a sandbox, its own address and resolver
    net(198, 51, 100, 0, 24),
    net(203, 0, 113, 0, 24),
];

/// Whether the address is on the public internet.
pub fn is_public(address: Ipv4Addr) -> bool {
    !is_never(address) && !NOT_PUBLIC.iter().any(|net| net.contains(address))
}

/// Whether no sandbox may reach the address, whatever its rules say.
pub fn is_never(address: Ipv4Addr) -> bool {
    NEVER.iter().any(|net| net.contains(address))
}

/// The networks of `never.txt`, of both versions of IP.
fn never_entries() -> impl Iterator<Item = &'static str> {
    let lines = NEVER_TEXT.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with('#'))
}

// === impl Ipv4Net ===

impl Ipv4Net {
    /// The network of `prefix` bits at `address`.
    pub fn new(address: Ipv4Addr, prefix: u8) -> Result<Self, Error> {
        if prefix > 32 {
            return Err(Error::invalid(format!(
                "network {address}/{prefix} is not valid: a prefix has 0 to 32 bits"
            )));
        }
        let first = Ipv4Addr::from_bits(address.to_bits() & mask(prefix));
        if first != address {
            return Err(Error::invalid(format!(
                "network {address}/{prefix} has bits set after its prefix: write {first}/{prefix}, or {address} for that address alone"
            )));
        }
        Ok(Self { address, prefix })
    }

    /// One address.
    pub fn single(address: Ipv4Addr) -> Self {
        Self {
            address,
            prefix: 32,
        }
    }

    /// Its first address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// How many bits its addresses have in common.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether the address is in it.
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        address.to_bits() & mask(self.prefix) == self.address.to_bits()
    }
}

impl FromStr for Ipv4Net {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || {
            Error::invalid(format!(
                "network {:?} is not valid: write an IPv4 address, or one with a prefix as in 192.0.2.0/24",
                shown(text)
            ))
        };
        let Some((address, prefix)) = text.split_once('/') else {
            return text.parse().map(Self::single).map_err(|_| invalid());
        };
        // `u8` takes "+8" and "08", which would be a second way to write the same.
        if prefix.starts_with('+') || (prefix.len() > 1 && prefix.starts_with('0')) {
            return Err(invalid());
        }
        let address = address.parse().map_err(|_| invalid())?;
        Self::new(address, prefix.parse().map_err(|_| invalid())?)
    }
}

impl TryFrom<String> for Ipv4Net {
    type Error = Error;
    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Ipv4Net> for String {
    fn from(net: Ipv4Net) -> Self {
        net.to_string()
    }
}

impl fmt::Display for Ipv4Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            32 => write!(f, "{}", self.address),
            prefix => write!(f, "{}/{prefix}", self.address),
        }
    }
}

const fn net(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net {
        address: Ipv4Addr::new(a, b, c, d),
        prefix,
    }
}

fn mask(prefix: u8) -> u32 {
    // A shift by 32 is no shift in Rust but an overflow.
    u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv6Addr;

    fn ip(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    #[test]
    fn networks_are_read_and_written() {
        for text in ["10.1.0.0/16", "1.2.3.4", "0.0.0.0/0", "192.0.2.128/25"] {
            assert_eq!(text.parse::<Ipv4Net>().unwrap().to_string(), text);
        }
        assert_eq!(
            "1.2.3.4/32".parse::<Ipv4Net>().unwrap().to_string(),
            "1.2.3.4"
        );
        for bad in [
            "",
            "/",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "10.0.0.0/08",
            "10.0.0.0/8/8",
            "10.0.0/8",
            "010.0.0.0/8",
            "::/0",
            "10.0.0.0/255.0.0.0",
        ] {
            assert!(bad.parse::<Ipv4Net>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn stray_bits_are_named() {
        let message = "10.1.2.3/16".parse::<Ipv4Net>().unwrap_err().message;
        assert!(message.contains("10.1.0.0/16"), "{message}");
    }

    #[test]
    fn edges_of_networks() {
        let net: Ipv4Net = "10.1.0.0/16".parse().unwrap();
        assert!(net.contains(ip("10.1.0.0")) && net.contains(ip("10.1.255.255")));
        assert!(!net.contains(ip("10.0.255.255")) && !net.contains(ip("10.2.0.0")));
        let all: Ipv4Net = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains(ip("255.255.255.255")) && all.contains(ip("0.0.0.0")));
    }

    #[test]
    fn the_tables_are_networks() {
        for net in NEVER.iter().chain(&NOT_PUBLIC) {
            assert_eq!(Ipv4Net::new(net.address, net.prefix).unwrap(), *net);
        }
    }

    #[test]
    fn every_entry_of_the_never_list_is_read() {
        let (six, four): (Vec<_>, Vec<_>) = never_entries().partition(|entry| entry.contains(':'));
        let read: Vec<_> = NEVER.iter().map(ToString::to_string).collect();
        assert_eq!(read, four);
        for entry in six {
            let (address, prefix) = entry.split_once('/').unwrap_or((entry, "128"));
            let prefix: u32 = prefix.parse().unwrap();
            let bits = address.parse::<Ipv6Addr>().unwrap().to_bits();
            let host_bits = bits.checked_shl(prefix).unwrap_or(0);
            assert!(prefix <= 128 && host_bits == 0, "{entry}");
        }
    }

    #[test]
    fn the_services_of_clouds_are_never() {
        for service in [
            "168.63.129.16",
            "100.100.100.200",
            "100.96.0.96",
            "100.80.80.80",
            "192.0.0.192",
        ] {
            assert!(
                is_never(ip(service)) && !is_public(ip(service)),
                "{service}"
            );
            // The addresses beside them are what they were.
            let beside = Ipv4Addr::from_bits(ip(service).to_bits() + 1);
            assert!(!is_never(beside), "{beside}");
        }
        assert!(is_public(ip("168.63.129.17")));
    }

    #[test]
    fn what_is_public_and_what_is_never() {
        for public in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.0.3.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
        ] {
            assert!(is_public(ip(public)) && !is_never(ip(public)), "{public}");
        }
        for private in [
            "10.0.0.1",
            "100.64.0.0",
            "100.127.255.255",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.9",
        ] {
            assert!(
                !is_public(ip(private)) && !is_never(ip(private)),
                "{private}"
            );
        }
        for never in [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "127.255.255.255",
            "169.254.169.254",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
        ] {
            assert!(is_never(ip(never)) && !is_public(ip(never)), "{never}");
        }
    }

    proptest! {
        #[test]
        fn round_trip(bits: u32, prefix in 0u8..=32, other: u32) {
            let net = Ipv4Net::new(Ipv4Addr::from_bits(bits & mask(prefix)), prefix).unwrap();
            prop_assert_eq!(net.to_string().parse::<Ipv4Net>().unwrap(), net);
            prop_assert!(net.contains(Ipv4Addr::from_bits(bits)));
            let same = prefix == 0 || bits >> (32 - prefix) == other >> (32 - prefix);
            prop_assert_eq!(net.contains(Ipv4Addr::from_bits(other)), same);
        }

        #[test]
        fn agrees_with_the_standard_library(bits: u32) {
            let ip = Ipv4Addr::from_bits(bits);
            let local = ip.is_loopback() || ip.is_link_local() || ip.is_multicast()
                || ip.is_broadcast() || ip.is_unspecified();
            prop_assert!(!local || is_never(ip));
            prop_assert!(!(ip.is_private() || ip.is_documentation()) || !is_public(ip));
        }

        #[test]
        fn nonsense_never_panics(text in "\\PC{0,40}") {
            let _ = text.parse::<Ipv4Net>();
        }
    }
}
