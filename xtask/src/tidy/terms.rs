//! The first lines of a crate use the term that people search for.

use serde_json::Value;
use std::path::{Path, PathBuf};

/// Each crate, and the standard term of what it is. One of them is enough, in any case.
const TERMS: &[(&str, &[&str])] = &[
    ("k8e", &["binary"]),
    ("k8e-api", &["gRPC"]),
    ("k8e-cli", &["command line", "CLI", "client commands"]),
    ("k8e-codegen", &["protobuf"]),
    ("k8e-confine", &["privilege drop"]),
    ("k8e-driver", &["namespaces", "isolation"]),
    ("k8e-e2e", &["end-to-end"]),
    ("k8e-egress", &["egress"]),
    ("k8e-engine", &["session"]),
    ("k8e-fuzz", &["fuzz"]),
    ("k8e-gateway", &["gRPC"]),
    ("k8e-guest", &["agent", "init"]),
    ("k8e-image", &["OCI"]),
    ("k8e-kube-dev", &["Kubernetes"]),
    ("k8e-model", &["domain model", "domain types"]),
    ("k8e-net", &["accept loop"]),
    ("k8e-operator", &["operator", "controllers"]),
    ("k8e-runtime", &["Kubernetes"]),
    ("k8e-snapshot", &["content-defined chunks", "chunk store"]),
    ("k8e-store", &["SQLite", "persistence"]),
    ("k8e-testkit", &["test"]),
    ("k8e-wire", &["protocol"]),
    ("xtask", &["build", "CI"]),
];

/// Checks the `//!` at the head of every crate that `cargo metadata` lists.
pub(super) fn check(metadata: &Value) -> Result<Vec<String>, String> {
    let packages = metadata["packages"].as_array();
    let packages = packages.map(Vec::as_slice).unwrap_or_default();
    let mut violations = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(root) = root_of(package) else {
            continue;
        };
        let text =
            std::fs::read_to_string(&root).map_err(|e| format!("{}: {e}", root.display()))?;
        violations.extend(check_crate(name, &root, &text));
    }
    Ok(violations)
}

/// The library of a package, or else its first binary.
fn root_of(package: &Value) -> Option<PathBuf> {
    let targets = package["targets"].as_array()?;
    let of_kind = |kind: &str| targets.iter().find(|target| target["kind"][0] == kind);
    let root = of_kind("lib").or_else(|| of_kind("bin"))?;
    root["src_path"].as_str().map(PathBuf::from)
}

fn check_crate(name: &str, root: &Path, text: &str) -> Option<String> {
    let Some((_, terms)) = TERMS.iter().find(|(listed, _)| *listed == name) else {
        return Some(format!(
            "{name}: a new crate: say in xtask/src/tidy/terms.rs by which term people search for it"
        ));
    };
    let doc: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("//!"))
        .map(str::trim)
        .collect();
    let doc = doc.join(" ").to_lowercase();
    if terms.iter().any(|term| doc.contains(&term.to_lowercase())) {
        return None;
    }
    Some(format!(
        "{}:1: the `//!` of {name} has none of the terms that people search for: {}",
        root.display(),
        terms.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::{check, check_crate};
    use serde_json::json;
    use std::path::Path;

    fn is_refused(name: &str, text: &str) -> bool {
        check_crate(name, Path::new("lib.rs"), text).is_some()
    }

    #[test]
    fn a_crate_says_its_standard_term() {
        assert!(!is_refused("k8e-gateway", "//! The grpc server.\n"));
        assert!(!is_refused("k8e-confine", "//! Privilege\n//! drop.\n"));
        assert!(is_refused("k8e-gateway", "//! The doors.\n// gRPC\n"));
        assert!(is_refused("k8e-new", "//! gRPC.\n"));
    }

    #[test]
    fn the_head_of_a_package_is_its_library() {
        let dir = tempfile::tempdir().unwrap();
        let target = |kind: &str, text: &str| {
            let path = dir.path().join(kind);
            std::fs::write(&path, text).unwrap();
            json!({ "kind": [kind], "src_path": path })
        };
        let targets = [
            target("bin", "//! A binary.\n"),
            target("lib", "//! The gRPC server.\n"),
        ];
        let package = json!({ "name": "k8e-gateway", "targets": targets });
        let violations = check(&json!({ "packages": [package] })).unwrap();
        assert!(violations.is_empty(), "{violations:?}");
    }
}
