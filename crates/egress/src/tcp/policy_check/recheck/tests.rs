//! Which policy changes close open connections.

use super::*;
use crate::tcp::testing::{
    LIMITS, SOON, a_record, alias, name, policy, resolver, sandbox, sandbox_with,
};
use std::net::Ipv4Addr;

fn grant(named: Option<&str>, address_verified: bool, dns_names: &[&str]) -> Grant {
    Grant {
        name: named.map(name),
        rule: String::new(),
        address_verified,
        dns_names: dns_names.iter().map(|host| name(host)).collect(),
    }
}

async fn stays(allow: &[&str], deny: &[&str], dns_names: &[&str], grant: &Grant) -> String {
    let sandbox = sandbox(policy(allow, deny), LIMITS);
    for host in dns_names {
        let addresses = [Ipv4Addr::new(8, 8, 8, 8)];
        sandbox.sent_replies().record(&name(host), &addresses, SOON);
    }
    let to = "8.8.8.8:443".parse().unwrap();
    match recheck(&sandbox, &sandbox.policy(), to, grant).await {
        Ok(()) => "stays".to_owned(),
        Err(denial) => {
            assert_eq!(denial.reason, DenyReason::PolicyChanged);
            let name = denial.name.map(|name| format!(" {name}"));
            let rule = denial.rule.map(|rule| format!(" {rule}"));
            format!(
                "cut{}{}",
                name.unwrap_or_default(),
                rule.unwrap_or_default()
            )
        }
    }
}

#[tokio::test]
async fn a_policy_change_keeps_or_closes_connections() {
    let named = grant(Some("a.example"), true, &[]);
    assert_eq!(stays(&["a.example"], &[], &[], &named).await, "stays");
    assert_eq!(
        stays(&["*.example", "b.test"], &[], &[], &named).await,
        "stays"
    );
    assert_eq!(stays(&["all"], &[], &[], &named).await, "stays");
    assert_eq!(stays(&["8.8.8.8"], &[], &[], &named).await, "stays");
    for (allow, deny, want) in [
        (&["b.example"][..], &[][..], "cut a.example"),
        (&["none"], &[], "cut a.example"),
        (&["a.example:22"], &[], "cut a.example"),
        (&["a.example"], &["8.8.8.8"], "cut a.example 8.8.8.8"),
        (&["a.example"], &["*.example"], "cut a.example *.example"),
        (&["all"], &["a.example"], "cut a.example a.example"),
    ] {
        assert_eq!(stays(allow, deny, &[], &named).await, want);
    }
}

#[tokio::test]
async fn after_all_the_address_of_a_name_is_verified() {
    // Under `all` the address was not verified.
    let claimed = grant(Some("a.example"), false, &[]);
    assert_eq!(
        stays(&["a.example"], &[], &["a.example"], &claimed).await,
        "stays"
    );
    let want = "cut a.example";
    assert_eq!(stays(&["a.example"], &[], &[], &claimed).await, want);
    let nameless = grant(None, false, &["a.example"]);
    assert_eq!(
        stays(&["all"], &[], &["a.example"], &nameless).await,
        "stays"
    );
    assert_eq!(
        stays(&["a.example"], &[], &["a.example"], &nameless).await,
        "cut"
    );
    let want = "cut a.example a.example";
    assert_eq!(
        stays(&["all"], &["a.example"], &["a.example"], &nameless).await,
        want
    );
    assert_eq!(
        stays(&["all"], &["b.example"], &["a.example"], &nameless).await,
        "stays"
    );
}

#[tokio::test]
async fn a_newly_denied_cname_closes_the_connection() {
    let resolver = resolver(vec![
        alias("a.example", "a.cdn.example"),
        a_record("a.cdn.example", "8.8.8.8"),
    ])
    .await;
    let named = grant(Some("a.example"), true, &[]);
    for (deny, want) in [
        (
            &["*.cdn.example"][..],
            Err(Some("*.cdn.example".to_owned())),
        ),
        (&["other.example"], Ok(())),
    ] {
        let sandbox = sandbox_with(policy(&["a.example"], deny), LIMITS, vec![resolver]);
        let to = "8.8.8.8:443".parse().unwrap();
        let stays = recheck(&sandbox, &sandbox.policy(), to, &named).await;
        assert_eq!(stays.map_err(|denial| denial.rule), want);
    }
}
