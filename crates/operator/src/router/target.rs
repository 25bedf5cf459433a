//! Target of a request: parses namespace, name and port of the sandbox from headers or from the path. Whether it exists
//! is up to the index.

use super::refusal::Refusal;
use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderName};
use std::net::IpAddr;
use std::time::Duration;

pub(super) const ID: HeaderName = HeaderName::from_static("x-sandbox-id");
pub(super) const NAMESPACE: HeaderName = HeaderName::from_static("x-sandbox-namespace");
pub(super) const PORT: HeaderName = HeaderName::from_static("x-sandbox-port");
pub(super) const POD_IP: HeaderName = HeaderName::from_static("x-sandbox-pod-ip");
pub(super) const UID: HeaderName = HeaderName::from_static("x-sandbox-uid");
pub(super) const TIMEOUT: HeaderName = HeaderName::from_static("x-sandbox-timeout");

const NAMESPACE_DEFAULT: &str = "default";
/// Port of the runtime in a sandbox.
const PORT_DEFAULT: u16 = 8888;
/// Longest DNS label.
const LABEL_BYTES_MAX: usize = 63;
/// Longest UID; those of Kubernetes have 36 bytes.
const UID_BYTES_MAX: usize = 64;

// Clients match these texts.
const ID_MISSING: &str = "X-Sandbox-ID header is required.";
const ID_INVALID: &str = "Invalid sandbox ID format.";
const NAMESPACE_INVALID: &str = "Invalid namespace format.";
const PORT_INVALID: &str = "Invalid port format.";
const PORT_MISSING: &str = "X-Sandbox-Port header is required for gRPC.";
const POD_IP_INVALID: &str = "Invalid target IP address.";
const UID_INVALID: &str = "Invalid sandbox UID format.";

/// The sandbox that a request names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) port: u16,
    /// Address of its pod as the client knows it; only selects among the known addresses.
    pub(super) pod_ip: Option<IpAddr>,
    /// UID that the sandbox must have.
    pub(super) uid: Option<String>,
    /// Timeout of the request, from X-Sandbox-Timeout.
    pub(super) timeout: Option<Duration>,
}

/// Rules of parsing that depend on the request and on flags.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// For gRPC there is no default port.
    pub(super) port_required: bool,
    pub(super) allow_loopback: bool,
}

/// Parses the headers of a request.
pub(super) fn from_headers(headers: &HeaderMap, rules: Rules) -> Result<Target, Refusal> {
    let name = single(headers, &ID, ID_INVALID)?.ok_or_else(|| invalid(ID_MISSING))?;
    let namespace = single(headers, &NAMESPACE, NAMESPACE_INVALID)?.unwrap_or(NAMESPACE_DEFAULT);
    let port = single(headers, &PORT, PORT_INVALID)?;
    if port.is_none() && rules.port_required {
        return Err(invalid(PORT_MISSING));
    }
    let pod_ip = single(headers, &POD_IP, POD_IP_INVALID)?;
    let uid = single(headers, &UID, UID_INVALID)?;
    let named = named(namespace, name, port)?;
    Ok(Target {
        pod_ip: pod_ip
            .map(|ip| pod_address(ip, rules.allow_loopback))
            .transpose()?,
        uid: uid.map(checked_uid).transpose()?,
        timeout: timeout(headers),
        ..named
    })
}

/// Parses `<prefix>/<namespace>/<sandbox>/<port>/…` and returns the rest of the path. `None`: it has another prefix.
pub(super) fn from_path(
    path: &str,
    prefix: &str,
    headers: &HeaderMap,
) -> Option<Result<(Target, String), Refusal>> {
    let rest = path.strip_prefix(prefix)?.strip_prefix('/')?;
    let mut parts = rest.splitn(4, '/');
    let mut part = || parts.next().unwrap_or_default();
    let (namespace, name, port, rest) = (part(), part(), part(), part());
    let target = named(namespace, name, Some(port)).map(|target| Target {
        timeout: timeout(headers),
        ..target
    });
    Some(target.map(|target| (target, format!("/{rest}"))))
}

/// Whether this can be the address of a pod: not unspecified, multicast, broadcast, link-local, or (by default)
/// loopback.
pub(super) fn is_pod_address(ip: IpAddr, allow_loopback: bool) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local() || ip.to_ipv4_mapped().is_some(),
    };
    let usable = !ip.is_unspecified() && !ip.is_multicast() && !link_local;
    usable && (allow_loopback || !ip.is_loopback())
}

