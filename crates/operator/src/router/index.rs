//! Endpoint index: the ready pods of each sandbox, from the informer. The only source of addresses that are dialled.

use super::target::{Target, is_pod_address};
use crate::crd::names::{GROUP, WARM_POOL};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::ResourceExt as _;
use kube::runtime::watcher::Event;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::watch;

/// A ready pod of a sandbox, reduced to what routing needs: there may be thousands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) namespace: Box<str>,
    pub(super) sandbox: Box<str>,
    pub(super) sandbox_uid: Box<str>,
    pod: Box<str>,
    pub(super) pod_uid: Box<str>,
    addresses: Box<[IpAddr]>,
    /// It is in a warm pool: no claim has it yet.
    pooled: bool,
    /// Creation of the pod, in Unix seconds.
    created: i64,
}

/// The endpoint and address for a target.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) address: IpAddr,
}

/// Why there is no endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// The sandbox has no ready pod, or does not exist.
    Pod,
    /// The sandbox of this name has another UID.
    OtherUid,
}

/// The endpoint index; see the module.
#[derive(Debug)]
pub(super) struct Index {
    pods: RwLock<Pods>,
    allow_loopback: bool,
    /// Number of changes; 0 until the initial sync is complete.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Pods {
    /// By namespace and name of the pod.
    all: HashMap<String, Arc<Endpoint>>,
    /// By namespace and name of the sandbox, best first.
    by_sandbox: HashMap<String, Vec<Arc<Endpoint>>>,
    namespaces: HashMap<Box<str>, usize>,
    /// Endpoints of a list in progress.
    listed: Option<Vec<Endpoint>>,
}

// === impl Index ===

impl Index {
    pub(super) fn new(allow_loopback: bool) -> Self {
        Self {
            pods: RwLock::default(),
            allow_loopback,
            changes: watch::Sender::new(0),
        }
    }

    /// Whether the initial sync is complete.
    pub(super) fn is_ready(&self) -> bool {
        *self.changes.borrow() > 0
    }

    /// Whether the namespace has a sandbox; only such namespaces are used as metric labels.
    pub(super) fn knows_namespace(&self, namespace: &str) -> bool {
        let pods = self.pods.read().unwrap_or_else(PoisonError::into_inner);
        pods.namespaces.contains_key(namespace)
    }

    /// Applies a watch event.
    pub(super) fn apply(&self, event: Event<Pod>) {
        let mut pods = self.pods.write().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Init => pods.listed = Some(Vec::new()),
            Event::InitApply(pod) => {
                let endpoint = self.endpoint(&pod);
                if let (Some(listed), Some(endpoint)) = (&mut pods.listed, endpoint) {
                    listed.push(endpoint);
                }
                return;
            }
            Event::InitDone => {
                let listed = pods.listed.take().unwrap_or_default();
                *pods = Pods::default();
                for endpoint in listed {
                    pods.insert(endpoint);
                }
                self.changes.send_modify(|count| *count += 1);
                return;
            }
            Event::Apply(pod) => match self.endpoint(&pod) {
                Some(endpoint) => pods.insert(endpoint),
                None => pods.remove(&key(&pod.namespace().unwrap_or_default(), &pod.name_any())),
            },
            Event::Delete(pod) => {
                pods.remove(&key(&pod.namespace().unwrap_or_default(), &pod.name_any()));
            }
        }
        drop(pods);
        // Notifies waiting requests. Before the initial sync is complete the count stays 0.
        self.changes.send_if_modified(|count| {
            *count += u64::from(*count > 0);
            *count > 0
        });
    }

    /// Looks up the endpoint for a target.
    pub(super) fn find(&self, target: &Target) -> Result<Found, Missing> {
        let pods = self.pods.read().unwrap_or_else(PoisonError::into_inner);
        let named = pods.by_sandbox.get(&key(&target.namespace, &target.name));
        let mut missing = Missing::Pod;
        for endpoint in named.into_iter().flatten() {
            match endpoint.serves(target) {
                Ok(address) => {
                    return Ok(Found {
                        endpoint: Arc::clone(endpoint),
                        address,
                    });
                }
                Err(why) => missing = why,
            }
        }
        Err(missing)
    }

    /// As [`Self::find`], but waits for the endpoint: the client may know its sandbox before our watch does.
    pub(super) async fn wait(&self, target: &Target, within: Duration) -> Result<Found, Missing> {
        let mut changes = self.changes.subscribe();
        let wanted = async {
            loop {
                changes.mark_unchanged();
                if let Ok(found) = self.find(target) {
                    return Some(found);
                }
                changes.changed().await.ok()?;
            }
        };
        match tokio::time::timeout(within, wanted).await {
            Ok(Some(found)) => Ok(found),
            Ok(None) | Err(_) => self.find(target),
        }
    }

    /// The endpoint of a pod. `None`: not owned by a Sandbox, not ready, being deleted, or on the host network.
    fn endpoint(&self, pod: &Pod) -> Option<Endpoint> {
        let meta = &pod.metadata;
        let owner = meta.owner_references.iter().flatten().find(|owner| {
            let ours = owner
                .api_version
                .split_once('/')
                .is_some_and(|(group, _)| group == GROUP);
            owner.controller == Some(true) && owner.kind == "Sandbox" && ours
        })?;
        // With host networking the address of the pod is that of its node.
        let on_host = pod.spec.as_ref()?.host_network == Some(true);
        let status = pod.status.as_ref()?;
        if on_host || meta.deletion_timestamp.is_some() || !is_ready(status) {
            return None;
        }
        let addresses = addresses(status, self.allow_loopback);
        if addresses.is_empty() {
            return None;
        }
        let created = meta.creation_timestamp.as_ref();
        Some(Endpoint {
            namespace: meta.namespace.as_deref()?.into(),
            sandbox: owner.name.as_str().into(),
            sandbox_uid: owner.uid.as_str().into(),
            pod: meta.name.as_deref()?.into(),
            pod_uid: meta.uid.as_deref()?.into(),
            addresses: addresses.into(),
            pooled: pod.labels().contains_key(WARM_POOL),
            created: created.map_or(i64::MAX, |time| time.0.as_second()),
        })
    }
}

