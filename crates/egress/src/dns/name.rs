//! Conversion between DNS names (labels of bytes) and [`HostName`], which rules are compared with.

use hickory_proto::rr::Name;
use k8e_model::egress::HostName;

/// The host name. None for the root, for characters that host names do not have (such as a dot *inside*
/// a label, which would read as another name), and for an address.
pub(super) fn to_host(name: &Name) -> Option<HostName> {
    let mut text = String::with_capacity(name.len());
    for label in name.iter() {
        let label = std::str::from_utf8(label).ok()?;
        if label.contains('.') {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(label);
    }
    HostName::parse(&text).ok()
}

/// The DNS name, in lower case as a [`HostName`] is.
pub(super) fn from_host(host: &HostName) -> Name {
    let labels = host.as_str().split('.').map(str::as_bytes);
    Name::from_labels(labels).expect("a host name keeps the bounds of a name in DNS")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn host_names_round_trip() {
        for text in [
            "example.com",
            "_a-b.c.example",
            "localhost",
            "xn--bcher-kva.ch",
        ] {
            let host = HostName::parse(text).unwrap();
            assert_eq!(to_host(&from_host(&host)).unwrap(), host);
        }
        let mixed = Name::from_ascii("ExAmPlE.CoM.").unwrap();
        assert_eq!(to_host(&mixed).unwrap().as_str(), "example.com");
    }

    #[test]
    fn the_longest_host_name_round_trips() {
        let label = "a".repeat(63);
        let text = format!("{label}.{label}.{label}.{}", "b".repeat(61));
        assert_eq!(text.len(), 253);
        let host = HostName::parse(&text).unwrap();
        assert_eq!(to_host(&from_host(&host)).unwrap(), host);
    }

    #[test]
    fn invalid_host_names_are_rejected() {
        let odd: &[&[&[u8]]] = &[
            &[],
            &[b"a.b", b"com"],
            &[b"a b", b"com"],
            &[b"a\0b", b"com"],
            &[b"\xff", b"com"],
            &[b"*", b"com"],
            &[b"-a", b"com"],
            &[b"1", b"2", b"3", b"4"],
        ];
        for labels in odd {
            let name = Name::from_labels(labels.iter().copied()).unwrap();
            assert_eq!(to_host(&name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn labels_are_never_joined_into_another_name(
            labels in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..8), 1..5)
        ) {
            let name = Name::from_labels(labels.iter().map(Vec::as_slice)).unwrap();
            if let Some(host) = to_host(&name) {
                prop_assert_eq!(host.as_str().split('.').count(), labels.len());
                prop_assert_eq!(from_host(&host), name);
            }
        }
    }
}
