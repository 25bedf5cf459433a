//! The names under which this machine can be reached, for the server's certificate.

use rcgen::SanType;
use rcgen::string::Ia5String;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use x509_parser::prelude::{GeneralName, X509Certificate};

/// Addresses in a certificate. A machine with more has them for others; each one makes handshakes longer.
const ADDRESSES_MAX: usize = 32;

/// A host name or an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Dns(Ia5String),
    Ip(IpAddr),
}

/// `localhost`, loopback, the host name and the addresses of this machine.
pub(crate) fn of_this_machine() -> Vec<Name> {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy();
    let fixed = ["localhost", "127.0.0.1", "::1", &host]
        .into_iter()
        .filter_map(Name::new);
    let trie = std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let inet6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let v4 = local_v4(&trie).into_iter().map(IpAddr::V4);
    let v6 = local_v6(&inet6).into_iter().map(IpAddr::V6);
    let addresses = v4.chain(v6).take(ADDRESSES_MAX).map(Name::Ip);
    let mut names = Vec::new();
    for name in fixed.chain(addresses) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

// === impl Name ===

impl Name {
    /// None for what cannot be in a certificate.
    pub(crate) fn new(text: &str) -> Option<Self> {
        if let Ok(ip) = text.parse() {
            return Some(Self::Ip(ip));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if text.is_empty() || !text.chars().all(plain) {
            return None;
        }
        Ia5String::try_from(text).ok().map(Self::Dns)
    }

    pub(super) fn san(&self) -> SanType {
        match self {
            Self::Dns(name) => SanType::DnsName(name.clone()),
            Self::Ip(ip) => SanType::IpAddress(*ip),
        }
    }

    /// Whether a certificate is for this name.
    pub(super) fn is_in(&self, certificate: &X509Certificate<'_>) -> bool {
        let Ok(Some(names)) = certificate.subject_alternative_name() else {
            return false;
        };
        names
            .value
            .general_names
            .iter()
            .any(|name| match (self, name) {
                (Self::Dns(own), GeneralName::DNSName(name)) => own.as_str() == *name,
                (Self::Ip(IpAddr::V4(own)), GeneralName::IPAddress(bytes)) => {
                    own.octets() == **bytes
                }
                (Self::Ip(IpAddr::V6(own)), GeneralName::IPAddress(bytes)) => {
                    own.octets() == **bytes
                }
                _ => false,
            })
    }
}

/// In the kernel's routing trie an address of ours is a leaf, `|-- 10.0.0.5`, whose next line
/// says `/32 host LOCAL`.
fn local_v4(trie: &str) -> Vec<Ipv4Addr> {
    let mut leaf = None;
    let mut found = Vec::new();
    for line in trie.lines().map(str::trim_start) {
        if let Some(address) = line.strip_prefix("|-- ") {
            leaf = address.trim().parse::<Ipv4Addr>().ok();
        } else if line.starts_with("/32 host LOCAL")
            && let Some(address) = leaf.take()
            && !address.is_loopback()
            && !found.contains(&address)
        {
            found.push(address);
        }
    }
    found
}

/// A line begins with the address as 32 hexadecimal digits. Link-local ones need an interface to
/// be reached, so they are no names.
fn local_v6(inet6: &str) -> Vec<Ipv6Addr> {
    let address = |line: &str| {
        let digits = line.get(..32)?;
        Some(Ipv6Addr::from_bits(u128::from_str_radix(digits, 16).ok()?))
    };
    let reachable = |ip: &Ipv6Addr| !ip.is_loopback() && !ip.is_unicast_link_local();
    inet6
        .lines()
        .filter_map(address)
        .filter(reachable)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_in_the_kernels_files() {
        let trie = "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.2.15\n        /32 host LOCAL\n     \
                    |-- 10.0.2.255\n        /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n";
        assert_eq!(local_v4(trie), [Ipv4Addr::new(10, 0, 2, 15)]);
        let inet6 = "fe800000000000000000000000000001 02 40 20 80 eth0\n\
                     20010db8000000000000000000000005 02 40 00 80 eth0\n\
                     00000000000000000000000000000001 01 80 10 80 lo\nshort\n";
        assert_eq!(
            local_v6(inet6),
            ["2001:db8::5".parse::<Ipv6Addr>().unwrap()]
        );
    }

    #[test]
    fn this_machine_has_its_own_names() {
        let names = of_this_machine();
        for name in ["localhost", "127.0.0.1", "::1"] {
            assert!(names.contains(&Name::new(name).unwrap()), "{name}");
        }
    }

    #[test]
    fn odd_host_names_are_left_out() {
        assert_eq!(Name::new("höst"), None);
        assert_eq!(Name::new(""), None);
        assert_eq!(Name::new("a b"), None);
    }
}
