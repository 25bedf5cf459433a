//! What Sandbox and SandboxTemplate have in common: the pod and the volumes to make.

use k8s_openapi::api::core::v1::{PersistentVolumeClaimSpec, PodSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The pod that a sandbox runs in.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct PodTemplate {
    /// What the pod runs.
    pub spec: PodSpec,
    /// Labels and annotations of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<PodMetadata>,
}

/// Labels and annotations that go onto a pod; nothing else of its metadata can be chosen.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct PodMetadata {
    /// Labels of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// A volume that is made for the sandbox and lives as long as it, across suspend and expiry.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct VolumeClaimTemplate {
    /// Name, labels and annotations of the claim for the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<VolumeClaimMetadata>,
    /// The volume that is asked for.
    pub spec: PersistentVolumeClaimSpec,
}

/// Metadata of a claim for a volume.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct VolumeClaimMetadata {
    /// Name of the volume in the pod; the claim is called `<name>-<sandbox>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

// === impl PodTemplate ===

impl PodTemplate {
    /// Labels of the pod that the template asks for.
    pub fn labels(&self) -> impl Iterator<Item = (&String, &String)> {
        let labels = self.metadata.as_ref().and_then(|m| m.labels.as_ref());
        labels.into_iter().flatten()
    }

    /// Annotations of the pod that the template asks for.
    pub fn annotations(&self) -> impl Iterator<Item = (&String, &String)> {
        let annotations = self.metadata.as_ref().and_then(|m| m.annotations.as_ref());
        annotations.into_iter().flatten()
    }
}

// === impl VolumeClaimTemplate ===

impl VolumeClaimTemplate {
    /// Name of the volume, empty where none was given.
    pub fn name(&self) -> &str {
        let name = self.metadata.as_ref().and_then(|m| m.name.as_deref());
        name.unwrap_or_default()
    }
}
