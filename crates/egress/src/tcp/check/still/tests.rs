//! Which changes of a policy cut what is open.

use super::*;
use crate::tcp::testing::{LIMITS, SOON, a_record, alias, name, policy, resolver, ward, ward_with};
use std::net::Ipv4Addr;

fn pass(named: Option<&str>, checked: bool, told: &[&str]) -> Pass {
    Pass {
        name: named.map(name),
        rule: String::new(),
        checked,
        told: told.iter().map(|host| name(host)).collect(),
    }
}

async fn stays(allow: &[&str], deny: &[&str], told: &[&str], pass: &Pass) -> String {
    let ward = ward(policy(allow, deny), LIMITS);
    for host in told {
        let addresses = [Ipv4Addr::new(8, 8, 8, 8)];
        ward.answers().tell(&name(host), &addresses, SOON);
    }
    let to = "8.8.8.8:443".parse().unwrap();
    match still(&ward, &ward.policy(), to, pass).await {
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
async fn what_is_open_stays_or_is_cut() {
    let named = pass(Some("a.example"), true, &[]);
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
async fn what_was_open_to_all_must_earn_its_name() {
    // Nobody asked whose address it was when everything was allowed.
    let claimed = pass(Some("a.example"), false, &[]);
    assert_eq!(
        stays(&["a.example"], &[], &["a.example"], &claimed).await,
        "stays"
    );
    let want = "cut a.example";
    assert_eq!(stays(&["a.example"], &[], &[], &claimed).await, want);
    let nameless = pass(None, false, &["a.example"]);
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
async fn an_alias_that_is_denied_now_cuts() {
    let resolver = resolver(vec![
        alias("a.example", "a.cdn.example"),
        a_record("a.cdn.example", "8.8.8.8"),
    ])
    .await;
    let named = pass(Some("a.example"), true, &[]);
    for (deny, want) in [
        (
            &["*.cdn.example"][..],
            Err(Some("*.cdn.example".to_owned())),
        ),
        (&["other.example"], Ok(())),
    ] {
        let ward = ward_with(policy(&["a.example"], deny), LIMITS, vec![resolver]);
        let to = "8.8.8.8:443".parse().unwrap();
        let stays = still(&ward, &ward.policy(), to, &named).await;
        assert_eq!(stays.map_err(|denial| denial.rule), want);
    }
}
