//! Egress: allowed hosts, and the attempts of a session.

use crate::v1;
use k8e_model::{EgressPolicy, Error, Flow, FlowProtocol, FlowVerdict};
use std::net::Ipv4Addr;

/// The allowed hosts of a session from now on; an empty list allows none.
pub fn allowed_hosts(hosts: &[String]) -> Result<EgressPolicy, Error> {
    if hosts.is_empty() {
        return Ok(EgressPolicy::None);
    }
    EgressPolicy::parse(hosts)
}

/// One attempt, as a client sees it.
pub fn egress_flow(flow: Flow) -> v1::EgressFlow {
    let verdict = match flow.verdict {
        FlowVerdict::Allowed => v1::EgressVerdict::Allowed,
        FlowVerdict::Denied => v1::EgressVerdict::Denied,
    };
    let protocol = match flow.protocol {
        FlowProtocol::Dns => v1::EgressProtocol::Dns,
        FlowProtocol::Tcp => v1::EgressProtocol::Tcp,
        FlowProtocol::Udp => v1::EgressProtocol::Udp,
    };
    let reason = flow.reason.map(|reason| reason.as_str().to_owned());
    v1::EgressFlow {
        at_unix_ms: flow.at,
        verdict: verdict.into(),
        protocol: protocol.into(),
        name: flow.name.unwrap_or_default(),
        address: flow
            .address
            .as_ref()
            .map(Ipv4Addr::to_string)
            .unwrap_or_default(),
        port: flow.port.unwrap_or(0).into(),
        rule: flow.rule.unwrap_or_default(),
        reason: reason.unwrap_or_default(),
        count: flow.count,
    }
}

/// The allowed hosts of a new session; an empty list is the server's default.
pub(super) fn asked_hosts(hosts: &[String]) -> Result<Option<EgressPolicy>, Error> {
    if hosts.is_empty() {
        return Ok(None);
    }
    EgressPolicy::parse(hosts).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::DenyReason;

    fn hosts(entries: &[&str]) -> Vec<String> {
        entries.iter().map(|entry| (*entry).to_owned()).collect()
    }

    #[test]
    fn nothing_said_is_none_or_the_default() {
        assert_eq!(allowed_hosts(&[]).unwrap(), EgressPolicy::None);
        assert_eq!(asked_hosts(&[]).unwrap(), None);
        for read in [allowed_hosts, |hosts: &[String]| {
            asked_hosts(hosts).map(Option::unwrap_or_default)
        }] {
            assert_eq!(read(&hosts(&["all"])).unwrap(), EgressPolicy::All);
            let some = hosts(&["example.com:22", "*.example.org"]);
            assert_eq!(read(&some).unwrap().entries(), some);
            assert!(read(&hosts(&["https://example.com"])).is_err());
        }
    }

    #[test]
    fn flows_keep_what_they_say() {
        let flow = Flow {
            at: 7,
            verdict: FlowVerdict::Denied,
            protocol: FlowProtocol::Tcp,
            name: Some("a.example".to_owned()),
            address: Some(Ipv4Addr::new(192, 0, 2, 1)),
            port: Some(443),
            rule: None,
            reason: Some(DenyReason::NotAllowed),
            count: 3,
        };
        let wire = egress_flow(flow.clone());
        assert_eq!(wire.verdict(), v1::EgressVerdict::Denied);
        assert_eq!(wire.protocol(), v1::EgressProtocol::Tcp);
        assert_eq!((wire.at_unix_ms, wire.port, wire.count), (7, 443, 3));
        assert_eq!((&*wire.name, &*wire.address), ("a.example", "192.0.2.1"));
        assert_eq!((&*wire.rule, &*wire.reason), ("", "not_allowed"));
        let bare = Flow {
            name: None,
            address: None,
            port: None,
            reason: None,
            verdict: FlowVerdict::Allowed,
            protocol: FlowProtocol::Dns,
            ..flow
        };
        let wire = egress_flow(bare);
        assert_eq!((&*wire.name, &*wire.address, wire.port), ("", "", 0));
        assert_eq!(wire.verdict(), v1::EgressVerdict::Allowed);
    }
}
