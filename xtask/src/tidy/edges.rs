//! Which crate may use which: dependencies point down only (ARCHITECTURE.md, "Code map").
//! Normal dependencies count; tests may reach further.

use serde_json::Value;

/// Our crates, and which of ours each may use.
const OURS: &[(&str, &[&str])] = &[
    (
        "k8e",
        &[
            "k8e-cli",
            "k8e-confine",
            "k8e-gateway",
            "k8e-operator",
            "k8e-engine",
            "k8e-driver",
            "k8e-egress",
            "k8e-image",
            "k8e-store",
            "k8e-model",
            "k8e-net",
        ],
    ),
    ("k8e-cli", &["k8e-api", "k8e-image", "k8e-model"]),
    (
        "k8e-gateway",
        &["k8e-api", "k8e-engine", "k8e-model", "k8e-net"],
    ),
    ("k8e-api", &["k8e-model", "k8e-net"]),
    (
        "k8e-engine",
        &[
            "k8e-driver",
            "k8e-egress",
            "k8e-image",
            "k8e-snapshot",
            "k8e-store",
            "k8e-wire",
            "k8e-model",
        ],
    ),
    (
        "k8e-driver",
        &[
            "k8e-egress",
            "k8e-image",
            "k8e-wire",
            "k8e-model",
            "k8e-net",
        ],
    ),
    ("k8e-image", &["k8e-model"]),
    ("k8e-egress", &["k8e-model", "k8e-net"]),
    ("k8e-store", &["k8e-model"]),
    ("k8e-runtime", &["k8e-guest", "k8e-wire", "k8e-net"]),
    ("k8e-guest", &["k8e-wire"]),
    ("k8e-operator", &["k8e-net"]),
    ("k8e-confine", &[]),
    ("k8e-snapshot", &[]),
    ("k8e-wire", &[]),
    ("k8e-model", &[]),
    // Server plumbing of all that serve; a leaf.
    ("k8e-net", &[]),
];

/// These exist for tests and tools: they may use anything, and no crate of the product uses them.
const OUTSIDE: &[&str] = &[
    "k8e-testkit",
    "k8e-codegen",
    "k8e-e2e",
    "k8e-fuzz",
    "k8e-kube-dev",
    "xtask",
];

/// Other people's crates that only some of ours may name. A name covers its family: `tonic` is
/// also `tonic-health`.
const THEIRS: &[(&str, &[&str])] = &[
    ("tonic", &["k8e-api", "k8e-gateway", "k8e-runtime"]),
    ("sqlx", &["k8e-store"]),
    ("kube", &["k8e-operator"]),
];

/// Checks what `cargo metadata` says about our packages.
pub(super) fn check(metadata: &Value) -> Vec<String> {
    let packages = metadata["packages"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    packages.iter().flat_map(check_package).collect()
}

fn check_package(package: &Value) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or_default();
    if OUTSIDE.contains(&name) {
        return Vec::new();
    }
    let Some((_, allowed)) = OURS.iter().find(|(ours, _)| *ours == name) else {
        return vec![format!(
            "{name}: a new crate: say what it may use in xtask/src/tidy/edges.rs and what it is \
             for in ARCHITECTURE.md"
        )];
    };
    let dependencies = package["dependencies"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    // In cargo's JSON the kind of a normal dependency is null.
    let normal = dependencies
        .iter()
        .filter(|dependency| dependency["kind"].is_null());
    normal
        .filter_map(|dependency| dependency["name"].as_str())
        .filter_map(|used| check_edge(name, allowed, used))
        .collect()
}

fn check_edge(name: &str, allowed: &[&str], used: &str) -> Option<String> {
    let is_ours = OUTSIDE.contains(&used) || OURS.iter().any(|(ours, _)| *ours == used);
    if is_ours && !allowed.contains(&used) {
        return Some(format!(
            "{name} must not use {used}: move what it needs down (to k8e-model, say), or the code \
             up to a crate that may"
        ));
    }
    let (family, homes) = THEIRS.iter().find(|(family, _)| is_family(family, used))?;
    (!homes.contains(&name)).then(|| {
        format!(
            "{name} must not use {used}: {family} is named only in {}",
            homes.join(" and ")
        )
    })
}

fn is_family(family: &str, used: &str) -> bool {
    used.strip_prefix(family)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::check;
    use serde_json::json;

    fn violations(name: &str, used: &str, kind: Option<&str>) -> usize {
        let dependency = json!({ "name": used, "kind": kind });
        let package = json!({ "name": name, "dependencies": [dependency] });
        check(&json!({ "packages": [package] })).len()
    }

    #[test]
    fn dependencies_point_down_only() {
        assert_eq!(violations("k8e-engine", "k8e-driver", None), 0);
        assert_eq!(violations("k8e-driver", "k8e-engine", None), 1);
        assert_eq!(violations("k8e-model", "serde", None), 0);
    }

    #[test]
    fn tests_may_use_the_testkit_and_the_product_may_not() {
        assert_eq!(violations("k8e-engine", "k8e-testkit", Some("dev")), 0);
        assert_eq!(violations("k8e-engine", "k8e-testkit", None), 1);
    }

    #[test]
    fn grpc_and_sql_stay_where_they_belong() {
        assert_eq!(violations("k8e-gateway", "tonic-health", None), 0);
        assert_eq!(violations("k8e-cli", "tonic", None), 1);
        assert_eq!(violations("k8e-cli", "tonic-health", None), 1);
        assert_eq!(violations("k8e-engine", "sqlx", None), 1);
    }

    #[test]
    fn a_crate_nobody_described_is_refused() {
        assert_eq!(violations("k8e-helpers", "serde", None), 1);
    }
}
