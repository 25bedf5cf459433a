//! The informer caches, one per kind: what each keeps of an object, and the index keys to look it up by.
//!
//! Pods, Services and other kinds of Kubernetes are cut down to the fields that the controllers read: a cache has
//! thousands of them.

use crate::cache::{Cache, Cached};
use crate::crd::names::WARM_POOL;
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use crate::object_meta::{controller_of, label};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicySpec};
use kube::api::ObjectMeta;

/// The informer caches of the operator, one per kind. A watch fills each, and the answers to our own writes.
#[derive(Default)]
pub(crate) struct Caches {
    pub(crate) sandboxes: Cache<Sandbox>,
    pub(crate) claims: Cache<SandboxClaim>,
    pub(crate) pools: Cache<SandboxWarmPool>,
    pub(crate) templates: Cache<SandboxTemplate>,
    pub(crate) pods: Cache<PodView>,
    pub(crate) services: Cache<Child>,
    pub(crate) volumes: Cache<Child>,
    pub(crate) nodes: Cache<NodeView>,
    pub(crate) policies: Cache<PolicyView>,
}

/// Cached fields of a pod.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodView {
    pub(crate) meta: ObjectMeta,
    pub(crate) phase: String,
    pub(crate) ready: bool,
    /// Status, reason and message of the condition `PodScheduled`.
    pub(crate) scheduled: Option<(String, String, String)>,
    pub(crate) ips: Vec<String>,
    pub(crate) node: Option<String>,
}

/// Cached metadata of a Service or a PersistentVolumeClaim; only the owner reference is used.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    pub(crate) meta: ObjectMeta,
}

/// Cached fields of a node: whether it is cordoned (unschedulable).
#[derive(Clone, Debug)]
pub(crate) struct NodeView {
    meta: ObjectMeta,
    pub(crate) cordoned: bool,
}

/// Cached fields of a NetworkPolicy.
#[derive(Clone, Debug)]
pub(crate) struct PolicyView {
    pub(crate) meta: ObjectMeta,
    pub(crate) spec: Option<NetworkPolicySpec>,
}

/// Index key of the objects whose controller has this UID.
pub(crate) fn owned_by(uid: &str) -> String {
    format!("owner:{uid}")
}

/// Index key of the sandboxes of a pool, by the hash of the pool's name.
pub(crate) fn pooled_in(namespace: &str, pool_hash: &str) -> String {
    format!("pool:{namespace}/{pool_hash}")
}

/// Index key of the objects that refer to another by name: claims to their pool, pools to their template.
pub(crate) fn refers_to(namespace: &str, name: &str) -> String {
    format!("ref:{namespace}/{name}")
}

fn strip_managed_fields(meta: &mut ObjectMeta) {
    meta.managed_fields = None;
}

fn owner_key(meta: &ObjectMeta) -> Option<String> {
    controller_of(meta).map(|owner| owned_by(&owner.uid))
}

// === From what the API server sends ===

impl From<Pod> for PodView {
    fn from(pod: Pod) -> Self {
        let mut meta = pod.metadata;
        strip_managed_fields(&mut meta);
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
        strip_managed_fields(&mut meta);
        Self { meta }
    }
}

impl From<PersistentVolumeClaim> for Child {
    fn from(claim: PersistentVolumeClaim) -> Self {
        let mut meta = claim.metadata;
        strip_managed_fields(&mut meta);
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
        strip_managed_fields(&mut meta);
        Self {
            meta,
            spec: policy.spec,
        }
    }
}

// === impl Cached ===

impl Cached for PodView {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        owner_key(&self.meta).into_iter().collect()
    }
}

impl Cached for Child {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        owner_key(&self.meta).into_iter().collect()
    }
}

impl Cached for NodeView {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        Vec::new()
    }
}

impl Cached for PolicyView {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn index(&self) -> Vec<String> {
        owner_key(&self.meta).into_iter().collect()
    }
}

impl Cached for Sandbox {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let pool = label(&self.metadata, WARM_POOL).map(|hash| pooled_in(namespace, hash));
        owner_key(&self.metadata).into_iter().chain(pool).collect()
    }
}

impl Cached for SandboxClaim {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        vec![refers_to(namespace, &self.spec.warm_pool_ref.name)]
    }
}

impl Cached for SandboxWarmPool {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        vec![refers_to(namespace, &self.spec.sandbox_template_ref.name)]
    }
}

impl Cached for SandboxTemplate {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn index(&self) -> Vec<String> {
        Vec::new()
    }
}
