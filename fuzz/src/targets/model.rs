//! Parsers of `model`: names, egress rules, paths, environments.

use crate::outcome;
use k8e_model::{
    ApprovalAction, ApprovalId, ApprovalReason, DenyList, EgressPolicy, Env, Error, GuestPath,
    HostName, KeyId, Labels, Language, Phase, PrincipalName, Proof, RULES_MAX, Rule, RunId,
    RuntimeKind, SandboxId, SecretRefs, SessionId, SnapshotLayers, SnapshotName, Template,
    TenantId, TerminalId,
};
use serde_json::{from_slice, from_str};
use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::str::FromStr;

/// Egress rules, one per line. Parsing and displaying round-trip.
pub(super) fn egress_rules(bytes: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.split('\n').collect();
    let policy = EgressPolicy::parse(&lines);
    if let Ok(policy) = &policy {
        assert_eq!(EgressPolicy::parse(&policy.entries()).as_ref(), Ok(policy));
        assert!(policy.rules().len() <= RULES_MAX);
        assert!(policy.in_words().len() <= 10_000);
        let kept = serde_json::to_string(policy).expect("a policy can be kept");
        assert_eq!(&from_str::<EgressPolicy>(&kept).expect("and read"), policy);
    }
    let denied = DenyList::parse(&lines);
    if let Ok(denied) = &denied {
        let again = DenyList::parse(&denied.entries());
        assert_eq!(again.map(|again| again.entries()), Ok(denied.entries()));
    }
    for line in &lines {
        same::<Rule>(line);
        let Ok(name) = HostName::parse(line) else {
            continue;
        };
        assert!(name.as_str().len() <= 253 && !name.as_str().ends_with('.'));
        assert_eq!(HostName::parse(name.as_str()).as_ref(), Ok(&name));
        if let Ok(policy) = &policy
            && policy.rule_for_name(&name, 443).is_some()
        {
            assert!(
                policy.allows_name(&name),
                "{name} is reached, so it is found"
            );
        }
    }
    outcome(&told(&policy.map(drop), &denied.map(drop)))
}

/// Identifiers, paths and single-line texts.
pub(super) fn names(bytes: &[u8]) -> u64 {
    let path = check_path(bytes);
    let text = String::from_utf8_lossy(bytes);
    let label = same::<SessionId>(&text);
    assert_eq!(label, same::<TenantId>(&text));
    assert_eq!(label, same::<RunId>(&text));
    assert_eq!(label, same::<TerminalId>(&text));
    assert_eq!(label, same::<SandboxId>(&text));
    assert_eq!(label, same::<KeyId>(&text));
    assert_eq!(label, same::<ApprovalId>(&text));
    let words = [
        label,
        same::<PrincipalName>(&text),
        same::<SnapshotName>(&text),
        same::<Proof>(&text),
        same::<RuntimeKind>(&text),
        same::<Template>(&text),
        text.parse::<Language>().is_ok(),
        text.parse::<Phase>().is_ok(),
    ];
    // Used as file names.
    if words[0] || words[1] || words[2] {
        assert!(!text.is_empty() && text.len() <= 128 && text != "..");
        assert!(!text.contains(['/', '\0', '\n', ' ']));
    }
    let action = ApprovalAction::try_from(text.clone().into_owned());
    let reason = ApprovalReason::try_from(text.clone().into_owned());
    if let Ok(action) = &action {
        assert!(!action.as_str().contains(['\u{1b}', '\r', '\u{202e}']));
    }
    let texts = told(&action.map(drop), &reason.map(drop));
    outcome(&format!("{words:?}{texts}{}", told(&path, &Ok(()))))
}

/// An environment as lines of `name=value`, and as JSON.
pub(super) fn maps(bytes: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(bytes);
    let pairs = text.split('\n').filter_map(|line| line.split_once('='));
    let map: BTreeMap<String, String> = pairs
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let env = Env::try_from(map.clone());
    if let Ok(env) = &env {
        check_env(env);
        assert_eq!(BTreeMap::from(env.clone()), map);
    }
    let labels = Labels::try_from(map);
    kept::<Env>(bytes);
    kept::<Labels>(bytes);
    kept::<SecretRefs>(bytes);
    kept::<SnapshotLayers>(bytes);
    kept::<EgressPolicy>(bytes);
    outcome(&told(&env.map(drop), &labels.map(drop)))
}

/// A path stays below its root.
pub(super) fn check_path(bytes: &[u8]) -> Result<(), Error> {
    let path = GuestPath::parse(bytes)?;
    let inner = path.as_bytes();
    assert!(inner.len() <= bytes.len() && !inner.contains(&0));
    let mut parts = inner.split(|byte| *byte == b'/');
    assert!(inner.is_empty() || parts.all(|part| !matches!(part, b"" | b"." | b"..")));
    if !inner.is_empty() {
        assert_eq!(GuestPath::parse(inner).as_ref(), Ok(&path));
    }
    Ok(())
}

/// An environment that `execve` accepts, within the limits.
pub(super) fn check_env(env: &Env) {
    let mut bytes = 0;
    for (name, value) in env.iter() {
        assert!(!name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0'));
        bytes += name.len() + value.len();
    }
    assert!(env.iter().count() <= 64 && bytes <= 32 * 1024);
}

/// Whether the text parses; then parsing and displaying round-trip.
fn same<T: FromStr + Display + PartialEq + Debug>(text: &str) -> bool {
    let Ok(one) = text.parse::<T>() else {
        return false;
    };
    let again = one.to_string().parse::<T>();
    assert_eq!(again.ok().as_ref(), Some(&one));
    true
}

/// A value that was parsed from JSON round-trips.
fn kept<T>(bytes: &[u8])
where
    T: serde::de::DeserializeOwned + serde::Serialize + PartialEq + Debug,
{
    if let Ok(one) = from_slice::<T>(bytes) {
        let kept = serde_json::to_vec(&one).expect("what was read can be written");
        assert_eq!(from_slice::<T>(&kept).expect("and read again"), one);
    }
}

fn told(one: &Result<(), Error>, two: &Result<(), Error>) -> String {
    let word = |result: &Result<(), Error>| match result {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.message.chars().take(60).collect(),
    };
    word(one) + &word(two)
}
