//! Where sandboxes are: the ready pods of each, as the watch tells. The only source of addresses that are dialled.

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

/// One pod of a sandbox, as little of it as routing needs: there are thousands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) namespace: Box<str>,
    pub(super) sandbox: Box<str>,
    pub(super) sandbox_uid: Box<str>,
    pod: Box<str>,
    pub(super) pod_uid: Box<str>,
    addresses: Box<[IpAddr]>,
    /// Nobody has claimed it yet.
    pooled: bool,
    /// In Unix time.
    created: i64,
}

/// Where to go for a target.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) address: IpAddr,
}

/// Why there is nowhere to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// No ready pod of that name.
    Pod,
    /// There is one, but of another sandbox that has the name now.
    OtherUid,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Index {
    pods: RwLock<Pods>,
    allow_loopback: bool,
    /// How often it changed; 0 until the first list is complete.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Pods {
    /// By namespace and name of the pod.
    all: HashMap<String, Arc<Endpoint>>,
    /// By namespace and name of the sandbox, best first.
    by_sandbox: HashMap<String, Vec<Arc<Endpoint>>>,
    namespaces: HashMap<Box<str>, usize>,
    /// What a list has given so far.
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

    /// Whether the first list is complete.
    pub(super) fn is_ready(&self) -> bool {
        *self.changes.borrow() > 0
    }

    /// Whether a sandbox is there: names of such namespaces are few, and may stand in metrics.
    pub(super) fn knows_namespace(&self, namespace: &str) -> bool {
        let pods = self.pods.read().unwrap_or_else(PoisonError::into_inner);
        pods.namespaces.contains_key(namespace)
    }

    /// Takes in what the watch says.
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
        // Readers are told, but a list that has not ended does not become complete by news.
        self.changes.send_if_modified(|count| {
            *count += u64::from(*count > 0);
            *count > 0
        });
    }

    /// Where to go.
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

    /// Where to go, if need be after a while: the caller may have heard of its sandbox before we do.
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

    /// None for a pod that is not to be dialled.
    fn endpoint(&self, pod: &Pod) -> Option<Endpoint> {
        let meta = &pod.metadata;
        let owner = meta.owner_references.iter().flatten().find(|owner| {
            let ours = owner
                .api_version
                .split_once('/')
                .is_some_and(|(group, _)| group == GROUP);
            owner.controller == Some(true) && owner.kind == "Sandbox" && ours
        })?;
        // The address of such a pod is its node's, and its ports are the node's.
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
        // A pod that merely says that a sandbox owns it does not come before the one that the controller made,
        // which has the sandbox's name, and before nothing that is older.
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
    /// The address to dial for this target.
    fn serves(&self, target: &Target) -> Result<IpAddr, Missing> {
        match &target.uid {
            Some(uid) if **uid != *self.sandbox_uid => return Err(Missing::OtherUid),
            // Whoever knows the UID has seen the sandbox; a name can be guessed, and a pooled sandbox is nobody's yet.
            None if self.pooled => return Err(Missing::Pod),
            Some(_) | None => {}
        }
        // What callers remember may be old: the sandbox may have a new pod. It chooses among addresses, no more.
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
