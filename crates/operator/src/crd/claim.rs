//! `SandboxClaim`: "give me a sandbox of this pool".
#![expect(clippy::duplicated_attributes, reason = "each column is an attribute")]

use super::{PodMetadata, VolumeClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is asked for.
#[derive(CustomResource, Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
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
    doc = "Asks for one sandbox of a pool: a warm one where there is one, else a new one.",
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
    /// The pool, and by it the template.
    pub warm_pool_ref: WarmPoolRef,
    /// When the claim ends, and what happens then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<ClaimLifecycle>,
    /// Labels and annotations for the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub additional_pod_metadata: Option<PodMetadata>,
    /// Environment variables; any of them forces a cold start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<Vec<ClaimEnv>>,
    /// Volumes; any of them forces a cold start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim_templates: Option<Vec<VolumeClaimTemplate>>,
}

/// A pool by name.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct WarmPoolRef {
    /// Name of a SandboxWarmPool in the claim's namespace.
    pub name: String,
}

/// When a claim ends, and what happens then.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimLifecycle {
    /// When the claim expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shutdown_time: Option<Time>,
    /// How long the claim stays after its pod finished.
    #[serde(
        default,
        rename = "ttlSecondsAfterFinished",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
    /// What happens when it expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shutdown_policy: Option<ClaimShutdownPolicy>,
}

/// What happens to a claim that expires.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum ClaimShutdownPolicy {
    /// Claim and sandbox are deleted.
    Delete,
    /// The same, and the claim is seen until sandbox and pod are gone.
    DeleteForeground,
    /// The sandbox is deleted, the claim stays.
    #[default]
    Retain,
}

/// One environment variable of a container.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimEnv {
    /// Name of the variable.
    pub name: String,
    /// Its value.
    pub value: String,
    /// The container, or the first one of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_name: Option<String>,
}

/// What the claim got.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct SandboxClaimStatus {
    /// Ready and Finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Vec<Condition>>,
    /// The sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<BoundSandbox>,
}

/// The sandbox of a claim.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct BoundSandbox {
    /// Name of the Sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Addresses of its pod.
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

    /// Name of the sandbox that the status gives.
    pub fn bound_name(&self) -> Option<&str> {
        let sandbox = self.status.as_ref()?.sandbox.as_ref()?;
        sandbox.name.as_deref().filter(|name| !name.is_empty())
    }

    /// Whether a warm sandbox cannot serve: it runs already, with its environment and volumes.
    pub fn needs_cold_start(&self) -> bool {
        let env = self.spec.env.as_ref().is_some_and(|e| !e.is_empty());
        let volumes = self.spec.volume_claim_templates.as_ref();
        env || volumes.is_some_and(|v| !v.is_empty())
    }
}
