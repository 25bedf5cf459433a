//! `Sandbox`: one pod with a stable name that can be suspended, resumed and made to expire.
#![expect(clippy::duplicated_attributes, reason = "each column is an attribute")]

use super::{PodTemplate, VolumeClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spec of a Sandbox.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "agents.x-k8s.io",
    version = "v1beta1",
    kind = "Sandbox",
    plural = "sandboxes",
    singular = "sandbox",
    shortname = "sandbox",
    namespaced,
    status = "SandboxStatus",
    derive = "PartialEq",
    doc = "One pod with a stable name that can be suspended, resumed and made to expire.",
    printcolumn(
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#,
        name = "Ready",
        type_ = "string"
    ),
    printcolumn(
        json_path = r#".status.conditions[?(@.type=="Ready")].reason"#,
        name = "Reason",
        type_ = "string"
    ),
    printcolumn(
        json_path = ".metadata.creationTimestamp",
        name = "Age",
        type_ = "date"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSpec {
    /// Template of the sandbox's pod.
    pub pod_template: PodTemplate,
    /// Volumes that exist as long as the sandbox; immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim_templates: Option<Vec<VolumeClaimTemplate>>,
    /// `true` creates a headless Service of the same name, `false` deletes it, unset leaves it unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
    /// When the sandbox expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shutdown_time: Option<Time>,
    /// What happens to the Sandbox object when it expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shutdown_policy: Option<ShutdownPolicy>,
    /// Whether the pod runs. A suspended sandbox has no pod and keeps its volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operating_mode: Option<OperatingMode>,
}

/// What happens to a Sandbox when it expires.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum ShutdownPolicy {
    /// The object is deleted, and its volumes with it.
    Delete,
    /// The object is kept, with the reason SandboxExpired; its pod and Service are deleted.
    #[default]
    Retain,
}

/// Whether the pod of a sandbox runs.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum OperatingMode {
    /// The pod runs.
    #[default]
    Running,
    /// The pod is deleted; the volumes are kept.
    Suspended,
}

/// Status of a Sandbox.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SandboxStatus {
    /// DNS name of the headless Service.
    #[serde(
        default,
        rename = "serviceFQDN",
        skip_serializing_if = "Option::is_none"
    )]
    pub service_fqdn: Option<String>,
    /// Name of the headless Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Conditions: Ready, Suspended, PodScheduled and Finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Vec<Condition>>,
    /// Label selector of the sandbox's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// IP addresses of the pod.
    #[serde(default, rename = "podIPs", skip_serializing_if = "Option::is_none")]
    pub pod_ips: Option<Vec<String>>,
    /// Node that the pod runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
}

// === impl Sandbox ===

impl Sandbox {
    /// The mode of the spec; Running if unset.
    pub fn operating_mode(&self) -> OperatingMode {
        self.spec.operating_mode.unwrap_or_default()
    }

    /// A condition of the sandbox by its type.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        let conditions = self.status.as_ref()?.conditions.as_ref()?;
        conditions.iter().find(|c| c.type_ == kind)
    }
}
