//! `SandboxClaim`: a request for one sandbox of a pool.
#![expect(clippy::duplicated_attributes, reason = "each column is an attribute")]

use super::{PodMetadata, VolumeClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spec of a SandboxClaim.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxClaim",
    plural = "sandboxclaims",
    singular = "sandboxclaim",
    shortname = "sandboxclaim",
    namespaced,
    status = "SandboxClaimStatus",
    derive = "PartialEq",
    doc = "Requests one sandbox of a pool: a warm one if there is one, else a new one (cold start).",
    printcolumn(
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#,
        name = "Ready",
        type_ = "string"
    ),
    printcolumn(json_path = ".status.sandbox.name", name = "Sandbox", type_ = "string"),
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
pub struct SandboxClaimSpec {
    /// The warm pool, which also determines the template.
    pub warm_pool_ref: WarmPoolRef,
    /// When the claim expires, and what happens then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<ClaimLifecycle>,
    /// Labels and annotations to add to the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub additional_pod_metadata: Option<PodMetadata>,
    /// Environment variables to add; any of them forces a cold start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<Vec<ClaimEnv>>,
    /// Volumes to add; any of them forces a cold start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim_templates: Option<Vec<VolumeClaimTemplate>>,
}

/// Reference to a warm pool.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct WarmPoolRef {
    /// Name of a SandboxWarmPool in the claim's namespace.
    pub name: String,
}

/// When a claim expires, and what happens then.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ClaimLifecycle {
    /// When the claim expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shutdown_time: Option<Time>,
    /// The claim expires this many seconds after its pod finished.
    #[serde(
        default,
        rename = "ttlSecondsAfterFinished",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub ttl_seconds_after_finished: Option<i32>,
    /// What happens when the claim expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shutdown_policy: Option<ClaimShutdownPolicy>,
}

/// What happens to a claim that expires.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum ClaimShutdownPolicy {
    /// The claim is deleted, and its sandbox with it.
    Delete,
    /// As Delete, with foreground deletion: the claim exists until its sandbox and pod are gone.
    DeleteForeground,
    /// The sandbox is deleted; the claim is kept.
    #[default]
    Retain,
}

/// One environment variable of a container.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ClaimEnv {
    /// Name of the variable.
    pub name: String,
    /// Value of the variable.
    pub value: String,
    /// Name of the container; the first container of the pod if unset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_name: Option<String>,
}

/// Status of a SandboxClaim.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct SandboxClaimStatus {
    /// Conditions: Ready and Finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Vec<Condition>>,
    /// The sandbox that the claim is bound to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<BoundSandbox>,
}

/// The sandbox that a claim is bound to.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct BoundSandbox {
    /// Name of the Sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// IP addresses of its pod.
    #[serde(default, rename = "podIPs", skip_serializing_if = "Option::is_none")]
    pub pod_ips: Option<Vec<String>>,
}

// === impl SandboxClaim ===

impl SandboxClaim {
    /// A condition of the claim by its type.
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        let conditions = self.status.as_ref()?.conditions.as_ref()?;
        conditions.iter().find(|c| c.type_ == kind)
    }

    /// Name of the bound sandbox, from the status.
    pub fn bound_name(&self) -> Option<&str> {
        let sandbox = self.status.as_ref()?.sandbox.as_ref()?;
        sandbox.name.as_deref().filter(|name| !name.is_empty())
    }

    /// Whether a warm sandbox cannot be used: environment and volumes of a running pod cannot be changed.
    pub fn needs_cold_start(&self) -> bool {
        let env = self.spec.env.as_ref().is_some_and(|e| !e.is_empty());
        let volumes = self.spec.volume_claim_templates.as_ref();
        env || volumes.is_some_and(|v| !v.is_empty())
    }
}