/// Whether this is a DNS label (RFC 1123): what Kubernetes allows as the name of a namespace.
pub(super) fn is_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let ends = [text.bytes().next(), text.bytes().last()];
    (1..=LABEL_BYTES_MAX).contains(&text.len())
        && text.bytes().all(|byte| inner(byte) || byte == b'-')
        && ends.iter().all(|end| end.is_some_and(inner))
}

fn named(namespace: &str, name: &str, port: Option<&str>) -> Result<Target, Refusal> {
    if !is_label(name) {
        return Err(invalid(ID_INVALID));
    }
    if !is_label(namespace) {
        return Err(invalid(NAMESPACE_INVALID));
    }
    Ok(Target {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        port: port.map_or(Ok(PORT_DEFAULT), checked_port)?,
        pod_ip: None,
        uid: None,
        timeout: None,
    })
}

/// The value of a header; an empty one counts as missing. Repeated headers are refused: another proxy may have checked
/// the other value.
fn single<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
    why: &'static str,
) -> Result<Option<&'h str>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let value = values.next();
    if values.next().is_some() {
        return Err(invalid(why));
    }
    let text = value.map(|value| value.to_str()).transpose();
    let text = text.map_err(|_| invalid(why))?;
    Ok(text.map(str::trim).filter(|text| !text.is_empty()))
}

fn checked_port(text: &str) -> Result<u16, Refusal> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse().ok().filter(|port| digits && *port != 0);
    port.ok_or_else(|| invalid(PORT_INVALID))
}

fn checked_uid(text: &str) -> Result<String, Refusal> {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let valid = text.len() <= UID_BYTES_MAX && text.bytes().all(known);
    valid
        .then(|| text.to_owned())
        .ok_or_else(|| invalid(UID_INVALID))
}

fn pod_address(text: &str, allow_loopback: bool) -> Result<IpAddr, Refusal> {
    let ip: Option<IpAddr> = text.parse().ok();
    // ::ffff:127.0.0.1 is 127.0.0.1.
    let ip = ip.map(|ip| ip.to_canonical());
    let ip = ip.filter(|ip| is_pod_address(*ip, allow_loopback));
    ip.ok_or_else(|| invalid(POD_IP_INVALID))
}

/// The timeout that the client sets. An invalid value is ignored: a request should not fail because of it.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let seconds: f64 = headers.get(TIMEOUT)?.to_str().ok()?.trim().parse().ok()?;
    let seconds = (seconds > 0.0).then_some(seconds)?;
    Duration::try_from_secs_f64(seconds).ok()
}

