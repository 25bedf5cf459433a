//! `SandboxTemplate`: pod and volumes of the sandboxes of a pool, and their network policy.

use super::{PodTemplate, VolumeClaimTemplate};
use k8s_openapi::api::networking::v1::{NetworkPolicyEgressRule, NetworkPolicyIngressRule};
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spec of a SandboxTemplate.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxTemplate",
    plural = "sandboxtemplates",
    singular = "sandboxtemplate",
    shortname = "sandboxtemplate",
    namespaced,
    derive = "PartialEq",
    doc = "Template of the sandboxes of a pool: pod, volumes and network policy."
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxTemplateSpec {
    /// Template of the sandbox's pod.
    pub pod_template: PodTemplate,
    /// Volumes that exist as long as the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim_templates: Option<Vec<VolumeClaimTemplate>>,
    /// Whether sandboxes get a headless Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
    /// Network policy rules that replace the built-in ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicyRules>,
    /// Whether the controller manages a NetworkPolicy for the template's sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy_management: Option<NetworkPolicyManagement>,
    /// Whether claims may add environment variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars_injection_policy: Option<InjectionPolicy>,
    /// Whether claims may add volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim_templates_policy: Option<InjectionPolicy>,
}

/// Rules of the NetworkPolicy of a template.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct NetworkPolicyRules {
    /// Ingress rules: which peers may connect to the sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<Vec<NetworkPolicyIngressRule>>,
    /// Egress rules: which peers the sandboxes may connect to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<NetworkPolicyEgressRule>>,
}

/// Whether the controller manages the NetworkPolicy of a template.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum NetworkPolicyManagement {
    /// The controller creates and updates it.
    #[default]
    Managed,
    /// The controller creates none, and deletes the one that it created.
    Unmanaged,
}

/// What a claim may add to the template.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum InjectionPolicy {
    /// New names; names of the template cannot be overridden.
    Allowed,
    /// New names, and names of the template can be overridden.
    Overrides,
    /// Nothing may be added.
    #[default]
    Disallowed,
}
