//! What is kept of each kind in memory, and the words to find it by.
//!
//! Pods, Services and the rest are cut down to what the controllers read: thousands of them are held.

use crate::cache::Held;
use crate::crd::names::{NAME_HASH, WARM_POOL};
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ObjectMeta;
use std::collections::BTreeMap;

/// A pod of a sandbox.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodView {
    pub(crate) meta: ObjectMeta,
    pub(crate) phase: String,
    pub(crate) ready: bool,
    /// Status, reason and message of its condition `PodScheduled`.
    pub(crate) scheduled: Option<(String, String, String)>,
    pub(crate) ips: Vec<String>,
    pub(crate) node: Option<String>,
}

/// A Service or a claim for a volume: only who owns it matters.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    pub(crate) meta: ObjectMeta,
}

/// A node: only whether pods may go there.
#[derive(Clone, Debug)]
pub(crate) struct NodeView {
    meta: ObjectMeta,
    pub(crate) cordoned: bool,
}

/// A NetworkPolicy of a template.
#[derive(Clone, Debug)]
pub(crate) struct PolicyView {
    pub(crate) meta: ObjectMeta,
    pub(crate) spec: Option<NetworkPolicySpec>,
}

/// Word for what an object with this uid controls.
pub(crate) fn owned_by(uid: &str) -> String {
    format!("owner:{uid}")
}

/// Word for the sandboxes that wait in a pool, by the hash of its name.
pub(crate) fn pooled_in(namespace: &str, pool_hash: &str) -> String {
    format!("pool:{namespace}/{pool_hash}")
}

/// Word for what refers to an object by name: claims to their pool, pools to their template.
pub(crate) fn refers_to(namespace: &str, name: &str) -> String {
    format!("ref:{namespace}/{name}")
}

/// The reference of the one controller of an object.
pub(crate) fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    let owners = meta.owner_references.as_ref()?;
    owners.iter().find(|owner| owner.controller == Some(true))
}

pub(crate) fn label<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(key).map(String::as_str)
}

pub(crate) fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

pub(crate) fn uid(meta: &ObjectMeta) -> &str {
    meta.uid.as_deref().unwrap_or_default()
}

fn cut(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
}

fn owner_word(meta: &ObjectMeta) -> Option<String> {
    controller_of(meta).map(|owner| owned_by(&owner.uid))
}

// === From what the API server sends ===

impl From<Pod> for PodView {
    fn from(pod: Pod) -> Self {
        let mut meta = pod.metadata;
        cut(&mut meta);
        let status = pod.status.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        let condition = |kind: &str| conditions.iter().find(|c| c.type_ == kind);
        Self {
            meta,
            phase: status.phase.unwrap_or_else(|| "Pending".to_owned()),
            ready: condition("Ready").is_some_and(|c| c.status == "True"),
            scheduled: condition("PodScheduled").map(|c| {
                let (reason, message) = (c.reason.clone(), c.message.clone());
                (
                    c.status.clone(),
                    reason.unwrap_or_default(),
                    message.unwrap_or_default(),
                )
            }),
            ips: status
                .pod_ips
                .into_iter()
                .flatten()
                .map(|ip| ip.ip)
                .collect(),
            node: pod.spec.and_then(|spec| spec.node_name),
        }
    }
}

impl From<Service> for Child {
    fn from(service: Service) -> Self {
        let mut meta = service.metadata;
        cut(&mut meta);
        Self { meta }
    }
}

impl From<PersistentVolumeClaim> for Child {
    fn from(claim: PersistentVolumeClaim) -> Self {
        let mut meta = claim.metadata;
        cut(&mut meta);
        Self { meta }
    }
}

impl From<Node> for NodeView {
    fn from(node: Node) -> Self {
        let meta = ObjectMeta {
            name: node.metadata.name,
            uid: node.metadata.uid,
            resource_version: node.metadata.resource_version,
            ..ObjectMeta::default()
        };
        let cordoned = node.spec.and_then(|spec| spec.unschedulable) == Some(true);
        Self { meta, cordoned }
    }
}

impl From<NetworkPolicy> for PolicyView {
    fn from(policy: NetworkPolicy) -> Self {
        let mut meta = policy.metadata;
        cut(&mut meta);
        Self {
            meta,
            spec: policy.spec,
        }
    }
}

// === impl Held ===

impl Held for PodView {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        owner_word(&self.meta).into_iter().collect()
    }
}

impl Held for Child {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        owner_word(&self.meta).into_iter().collect()
    }
}

impl Held for NodeView {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        Vec::new()
    }
}

impl Held for PolicyView {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        owner_word(&self.meta).into_iter().collect()
    }
}

impl Held for Sandbox {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let pool = label(&self.metadata, WARM_POOL).map(|hash| pooled_in(namespace, hash));
        owner_word(&self.metadata).into_iter().chain(pool).collect()
    }
}

impl Held for SandboxClaim {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        vec![refers_to(namespace, &self.spec.warm_pool_ref.name)]
    }
}

impl Held for SandboxWarmPool {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        vec![refers_to(namespace, &self.spec.sandbox_template_ref.name)]
    }
}

impl Held for SandboxTemplate {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Whether an object without a controller may be taken over: it says so, or it carries this sandbox's hash.
pub(crate) fn may_adopt(meta: &ObjectMeta, name_hash: &str) -> bool {
    controller_of(meta).is_none()
        && (label(meta, crate::crd::names::ADOPTABLE) == Some("true")
            || label(meta, NAME_HASH) == Some(name_hash))
}

/// Labels, in the order in which they are written.
pub(crate) type Labels = BTreeMap<String, String>;