fn invalid(detail: &'static str) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;
    use proptest::prelude::*;

    const RULES: Rules = Rules {
        port_required: false,
        allow_loopback: false,
    };

    fn headers(pairs: &[(&HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append((*name).clone(), HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    fn detail(pairs: &[(&HeaderName, &str)]) -> String {
        from_headers(&headers(pairs), RULES)
            .unwrap_err()
            .detail()
            .to_owned()
    }

    #[test]
    fn namespace_and_port_have_defaults() {
        let target = from_headers(&headers(&[(&ID, "sb-1")]), RULES).unwrap();
        assert_eq!((target.namespace.as_str(), target.port), ("default", 8888));
        let full = headers(&[
            (&ID, "sb-1"),
            (&NAMESPACE, "team"),
            (&PORT, "9000"),
            (&POD_IP, "::ffff:10.1.2.3"),
            (&UID, "0b7b2d3a-1111-2222-3333-444455556666"),
            (&TIMEOUT, "1.5"),
        ]);
        let target = from_headers(&full, RULES).unwrap();
        assert_eq!(target.pod_ip, Some("10.1.2.3".parse().unwrap()));
        assert_eq!(target.timeout, Some(Duration::from_millis(1500)));
        assert_eq!((target.namespace.as_str(), target.port), ("team", 9000));
    }

    #[test]
    fn invalid_headers_are_refused_with_the_texts_that_clients_match() {
        let id = (&ID, "a");
        assert_eq!(detail(&[]), "X-Sandbox-ID header is required.");
        assert_eq!(detail(&[(&ID, "")]), "X-Sandbox-ID header is required.");
        for wrong in ["A", "a.b", "-a", "a-", "a/b", "..", "a b", &"a".repeat(64)] {
            assert_eq!(
                detail(&[(&ID, wrong)]),
                "Invalid sandbox ID format.",
                "{wrong}"
            );
            let namespace = [id, (&NAMESPACE, wrong)];
            assert_eq!(detail(&namespace), "Invalid namespace format.", "{wrong}");
        }
        for wrong in ["0", "65536", "-1", "+80", "x", "80.0", "999999999999"] {
            assert_eq!(
                detail(&[id, (&PORT, wrong)]),
                "Invalid port format.",
                "{wrong}"
            );
        }
        let addresses = [
            "x",
            "10.0.0",
            "127.0.0.1",
            "::1",
            "169.254.169.254",
            "fe80::1",
            "224.0.0.1",
            "ff02::1",
            "0.0.0.0",
            "::",
            "::ffff:127.0.0.1",
            "::ffff:169.254.1.1",
            "255.255.255.255",
            "fe80::1%eth0",
            "10.0.0.1:80",
        ];
        for wrong in addresses {
            assert_eq!(
                detail(&[id, (&POD_IP, wrong)]),
                "Invalid target IP address.",
                "{wrong}"
            );
        }
        assert_eq!(detail(&[id, (&ID, "b")]), "Invalid sandbox ID format.");
        assert_eq!(detail(&[id, (&UID, "a/b")]), "Invalid sandbox UID format.");
        let grpc = Rules {
            port_required: true,
            ..RULES
        };
        let refused = from_headers(&headers(&[id]), grpc).unwrap_err();
        assert_eq!(
            refused.detail(),
            "X-Sandbox-Port header is required for gRPC."
        );
    }

    #[test]
    fn an_invalid_timeout_is_ignored() {
        for wrong in ["x", "", "-1", "0", "NaN", "inf", "1e999"] {
            let headers = headers(&[(&ID, "a"), (&TIMEOUT, wrong)]);
            assert_eq!(
                from_headers(&headers, RULES).unwrap().timeout,
                None,
                "{wrong}"
            );
        }
    }

    #[test]
    fn the_target_may_be_in_the_path() {
        let read = |path| from_path(path, "/s", &HeaderMap::new());
        assert!(read("/other/x").is_none());
        assert!(read("/sx/ns/a/80/").is_none());
        let (target, rest) = read("/s/ns/a/80/x%2Fy/z").unwrap().unwrap();
        assert_eq!(
            (target.namespace.as_str(), target.name.as_str(), target.port),
            ("ns", "a", 80)
        );
        assert_eq!(rest, "/x%2Fy/z");
        assert_eq!(read("/s/ns/a/80").unwrap().unwrap().1, "/");
        assert!(read("/s/ns/a").unwrap().is_err());
        assert!(read("/s/ns/../80/").unwrap().is_err());
    }

    proptest! {
        /// For any headers: a parsed target has valid names, and an address that may be dialled.
        #[test]
        fn every_parsed_target_is_valid(
            id in "[ -~]{0,70}", namespace in "[a-zA-Z0-9.-]{0,70}", port in "[0-9+ -]{0,8}",
            ip in "[0-9a-f:.]{0,40}", uid in "[ -~]{0,70}", time in "[0-9.eE+-]{0,12}",
        ) {
            let pairs = [(&ID, &*id), (&NAMESPACE, &*namespace), (&PORT, &*port), (&POD_IP, &*ip), (&UID, &*uid), (&TIMEOUT, &*time)];
            if let Ok(target) = from_headers(&headers(&pairs), RULES) {
                prop_assert!(is_label(&target.name) && is_label(&target.namespace) && target.port > 0);
                prop_assert!(target.pod_ip.is_none_or(|ip| is_pod_address(ip, false)));
                prop_assert!(target.uid.is_none_or(|uid| uid.len() <= UID_BYTES_MAX && !uid.contains('/')));
            }
        }

        #[test]
        fn every_name_that_kubernetes_allows_is_accepted(id in "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", port in 1_u16.., v4 in 0x0a00_0000_u32..0x0b00_0000) {
            let ip = std::net::Ipv4Addr::from(v4).to_string();
            let port_text = port.to_string();
            let pairs = [(&ID, &*id), (&PORT, &*port_text), (&POD_IP, &*ip)];
            let target = from_headers(&headers(&pairs), RULES).unwrap();
            prop_assert_eq!(target.name, id);
            prop_assert_eq!(target.port, port);
            prop_assert_eq!(target.pod_ip.unwrap().to_string(), ip);
        }
    }
}
