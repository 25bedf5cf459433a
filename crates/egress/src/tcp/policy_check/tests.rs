//! Verdicts of the policy check.

use super::*;
use crate::tcp::testing::{
    LIMITS, SOON, a_record, alias, name, policy, resolver, sandbox, sandbox_with,
};

const HERE: Ipv4Addr = Ipv4Addr::new(5, 5, 5, 5);

fn address_verdict(allow: &[&str], deny: &[&str], to: &str) -> String {
    let policy = policy(allow, deny);
    match by_address(&policy, to.parse().unwrap(), |address| address == HERE) {
        Ok(AddressVerdict::Allowed { rule }) => rule,
        Ok(AddressVerdict::NeedsName) => "by name".to_owned(),
        Err(denial) => text(&denial),
    }
}

fn text(denial: &Denial) -> String {
    let parts = [
        Some(denial.reason.as_str().to_owned()),
        denial.name.as_ref().map(ToString::to_string),
        denial.rule.clone(),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn say(name: &str) -> RequestedName {
    RequestedName::Name(HostName::parse(name).unwrap())
}

fn hidden(name: &str) -> RequestedName {
    RequestedName::Encrypted(Some(HostName::parse(name).unwrap()))
}

/// Check by requested name; `told` are names for which DNS returned 8.8.8.8 to the sandbox.
async fn said(
    allow: &[&str],
    deny: &[&str],
    told: &[&str],
    port: u16,
    said: &RequestedName,
) -> String {
    let sandbox = sandbox(policy(allow, deny), LIMITS);
    for host in told {
        let addresses = [Ipv4Addr::new(8, 8, 8, 8)];
        sandbox.sent_replies().record(&name(host), &addresses, SOON);
    }
    let to = SocketAddrV4::new(Ipv4Addr::new(8, 8, 8, 8), port);
    let policy = sandbox.policy();
    let decided = if port == 443 || port == 80 {
        by_requested_name(&sandbox, &policy, to, said).await
    } else {
        by_sent_replies(&sandbox, &policy, to).await
    };
    match decided {
        Ok(grant) => format!("ok {}", grant.rule),
        Err(denial) => text(&denial),
    }
}

#[test]
fn addresses_of_the_host_are_always_denied() {
    let everything = &[
        "0.0.0.0/0",
        "127.0.0.0/8:9",
        "5.5.5.5",
        "a.example",
        "168.63.129.16",
        "168.63.129.16:9",
        "100.100.100.200",
    ];
    for never in [
        "127.0.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
    ] {
        for port in [9, 80, 443] {
            let to = format!("{never}:{port}");
            assert_eq!(address_verdict(everything, &[], &to), "this_machine");
            assert_eq!(address_verdict(&["all"], &[], &to), "this_machine");
        }
    }
    assert_eq!(
        address_verdict(everything, &[], "5.5.5.5:443"),
        "this_machine"
    );
    assert_eq!(
        address_verdict(&["all"], &[], "5.5.5.5:443"),
        "this_machine"
    );
}

#[test]
fn private_addresses_need_a_cidr_rule() {
    for private in [
        "10.1.2.3:443",
        "192.168.0.1:80",
        "198.18.0.1:22",
        "100.64.0.1:443",
    ] {
        assert_eq!(address_verdict(&["all"], &[], private), "private_address");
        assert_eq!(
            address_verdict(&["a.example"], &[], private),
            "private_address"
        );
        assert_eq!(address_verdict(&["none"], &[], private), "private_address");
    }
    let rule = &["10.1.0.0/16:5432", "a.example"];
    assert_eq!(
        address_verdict(rule, &[], "10.1.2.3:5432"),
        "10.1.0.0/16:5432"
    );
    assert_eq!(
        address_verdict(rule, &[], "10.1.2.3:443"),
        "private_address"
    );
    assert_eq!(
        address_verdict(rule, &[], "10.2.2.3:5432"),
        "private_address"
    );
    assert_eq!(
        address_verdict(&["10.1.0.0/16"], &[], "10.1.2.3:443"),
        "10.1.0.0/16"
    );
}

#[test]
fn deny_lists_take_precedence() {
    let deny = &["8.8.8.0/24", "10.0.0.0/8", "127.0.0.0/8"];
    assert_eq!(
        address_verdict(&["all"], deny, "8.8.8.8:443"),
        "deny_list 8.8.8.0/24"
    );
    assert_eq!(
        address_verdict(&["8.8.8.8"], deny, "8.8.8.8:80"),
        "deny_list 8.8.8.0/24"
    );
    assert_eq!(
        address_verdict(&["10.1.0.0/16"], deny, "10.1.0.1:80"),
        "deny_list 10.0.0.0/8"
    );
    assert_eq!(
        address_verdict(&["none"], deny, "127.0.0.1:80"),
        "deny_list 127.0.0.0/8"
    );
}

#[test]
fn public_addresses_by_policy() {
    assert_eq!(address_verdict(&["all"], &[], "8.8.8.8:22"), "all");
    assert_eq!(
        address_verdict(&["none"], &[], "8.8.8.8:443"),
        "not_allowed"
    );
    assert_eq!(
        address_verdict(&["a.example"], &[], "8.8.8.8:443"),
        "by name"
    );
    assert_eq!(
        address_verdict(&["8.8.8.8:22"], &[], "8.8.8.8:22"),
        "8.8.8.8:22"
    );
    assert_eq!(
        address_verdict(&["8.8.8.8:22"], &[], "8.8.8.8:443"),
        "by name"
    );
}

#[tokio::test]
async fn a_name_is_allowed_only_with_its_address() {
    let rules = &["a.example", "*.b.example", "c.example:8443"];
    for port in [80, 443] {
        for (told, name, want) in [
            (&["a.example"][..], "a.example", "ok a.example"),
            (&["x.b.example"], "x.b.example", "ok *.b.example"),
            (&["a.example"], "b.example", "not_allowed b.example"),
            (&["a.example"], "evil.test", "not_allowed evil.test"),
            // DNS returned the address for another name, and there is no upstream resolver.
            (&["a.example"], "y.b.example", "unresolved y.b.example"),
            (&[], "a.example", "unresolved a.example"),
            (&["c.example"], "c.example", "port_closed c.example"),
        ] {
            assert_eq!(said(rules, &[], told, port, &say(name)).await, want);
        }
        assert_eq!(
            said(rules, &[], &["a.example"], port, &RequestedName::Missing).await,
            "no_name"
        );
        let want = "encrypted_hello a.example";
        assert_eq!(
            said(rules, &[], &["a.example"], port, &hidden("a.example")).await,
            want
        );
    }
}

#[tokio::test]
async fn a_denied_name_stays_denied() {
    let deny = &["*.bad.example"];
    for rules in [&["*.example"][..], &["all"], &["8.8.8.8"]] {
        let told = &["x.bad.example"];
        let want = "deny_list x.bad.example *.bad.example";
        assert_eq!(
            said(rules, deny, told, 443, &say("x.bad.example")).await,
            want
        );
    }
}

#[tokio::test]
async fn an_allowed_address_needs_no_name() {
    for (rules, want) in [(&["all"], "ok all"), (&["8.8.8.8"], "ok 8.8.8.8")] {
        assert_eq!(
            said(rules, &["x.test"], &[], 443, &RequestedName::Missing).await,
            want
        );
        assert_eq!(
            said(rules, &["x.test"], &[], 443, &say("a.example")).await,
            want
        );
        assert_eq!(
            said(rules, &["9.9.9.9"], &[], 443, &hidden("a.example")).await,
            want
        );
        // The encrypted name could be the denied one.
        let denied = "encrypted_hello a.example";
        assert_eq!(
            said(rules, &["x.test"], &[], 443, &hidden("a.example")).await,
            denied
        );
    }
    assert_eq!(
        said(&["all"], &[], &[], 22, &RequestedName::Missing).await,
        "ok all"
    );
}

#[tokio::test]
async fn other_ports_by_sent_replies() {
    let rules = &["git.example:22", "*.db.example:5432", "web.example"];
    for (told, port, want) in [
        (&["git.example"][..], 22, "ok git.example:22"),
        (&["other.example", "git.example"], 22, "ok git.example:22"),
        (&["one.db.example"], 5432, "ok *.db.example:5432"),
        (&["git.example"], 5432, "port_closed git.example"),
        (&["web.example"], 22, "port_closed web.example"),
        (&["other.example"], 22, "not_allowed other.example"),
        (&[], 22, "not_allowed"),
        (&[], 9, "not_allowed"),
    ] {
        assert_eq!(
            said(rules, &[], told, port, &RequestedName::Missing).await,
            want,
            "{told:?} {port}"
        );
    }
    let want = "deny_list git.example git.example";
    assert_eq!(
        said(
            rules,
            &["git.example"],
            &["git.example"],
            22,
            &RequestedName::Missing
        )
        .await,
        want
    );
}

/// Check with an upstream resolver, before any reply was sent to the sandbox.
async fn looked_up(allow: &[&str], deny: &[&str], port: u16, host: &str) -> String {
    let resolver = resolver(vec![
        a_record("a.example", "8.8.8.8"),
        a_record("b.example", "9.9.9.9"),
        alias("c.example", "c.cdn.example"),
        a_record("c.cdn.example", "8.8.8.8"),
    ]);
    let sandbox = sandbox_with(policy(allow, deny), LIMITS, vec![resolver.await]);
    let to = SocketAddrV4::new(Ipv4Addr::new(8, 8, 8, 8), port);
    let policy = sandbox.policy();
    let decided = match port {
        80 | 443 => by_requested_name(&sandbox, &policy, to, &say(host)).await,
        _ => by_sent_replies(&sandbox, &policy, to).await,
    };
    match decided {
        Ok(grant) => format!("ok {}", grant.rule),
        Err(denial) => text(&denial),
    }
}

#[tokio::test]
async fn an_unknown_address_is_looked_up() {
    let rules = &["*.example"];
    assert_eq!(
        looked_up(rules, &[], 443, "a.example").await,
        "ok *.example"
    );
    assert_eq!(looked_up(rules, &[], 80, "c.example").await, "ok *.example");
    let want = "wrong_address b.example";
    assert_eq!(looked_up(rules, &[], 443, "b.example").await, want);
    let want = "unresolved d.example";
    assert_eq!(looked_up(rules, &[], 443, "d.example").await, want);
    let want = "deny_list c.example *.cdn.example";
    assert_eq!(
        looked_up(rules, &["*.cdn.example"], 443, "c.example").await,
        want
    );
    let ports = &["b.example:22", "c.example:22"];
    assert_eq!(looked_up(ports, &[], 22, "").await, "ok c.example:22");
    assert_eq!(
        looked_up(&["b.example:22", "*.example:22"], &[], 22, "").await,
        "not_allowed"
    );
    assert_eq!(
        looked_up(ports, &["*.cdn.example"], 22, "").await,
        "not_allowed"
    );
}
