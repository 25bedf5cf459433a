//! The spec of a sandbox for a template, its hash, and whether a sandbox still matches it.

use crate::crd::names;
use crate::crd::{
    NetworkPolicyManagement, Sandbox, SandboxSpec, SandboxTemplate, VolumeClaimTemplate,
};
use k8s_openapi::api::core::v1::{PodDNSConfig, PodSpec};
use serde_json::json;

/// DNS resolvers of sandboxes under the built-in NetworkPolicy, which blocks the cluster's DNS.
const PUBLIC_RESOLVERS: [&str; 2] = ["8.8.8.8", "1.1.1.1"];

/// The spec of a new sandbox of this template.
pub(crate) fn spec(template: &SandboxTemplate) -> SandboxSpec {
    let mut pod_template = template.spec.pod_template.clone();
    secure(&mut pod_template.spec, template);
    SandboxSpec {
        pod_template,
        volume_claim_templates: template.spec.volume_claim_templates.clone(),
        service: template.spec.service,
        ..SandboxSpec::default()
    }
}

/// Sets secure defaults where the template has no value.
fn secure(pod: &mut PodSpec, template: &SandboxTemplate) {
    pod.automount_service_account_token.get_or_insert(false);
    let managed = template.spec.network_policy_management.unwrap_or_default()
        == NetworkPolicyManagement::Managed;
    let built_in = managed && template.spec.network_policy.is_none();
    if built_in && pod.dns_policy.as_deref().unwrap_or_default().is_empty() {
        pod.dns_policy = Some("None".to_owned());
        let config = pod.dns_config.get_or_insert_with(PodDNSConfig::default);
        config
            .nameservers
            .get_or_insert_with(|| PUBLIC_RESOLVERS.map(str::to_owned).to_vec());
    }
}

/// Hash of the fields that make a sandbox stale when they change; labels and annotations are not among them.
pub(crate) fn hash(template: &SandboxTemplate) -> String {
    let spec = spec(template);
    let volumes: Vec<_> = spec
        .volume_claim_templates
        .iter()
        .flatten()
        .map(essence)
        .collect();
    let blueprint =
        json!({"pod": spec.pod_template.spec, "volumes": volumes, "service": spec.service});
    names::hash(&blueprint.to_string())
}

/// Whether a sandbox differs from what the template would create now.
pub(crate) fn differs(template: &SandboxTemplate, sandbox: &Sandbox) -> bool {
    let wanted = spec(template);
    let volumes = |spec: &SandboxSpec| -> Vec<_> {
        spec.volume_claim_templates
            .iter()
            .flatten()
            .map(essence)
            .collect()
    };
    wanted.pod_template.spec != sandbox.spec.pod_template.spec
        || volumes(&wanted) != volumes(&sandbox.spec)
        || wanted.service != sandbox.spec.service
}

fn essence(volume: &VolumeClaimTemplate) -> serde_json::Value {
    json!({"name": volume.name(), "spec": volume.spec})
}