// === impl Pods ===

impl Pods {
    fn insert(&mut self, endpoint: Endpoint) {
        let pod = key(&endpoint.namespace, &endpoint.pod);
        if self.all.get(&pod).is_some_and(|known| **known == endpoint) {
            return;
        }
        self.remove(&pod);
        let endpoint = Arc::new(endpoint);
        *self
            .namespaces
            .entry(endpoint.namespace.clone())
            .or_default() += 1;
        let named = self
            .by_sandbox
            .entry(key(&endpoint.namespace, &endpoint.sandbox))
            .or_default();
        named.push(Arc::clone(&endpoint));
        // The pod that the controller created has the name of the sandbox and comes first, then the oldest: a pod with
        // a forged owner reference must not take its place.
        named.sort_by_key(|endpoint| (endpoint.pod != endpoint.sandbox, endpoint.created));
        self.all.insert(pod, endpoint);
    }

    fn remove(&mut self, pod: &str) {
        let Some(gone) = self.all.remove(pod) else {
            return;
        };
        let sandbox = key(&gone.namespace, &gone.sandbox);
        if let Some(named) = self.by_sandbox.get_mut(&sandbox) {
            named.retain(|endpoint| !Arc::ptr_eq(endpoint, &gone));
            if named.is_empty() {
                self.by_sandbox.remove(&sandbox);
            }
        }
        if let Some(count) = self.namespaces.get_mut(&gone.namespace) {
            *count -= 1;
            if *count == 0 {
                self.namespaces.remove(&gone.namespace);
            }
        }
    }
}

// === impl Endpoint ===

impl Endpoint {
    /// The address to dial for a target.
    fn serves(&self, target: &Target) -> Result<IpAddr, Missing> {
        match &target.uid {
            Some(uid) if **uid != *self.sandbox_uid => return Err(Missing::OtherUid),
            // A pooled sandbox is reached only with its UID, which cannot be guessed: it has no claim yet.
            None if self.pooled => return Err(Missing::Pod),
            Some(_) | None => {}
        }
        // X-Sandbox-Pod-IP may be stale. It only selects among the addresses of the pod.
        let asked = target.pod_ip.filter(|ip| self.addresses.contains(ip));
        let address = asked.or_else(|| self.addresses.first().copied());
        address.ok_or(Missing::Pod)
    }
}

fn key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

fn is_ready(status: &PodStatus) -> bool {
    let conditions = status.conditions.iter().flatten();
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    ready.any(|condition| condition.status == "True")
}

fn addresses(status: &PodStatus, allow_loopback: bool) -> Vec<IpAddr> {
    let more = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    let mut addresses = Vec::new();
    for text in status.pod_ip.as_deref().into_iter().chain(more) {
        let Ok(ip) = text.parse::<IpAddr>() else {
            continue;
        };
        let ip = ip.to_canonical();
        if is_pod_address(ip, allow_loopback) && !addresses.contains(&ip) {
            addresses.push(ip);
        }
    }
    addresses
}
