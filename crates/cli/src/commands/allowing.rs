//! Hints for denied egress: the allow-list entry, and the command, that would allow it.

use k8e_api::v1;
use k8e_model::{DenyReason, EgressPolicy, HostName};
use std::net::Ipv4Addr;

/// Ports of a rule without a port.
const WEB_PORTS: [u32; 2] = [80, 443];

/// The entry of `allow-hosts` that would allow this flow; `None` when no entry can.
///
/// The sandbox chose the name: only a valid host name is ever put into a command that a user copies.
pub(super) fn entry(flow: &v1::EgressFlow) -> Option<String> {
    let reason = flow.reason.parse::<DenyReason>().ok()?;
    let by_rules = matches!(reason, DenyReason::NotAllowed | DenyReason::PortClosed);
    if !by_rules || flow.protocol() == v1::EgressProtocol::Udp {
        return None;
    }
    let who = match flow.name.as_str() {
        "" => flow.address.parse::<Ipv4Addr>().ok()?.to_string(),
        name => HostName::parse(name).ok()?.as_str().to_owned(),
    };
    let entry = match flow.port {
        port if port == 0 || WEB_PORTS.contains(&port) => who,
        port => format!("{who}:{port}"),
    };
    // `all` and `none` could be names of hosts too, and as entries mean something else.
    matches!(EgressPolicy::parse(&[&entry]), Ok(EgressPolicy::Only(_))).then_some(entry)
}

/// The command that adds entries to the allow-list of a session, as the end of a sentence.
pub(super) fn command(session_id: &str, entries: &[String]) -> String {
    let entries = entries.join(",");
    format!("`k8e sandbox allow-hosts --session-id {session_id} --add {entries}` allows it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(name: &str, address: &str, port: u32, reason: &str) -> v1::EgressFlow {
        v1::EgressFlow {
            verdict: v1::EgressVerdict::Denied.into(),
            protocol: v1::EgressProtocol::Tcp.into(),
            name: name.to_owned(),
            address: address.to_owned(),
            port,
            reason: reason.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn entries() {
        for (flow, want) in [
            (denied("a.example", "", 0, "not_allowed"), Some("a.example")),
            (
                denied("a.example", "192.0.2.1", 443, "not_allowed"),
                Some("a.example"),
            ),
            (
                denied("a.example", "192.0.2.1", 5432, "port_closed"),
                Some("a.example:5432"),
            ),
            (
                denied("", "192.0.2.1", 22, "not_allowed"),
                Some("192.0.2.1:22"),
            ),
            (denied("", "192.0.2.1", 443, "no_name"), None),
            (denied("a.example", "", 0, "deny_list"), None),
            (denied("*.example", "", 0, "not_allowed"), None),
            (denied("@python", "", 0, "not_allowed"), None),
            (denied("a;reboot", "", 0, "not_allowed"), None),
            (denied("a b", "", 0, "not_allowed"), None),
            (denied("all", "", 0, "not_allowed"), None),
        ] {
            assert_eq!(entry(&flow).as_deref(), want, "{flow:?}");
        }
    }
}
