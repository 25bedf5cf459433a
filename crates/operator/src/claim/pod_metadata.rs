//! Labels and annotations that a claim adds to its pod: validation, and merging with those of the template.

use crate::crd::names::{SAFE_TO_EVICT, is_system_key};
use crate::crd::{PodMetadata, SandboxClaim, SandboxTemplate};
use crate::error::{Error, Result};

/// Protected annotation domains: their annotations control the cluster, so claims must not set them.
const PROTECTED: [&str; 3] = ["kubernetes.io", "k8s.io", "agents.x-k8s.io"];

/// Validates the labels and annotations of a claim.
pub(super) fn check(claim: &SandboxClaim, allowed_domains: &[String]) -> Result<()> {
    let Some(metadata) = &claim.spec.additional_pod_metadata else {
        return Ok(());
    };
    for (key, value) in metadata.labels.iter().flatten() {
        if key == "app" && value == "sandbox-router" {
            return refuse(format!(
                "label \"{key}={value}\" is reserved for the router"
            ));
        }
        let domain = key.split_once('/').map(|(domain, _)| domain);
        if !domain.is_some_and(|domain| {
            allowed_domains
                .iter()
                .any(|allowed| is_under(domain, allowed))
        }) {
            return refuse(format!(
                "label \"{key}\" is not under an allowed domain ({}); prefix it, or ask the operator to allow its domain",
                allowed_domains.join(", ")
            ));
        }
    }
    for key in metadata.annotations.iter().flatten().map(|(key, _)| key) {
        let domain = key.split_once('/').map_or("", |(domain, _)| domain);
        let protected = PROTECTED
            .iter()
            .any(|protected| is_under(domain, protected));
        if protected && key != SAFE_TO_EVICT {
            return refuse(format!("annotation \"{key}\" is under a protected domain"));
        }
    }
    Ok(())
}

fn refuse(message: String) -> Result<()> {
    Err(Error::Refused {
        reason: "InvalidMetadata",
        message,
    })
}

fn is_under(domain: &str, parent: &str) -> bool {
    domain == parent
        || domain
            .strip_suffix(parent)
            .is_some_and(|head| head.ends_with('.'))
}

/// The labels and annotations of the template, overridden by those of the claim.
pub(super) fn merged(claim: &SandboxClaim, template: &SandboxTemplate) -> PodMetadata {
    let mut merged = template
        .spec
        .pod_template
        .metadata
        .clone()
        .unwrap_or_default();
    if let Some(added) = &claim.spec.additional_pod_metadata {
        let add = |into: &mut Option<crate::object_meta::Labels>,
                   from: &Option<crate::object_meta::Labels>| {
            if let Some(from) = from {
                let own = from.iter().filter(|(key, _)| !is_system_key(key));
                into.get_or_insert_default()
                    .extend(own.map(|(k, v)| (k.clone(), v.clone())));
            }
        };
        add(&mut merged.labels, &added.labels);
        add(&mut merged.annotations, &added.annotations);
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::SandboxClaimSpec;

    fn claim(labels: &[(&str, &str)], annotations: &[&str]) -> SandboxClaim {
        let mut claim = SandboxClaim::new("c", SandboxClaimSpec::default());
        claim.spec.additional_pod_metadata = Some(PodMetadata {
            labels: Some(
                labels
                    .iter()
                    .map(|(k, v)| ((*k).into(), (*v).into()))
                    .collect(),
            ),
            annotations: Some(
                annotations
                    .iter()
                    .map(|k| ((*k).into(), String::new()))
                    .collect(),
            ),
        });
        claim
    }

    fn verdict(labels: &[(&str, &str)], annotations: &[&str]) -> bool {
        check(
            &claim(labels, annotations),
            &["sandbox.users.io".to_owned()],
        )
        .is_ok()
    }

    #[test]
    fn labels_need_an_allowed_domain() {
        assert!(verdict(
            &[
                ("sandbox.users.io/team", "a"),
                ("x.sandbox.users.io/team", "a")
            ],
            &[]
        ));
        for key in [
            "team",
            "evilsandbox.users.io/x",
            "users.io/x",
            "kubernetes.io/x",
            "agents.x-k8s.io/x",
        ] {
            assert!(!verdict(&[(key, "a")], &[]), "{key}");
        }
        assert!(!verdict(&[("app", "sandbox-router")], &[]));
    }

    #[test]
    fn annotations_of_protected_domains_are_refused() {
        assert!(verdict(&[], &["example.com/x", "note", SAFE_TO_EVICT]));
        for key in [
            "kubernetes.io/x",
            "a.k8s.io/x",
            "agents.x-k8s.io/x",
            "container.apparmor.security.beta.kubernetes.io/c",
        ] {
            assert!(!verdict(&[], &[key]), "{key}");
        }
    }
}
