//! Types that Sandbox, SandboxTemplate and SandboxClaim share: pod template and volume claim template.

use k8s_openapi::api::core::v1::{PersistentVolumeClaimSpec, PodSpec};
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Template of the pod of a sandbox.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct PodTemplate {
    /// Spec of the pod.
    pub spec: PodSpec,
    /// Labels and annotations of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<PodMetadata>,
}

/// Labels and annotations of a pod; no other metadata can be set.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct PodMetadata {
    /// Labels of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// Template of a PersistentVolumeClaim that exists as long as the sandbox, also while it is suspended or expired.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct VolumeClaimTemplate {
    /// Name, labels and annotations of the PersistentVolumeClaim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<VolumeClaimMetadata>,
    /// Spec of the PersistentVolumeClaim.
    pub spec: PersistentVolumeClaimSpec,
}

/// Metadata of a PersistentVolumeClaim.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct VolumeClaimMetadata {
    /// Name of the volume in the pod; the PersistentVolumeClaim is named `<name>-<sandbox>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels of the PersistentVolumeClaim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations of the PersistentVolumeClaim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

// === impl PodTemplate ===

impl PodTemplate {
    /// Labels of the template.
    pub fn labels(&self) -> impl Iterator<Item = (&String, &String)> {
        let labels = self.metadata.as_ref().and_then(|m| m.labels.as_ref());
        labels.into_iter().flatten()
    }

    /// Annotations of the template.
    pub fn annotations(&self) -> impl Iterator<Item = (&String, &String)> {
        let annotations = self.metadata.as_ref().and_then(|m| m.annotations.as_ref());
        annotations.into_iter().flatten()
    }
}

// === impl VolumeClaimTemplate ===

impl VolumeClaimTemplate {
    /// Name of the volume; empty if it is not set.
    pub fn name(&self) -> &str {
        let name = self.metadata.as_ref().and_then(|m| m.name.as_deref());
        name.unwrap_or_default()
    }
}
