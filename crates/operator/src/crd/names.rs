//! Names of API groups, labels and annotations. Clients and other controllers read them.

/// API group of Sandbox.
pub const GROUP: &str = "agents.x-k8s.io";
/// API group of SandboxClaim, SandboxWarmPool and SandboxTemplate.
pub const EXTENSIONS_GROUP: &str = "extensions.agents.x-k8s.io";

/// Label: hash of the sandbox's name, on its Pod, Service and volume claims.
pub const NAME_HASH: &str = "agents.x-k8s.io/sandbox-name-hash";
/// Annotation of a bound Sandbox: name of its pod.
pub const POD_NAME: &str = "agents.x-k8s.io/pod-name";
/// Annotation of a Sandbox: name of its template.
pub const TEMPLATE_REF: &str = "agents.x-k8s.io/sandbox-template-ref";
/// Label: hash of the template's name; NetworkPolicies select pods by it.
pub const TEMPLATE_REF_HASH: &str = "agents.x-k8s.io/sandbox-template-ref-hash";
/// Label of a pooled Sandbox: hash of the template content that it was created from.
pub const TEMPLATE_HASH: &str = "agents.x-k8s.io/sandbox-template-hash";
/// Older name of [`TEMPLATE_HASH`]; it is only removed.
pub const POD_TEMPLATE_HASH: &str = "agents.x-k8s.io/sandbox-pod-template-hash";
/// Label of an unclaimed Sandbox and its Pod: hash of the pool's name.
pub const WARM_POOL: &str = "agents.x-k8s.io/warm-pool-sandbox";
/// Label of a bound Sandbox and its Pod: UID of the claim.
pub const CLAIM_UID: &str = "agents.x-k8s.io/claim-uid";
/// Label of a Sandbox: `warm` or `cold`.
pub const LAUNCH_TYPE: &str = "agents.x-k8s.io/launch-type";
/// Label: the client that created the object; see [`known_client`].
pub const CREATED_BY: &str = "agents.x-k8s.io/created-by";
/// Label: `true` allows a Sandbox to adopt this object if it has no controller.
pub const ADOPTABLE: &str = "agents.x-k8s.io/adoptable";
/// Annotation of a Pod: the label keys that came from the pod template.
pub const PROPAGATED_LABELS: &str = "agents.x-k8s.io/propagated-labels";
/// Annotation of a Pod: the annotation keys that came from the pod template.
pub const PROPAGATED_ANNOTATIONS: &str = "agents.x-k8s.io/propagated-annotations";
/// Annotation (formerly a label) of a claim: name of the sandbox that was assigned to it.
pub const ASSIGNED: &str = "agents.x-k8s.io/sandbox-name";
/// Annotation of a claim: when the client first requested it.
pub const CLIENT_REQUESTED_AT: &str = "agents.x-k8s.io/client-first-requested-at";
/// Annotation of a claim: when this controller first observed it.
pub const OBSERVED_AT: &str = "agents.x-k8s.io/controller-first-observed-at";
/// Annotation of a claim: when it was first ready.
pub const READY_AT: &str = "agents.x-k8s.io/claim-first-ready-at";
/// Annotation of a claim: when an admission webhook first observed it.
pub const WEBHOOK_OBSERVED_AT: &str = "agents.x-k8s.io/webhook-first-observed-at";
/// Annotation: OpenTelemetry trace context of the object.
pub const TRACE_CONTEXT: &str = "opentelemetry.io/trace-context";
/// Annotation of a Pod: whether the cluster autoscaler may evict it; `true` for unclaimed pods.
pub const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";

/// Hash of a name for labels: FNV-1a, 32 bits, eight hexadecimal digits.
pub fn hash(name: &str) -> String {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("{hash:08x}")
}

/// Whether a label or annotation key is reserved for the controllers: it is never copied from a template or a claim.
pub fn is_system_key(key: &str) -> bool {
    key == TRACE_CONTEXT
        || [GROUP, EXTENSIONS_GROUP]
            .iter()
            .any(|group| key.strip_prefix(group).is_some_and(|k| k.starts_with('/')))
}

/// Normalizes [`CREATED_BY`] to a known client or "unknown", which bounds the values of the metric label.
pub fn known_client(created_by: Option<&str>) -> &'static str {
    match created_by {
        Some("go-client") => "go-client",
        Some("python-client") => "python-client",
        Some("controller") => "controller",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(hash(""), "811c9dc5");
        assert_eq!(hash("a"), "e40c292c");
        assert_eq!(hash("foobar"), "bf9cf968");
    }

    #[test]
    fn keys_of_the_two_api_groups_are_reserved() {
        assert!(is_system_key(NAME_HASH));
        assert!(is_system_key("extensions.agents.x-k8s.io/x"));
        assert!(is_system_key(TRACE_CONTEXT));
        assert!(!is_system_key("agents.x-k8s.io.example/x"));
        assert!(!is_system_key("app"));
    }
}
