//! Which names may be resolved and which addresses returned, by policy.

use super::*;
use k8e_model::egress::DenyList;

const HERE: Ipv4Addr = Ipv4Addr::new(5, 5, 5, 5);

fn policy(allow: &[&str], deny: &[&str]) -> Policy {
    Policy {
        allow: EgressPolicy::parse(allow).unwrap(),
        deny: DenyList::parse(deny).unwrap(),
        session: "sess-a".to_owned(),
    }
}

fn host(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

fn asked(policy: &Policy, name: &str) -> Result<(), DenyReason> {
    may_resolve(policy, &host(name)).map_err(|denied| {
        assert_eq!(denied.code, ResponseCode::Refused);
        denied.reason
    })
}

/// The addresses that pass the filter, on a host whose address is [`HERE`].
fn told(policy: &Policy, chain: &[&str], addresses: &[&str]) -> Result<Vec<String>, Denied> {
    let resolved = Resolved {
        names: chain.iter().map(|name| host(name)).collect(),
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        ttl: Duration::from_secs(9),
    };
    let found = filter_resolved(policy, resolved, |address| address == HERE)?;
    assert_eq!(found.ttl, Duration::from_secs(9));
    Ok(found.addresses.iter().map(Ipv4Addr::to_string).collect())
}

fn refused(policy: &Policy, address: &str) -> DenyReason {
    let denied = told(policy, &[], &[address]).unwrap_err();
    assert_eq!(denied.address, Some(address.parse().unwrap()));
    assert_eq!(denied.code, ResponseCode::Refused);
    denied.reason
}

#[test]
fn a_name_must_be_allowed_and_not_denied() {
    let policy = policy(&["a.example", "*.b.example:22"], &["x.b.example"]);
    assert_eq!(asked(&policy, "a.example"), Ok(()));
    assert_eq!(asked(&policy, "c.b.example"), Ok(()));
    assert_eq!(asked(&policy, "x.b.example"), Err(DenyReason::DenyList));
    for name in [
        "b.example",
        "x.a.example",
        "example",
        "other.example",
        "localhost",
    ] {
        assert_eq!(asked(&policy, name), Err(DenyReason::NotAllowed), "{name}");
    }
    let denied = may_resolve(&policy, &host("x.b.example")).unwrap_err();
    assert_eq!(denied.rule.as_deref(), Some("x.b.example"));
}

#[test]
fn all_and_none() {
    let all = policy(&["all"], &["*.bad.example"]);
    assert_eq!(asked(&all, "a.example"), Ok(()));
    assert_eq!(asked(&all, "a.bad.example"), Err(DenyReason::DenyList));
    for name in ["localhost", "a.localhost", "intranet"] {
        assert_eq!(asked(&all, name), Err(DenyReason::NotAllowed), "{name}");
    }
    let named = policy(&["intranet", "localhost"], &[]);
    assert_eq!(asked(&named, "intranet"), Ok(()));
    assert_eq!(asked(&named, "localhost"), Ok(()));
    assert_eq!(
        asked(&Policy::closed(), "a.example"),
        Err(DenyReason::NotAllowed)
    );
}

#[test]
fn a_denied_cname_denies_the_resolution() {
    let policy = policy(&["a.example"], &["*.bad.example"]);
    assert_eq!(
        told(&policy, &["cdn.example"], &["8.8.8.8"]).unwrap(),
        ["8.8.8.8"]
    );
    for chain in [&["x.bad.example"][..], &["x.bad.example", "fine.example"]] {
        let denied = told(&policy, chain, &["8.8.8.8"]).unwrap_err();
        assert_eq!(denied.reason, DenyReason::DenyList);
        assert_eq!(denied.rule.as_deref(), Some("*.bad.example"));
    }
}

#[test]
fn private_addresses_are_removed_unless_a_rule_covers_them() {
    let named = policy(&["a.example"], &[]);
    let covered = policy(&["a.example", "10.1.0.0/16:5432"], &[]);
    let answer = ["10.1.2.3", "8.8.8.8", "10.2.2.3", "127.0.0.1", "5.5.5.5"];
    assert_eq!(told(&named, &[], &answer).unwrap(), ["8.8.8.8"]);
    assert_eq!(
        told(&covered, &[], &answer).unwrap(),
        ["10.1.2.3", "8.8.8.8"]
    );
    for address in ["10.1.2.3", "192.168.0.1", "100.64.0.1", "198.18.0.1"] {
        assert_eq!(refused(&named, address), DenyReason::PrivateAddress);
        assert_eq!(
            refused(&policy(&["all"], &[]), address),
            DenyReason::PrivateAddress
        );
    }
}

#[test]
fn never_allowed_addresses_are_removed_under_every_policy() {
    let everything = policy(&["a.example", "0.0.0.0/0", "127.0.0.0/8", "5.5.5.5"], &[]);
    for address in [
        "127.0.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
    ] {
        assert_eq!(refused(&everything, address), DenyReason::ThisMachine);
    }
    assert_eq!(refused(&everything, "5.5.5.5"), DenyReason::ThisMachine);
}

#[test]
fn denied_addresses_are_removed() {
    let policy = policy(&["a.example", "8.8.8.0/24"], &["8.8.8.8"]);
    assert_eq!(
        told(&policy, &[], &["8.8.8.8", "8.8.8.9"]).unwrap(),
        ["8.8.8.9"]
    );
    let denied = told(&policy, &[], &["8.8.8.8", "10.0.0.1"]).unwrap_err();
    assert_eq!(denied.reason, DenyReason::DenyList);
    assert_eq!(denied.rule.as_deref(), Some("8.8.8.8"));
}

#[test]
fn a_name_without_address_is_not_denied_by_a_rule() {
    for (error, code) in [
        (ResolveError::NoName, ResponseCode::NXDomain),
        (ResolveError::NoAddress, ResponseCode::NoError),
        (ResolveError::Failed, ResponseCode::ServFail),
        (ResolveError::BadAliasChain, ResponseCode::ServFail),
    ] {
        let denied = Denied::from(error);
        assert_eq!((denied.reason, denied.code), (DenyReason::Unresolved, code));
    }
}
