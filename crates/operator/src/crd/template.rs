//! `SandboxTemplate`: what the sandboxes of a pool are made from, and what they may reach.

use super::{PodTemplate, VolumeClaimTemplate};
use k8s_openapi::api::networking::v1::{NetworkPolicyEgressRule, NetworkPolicyIngressRule};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What sandboxes are made from.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxTemplate",
    plural = "sandboxtemplates",
    singular = "sandboxtemplate",
    shortname = "sandboxtemplate",
    namespaced,
    derive = "PartialEq",
    doc = "What the sandboxes of a pool are made from, and what they may reach."
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxTemplateSpec {
    /// The pod that runs the sandbox.
    pub pod_template: PodTemplate,
    /// Volumes that live as long as the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim_templates: Option<Vec<VolumeClaimTemplate>>,
    /// Whether sandboxes get a headless Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
    /// Rules that replace the built-in ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicyRules>,
    /// Whether a NetworkPolicy is kept for the template's sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy_management: Option<NetworkPolicyManagement>,
    /// Whether a claim may add environment variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars_injection_policy: Option<InjectionPolicy>,
    /// Whether a claim may add volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim_templates_policy: Option<InjectionPolicy>,
}

/// Rules of the NetworkPolicy of a template.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct NetworkPolicyRules {
    /// Who may reach the sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<Vec<NetworkPolicyIngressRule>>,
    /// What the sandboxes may reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<NetworkPolicyEgressRule>>,
}

/// Who keeps the NetworkPolicy of a template.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum NetworkPolicyManagement {
    /// The controller does.
    #[default]
    Managed,
    /// Nobody here; the controller deletes its own.
    Unmanaged,
}

/// What a claim may add to what its template says.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum InjectionPolicy {
    /// New names only.
    Allowed,
    /// New names, and it may replace the template's.
    Overrides,
    /// Nothing.
    #[default]
    Disallowed,
}
