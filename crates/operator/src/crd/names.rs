//! Labels, annotations and names that clients and other controllers read.

/// Group of Sandbox.
pub const GROUP: &str = "agents.x-k8s.io";
/// Group of the other three kinds.
pub const EXTENSIONS_GROUP: &str = "extensions.agents.x-k8s.io";

/// Label: hash of the sandbox's name, on its Pod, Service and volume claims.
pub const NAME_HASH: &str = "agents.x-k8s.io/sandbox-name-hash";
/// Annotation of an adopted Sandbox: its pod, which was made under the same name.
pub const POD_NAME: &str = "agents.x-k8s.io/pod-name";
/// Annotation of a Sandbox: its template.
pub const TEMPLATE_REF: &str = "agents.x-k8s.io/sandbox-template-ref";
/// Label: hash of the template's name; NetworkPolicies select pods by it.
pub const TEMPLATE_REF_HASH: &str = "agents.x-k8s.io/sandbox-template-ref-hash";
/// Label of a pooled Sandbox: hash of what it was made from.
pub const TEMPLATE_HASH: &str = "agents.x-k8s.io/sandbox-template-hash";
/// The same under an older name; only ever removed.
pub const POD_TEMPLATE_HASH: &str = "agents.x-k8s.io/sandbox-pod-template-hash";
/// Label: hash of the pool's name, on Sandbox and Pod while nobody has claimed them.
pub const WARM_POOL: &str = "agents.x-k8s.io/warm-pool-sandbox";
/// Label: uid of the claim, on Sandbox and Pod once they are claimed.
pub const CLAIM_UID: &str = "agents.x-k8s.io/claim-uid";
/// Label of a Sandbox: `warm` or `cold`.
pub const LAUNCH_TYPE: &str = "agents.x-k8s.io/launch-type";
/// Label: which client made the object.
pub const CREATED_BY: &str = "agents.x-k8s.io/created-by";
/// Label: an object of this name that nobody owns may be taken over.
pub const ADOPTABLE: &str = "agents.x-k8s.io/adoptable";
/// Annotation of a Pod: the label keys that came from the pod template.
pub const PROPAGATED_LABELS: &str = "agents.x-k8s.io/propagated-labels";
/// Annotation of a Pod: the annotation keys that came from the pod template.
pub const PROPAGATED_ANNOTATIONS: &str = "agents.x-k8s.io/propagated-annotations";
/// Annotation (once a label) of a claim: the sandbox that was chosen for it.
pub const ASSIGNED: &str = "agents.x-k8s.io/sandbox-name";
/// Annotation of a claim: when the client asked.
pub const CLIENT_REQUESTED_AT: &str = "agents.x-k8s.io/client-first-requested-at";
/// Annotation of a claim: when this controller saw it first.
pub const OBSERVED_AT: &str = "agents.x-k8s.io/controller-first-observed-at";
/// Annotation of a claim: when it was ready first.
pub const READY_AT: &str = "agents.x-k8s.io/claim-first-ready-at";
/// Annotation of a claim: when an admission webhook saw it first.
pub const WEBHOOK_OBSERVED_AT: &str = "agents.x-k8s.io/webhook-first-observed-at";
/// Annotation: the trace that the object belongs to.
pub const TRACE_CONTEXT: &str = "opentelemetry.io/trace-context";
/// Annotation of a Pod: the cluster autoscaler may evict it. True while nobody has claimed it.
pub const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";

/// Hash of a name as it stands in labels: FNV-1a, 32 bits, eight hexadecimal digits.
pub fn hash(name: &str) -> String {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("{hash:08x}")
}

/// Whether a key is the controllers' own: such keys are never taken from a template or a claim.
pub fn is_system_key(key: &str) -> bool {
    key == TRACE_CONTEXT
        || [GROUP, EXTENSIONS_GROUP]
            .iter()
            .any(|group| key.strip_prefix(group).is_some_and(|k| k.starts_with('/')))
}

/// The client that made an object, as far as labels and metrics tell clients apart.
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
    fn only_keys_of_the_two_groups_are_ours() {
        assert!(is_system_key(NAME_HASH));
        assert!(is_system_key("extensions.agents.x-k8s.io/x"));
        assert!(is_system_key(TRACE_CONTEXT));
        assert!(!is_system_key("agents.x-k8s.io.example/x"));
        assert!(!is_system_key("app"));
    }
}
