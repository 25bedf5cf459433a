//! `SandboxWarmPool`: pre-started sandboxes of one template, for claims.
#![expect(clippy::duplicated_attributes, reason = "each column is an attribute")]

use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spec of a SandboxWarmPool.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxWarmPool",
    plural = "sandboxwarmpools",
    singular = "sandboxwarmpool",
    shortname = "swp",
    namespaced,
    status = "SandboxWarmPoolStatus",
    derive = "PartialEq",
    doc = "Keeps pre-started sandboxes of one template ready for claims.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(json_path = ".status.readyReplicas", name = "Ready", type_ = "integer"),
    printcolumn(json_path = ".spec.replicas", name = "Desired", type_ = "integer"),
    printcolumn(
        json_path = ".metadata.creationTimestamp",
        name = "Age",
        type_ = "date"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxWarmPoolSpec {
    /// Number of unclaimed sandboxes to keep running. With 0 every claim is a cold start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub replicas: Option<i32>,
    /// The template of the sandboxes.
    pub sandbox_template_ref: TemplateRef,
    /// What happens to unclaimed sandboxes when the template changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<UpdateStrategy>,
}

/// Reference to a template.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct TemplateRef {
    /// Name of a SandboxTemplate in the same namespace.
    pub name: String,
}

/// What happens to unclaimed sandboxes when the template changes.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct UpdateStrategy {
    /// Recreate or OnReplenish.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<UpdateStrategyType>,
}

/// Type of an update strategy.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum UpdateStrategyType {
    /// Sandboxes of the old template are replaced at once.
    Recreate,
    /// Sandboxes of the old template are still bound to claims; only new ones use the new template.
    #[default]
    OnReplenish,
}

/// Status of a SandboxWarmPool.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SandboxWarmPoolStatus {
    /// Number of sandboxes in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Number of sandboxes in the pool that are ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Label selector of the pool's sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Generation of the spec that this status is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

// === impl SandboxWarmPool ===

impl SandboxWarmPool {
    /// Desired number of unclaimed sandboxes; 1 if unset.
    pub fn desired(&self) -> usize {
        usize::try_from(self.spec.replicas.unwrap_or(1)).unwrap_or(0)
    }

    /// The update strategy; OnReplenish if unset.
    pub fn strategy(&self) -> UpdateStrategyType {
        let strategy = self.spec.update_strategy.as_ref();
        strategy.and_then(|s| s.kind).unwrap_or_default()
    }
}
