//! `SandboxWarmPool`: sandboxes that run before anybody asks for them.
#![expect(clippy::duplicated_attributes, reason = "each column is an attribute")]

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How many sandboxes wait, and of what kind.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
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
    doc = "Sandboxes of one template that run before anybody asks for them.",
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
    /// How many sandboxes wait. None at all makes every claim a cold start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub replicas: Option<i32>,
    /// What they are made from.
    pub sandbox_template_ref: TemplateRef,
    /// What happens to waiting sandboxes when the template changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<UpdateStrategy>,
}

/// A template by name.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct TemplateRef {
    /// Name of a SandboxTemplate in the same namespace.
    pub name: String,
}

/// What happens to waiting sandboxes when the template changes.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct UpdateStrategy {
    /// Which of the two ways.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<UpdateStrategyType>,
}

/// The two ways to follow a template that changed.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum UpdateStrategyType {
    /// Sandboxes of the old template are deleted at once.
    Recreate,
    /// They are handed out; new ones follow the new template.
    #[default]
    OnReplenish,
}

/// What the pool is.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxWarmPoolStatus {
    /// Sandboxes in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Those of them that are ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Label selector of the pool's sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// The generation that these figures are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

// === impl SandboxWarmPool ===

impl SandboxWarmPool {
    /// How many sandboxes are to wait.
    pub fn desired(&self) -> usize {
        usize::try_from(self.spec.replicas.unwrap_or(1)).unwrap_or(0)
    }

    /// What happens when the template changes.
    pub fn strategy(&self) -> UpdateStrategyType {
        let strategy = self.spec.update_strategy.as_ref();
        strategy.and_then(|s| s.kind).unwrap_or_default()
    }
}
