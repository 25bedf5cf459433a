//! Test harness: one cluster and one operator, and a namespace per test.

use crate::kinds::{connect, install_kinds, options};
use k8e_kube_dev::{Cluster, Options};
use k8e_operator::crd::names::{self, WARM_POOL};
use k8e_operator::crd::{Sandbox, SandboxClaim, SandboxWarmPool};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Timeout of every step, on a busy machine; usually it takes seconds.
const AT_MOST: Duration = Duration::from_secs(120);

pub(crate) struct Rig {
    pub(crate) cluster: Cluster,
    pub(crate) client: Client,
    runtime: Runtime,
}

/// A namespace of one test, with helpers.
#[derive(Clone)]
pub(crate) struct Space {
    pub(crate) name: String,
    pub(crate) client: Client,
}

/// The cluster with the operator, started once.
pub(crate) fn rig() -> &'static Rig {
    static RIG: OnceLock<Rig> = OnceLock::new();
    RIG.get_or_init(|| {
        let cluster = Cluster::up(Options {
            simulated_nodes: 4,
            ..Options::default()
        })
        .expect("a cluster");
        let runtime = Runtime::new().expect("a runtime");
        let client = runtime.block_on(async {
            let client = connect(&cluster.kubeconfig()).await;
            install_kinds(&client).await;
            client
        });
        let options = options(&["--leader-election-namespace=default"]);
        runtime.spawn(k8e_operator::run_with(
            client.clone(),
            options,
            std::future::pending(),
        ));
        Rig {
            cluster,
            client,
            runtime,
        }
    })
}

/// Runs a test in a namespace of its own.
pub(crate) fn test<F: Future<Output = ()>>(body: impl FnOnce(Space) -> F) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let rig = rig();
    let name = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let space = Space {
        name,
        client: rig.client.clone(),
    };
    rig.runtime.block_on(async {
        let api: Api<Namespace> = Api::all(rig.client.clone());
        let namespace = json!({"metadata": {"name": space.name}});
        let namespace = serde_json::from_value(namespace).expect("a namespace");
        api.create(&PostParams::default(), &namespace)
            .await
            .expect("a new namespace");
        body(space.clone()).await;
        let _other_tests_do_not_care = api.delete(&space.name, &DeleteParams::background()).await;
    });
}

impl Space {
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// Creates an object from JSON.
    pub(crate) async fn create<K>(&self, object: Value) -> K
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Serialize
            + Debug,
    {
        let object: K = serde_json::from_value(object).expect("an object");
        self.api::<K>()
            .create(&PostParams::default(), &object)
            .await
            .expect("it is taken")
    }

    pub(crate) async fn patch<K>(&self, name: &str, patch: Value) -> K
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        let patched = self
            .api::<K>()
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        patched.expect("it is taken")
    }

    pub(crate) async fn delete<K>(&self, name: &str)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        self.api::<K>()
            .delete(name, &DeleteParams::background())
            .await
            .expect("it is deleted");
    }

    pub(crate) async fn get<K>(&self, name: &str) -> Option<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        self.api::<K>()
            .get_opt(name)
            .await
            .expect("the API server answers")
    }

    pub(crate) async fn list<K>(&self) -> Vec<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        self.api::<K>()
            .list(&Default::default())
            .await
            .expect("the API server answers")
            .items
    }

    /// Polls an object until it satisfies a predicate.
    pub(crate) async fn until<K>(&self, name: &str, wanted: impl Fn(&K) -> bool) -> K
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        let mut last = None;
        let started = Instant::now();
        while started.elapsed() < AT_MOST {
            last = self.get::<K>(name).await;
            if let Some(object) = last.as_ref().filter(|object| wanted(object)) {
                return object.clone();
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        panic!("{} {name} is not as wanted: {last:#?}", K::kind(&()));
    }

    pub(crate) async fn gone<K>(&self, name: &str)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug,
    {
        self.eventually("it is gone", async || self.get::<K>(name).await.is_none())
            .await;
    }

    /// Polls until a predicate is true.
    pub(crate) async fn eventually(&self, what: &str, is_true: impl AsyncFn() -> bool) {
        let started = Instant::now();
        while started.elapsed() < AT_MOST {
            if is_true().await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        panic!("not in time: {what}");
    }

    /// A template with one container, merged with `more`.
    pub(crate) async fn template(&self, name: &str, more: Value) {
        let mut spec = json!({"podTemplate": {"spec": pod_spec()}});
        merge(&mut spec, more);
        let _: k8e_operator::crd::SandboxTemplate = self
            .create(json!({
                "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
                "metadata": {"name": name}, "spec": spec,
            }))
            .await;
    }

    /// A pool of a template, merged with `more`.
    pub(crate) async fn pool(&self, name: &str, template: &str, replicas: u32, more: Value) {
        let mut spec = json!({"replicas": replicas, "sandboxTemplateRef": {"name": template}});
        merge(&mut spec, more);
        let _: SandboxWarmPool = self
            .create(json!({
                "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
                "metadata": {"name": name}, "spec": spec,
            }))
            .await;
    }

    /// A pool whose sandboxes are all ready.
    pub(crate) async fn ready_pool(&self, name: &str, replicas: u32) {
        self.template("t", json!({})).await;
        self.pool(name, "t", replicas, json!({})).await;
        self.pool_has(name, replicas).await;
    }

    /// Waits until the pool has this many sandboxes, all ready, and its status says so. The status alone may be
    /// outdated.
    pub(crate) async fn pool_has(&self, name: &str, ready: u32) -> SandboxWarmPool {
        let pooled = ListParams::default().labels(&format!("{WARM_POOL}={}", names::hash(name)));
        self.eventually("the pool has its sandboxes", async || {
            let members = self
                .api::<Sandbox>()
                .list(&pooled)
                .await
                .expect("a list")
                .items;
            let is_ready = |s: &Sandbox| condition(s.condition("Ready")).0 == "True";
            members.len() == ready as usize && members.iter().all(is_ready)
        })
        .await;
        let ready = i32::try_from(ready).expect("small");
        self.until::<SandboxWarmPool>(name, |pool| {
            let status = pool.status.clone().unwrap_or_default();
            status.ready_replicas == Some(ready) && status.replicas == Some(ready)
        })
        .await
    }

    /// A claim of a pool, merged with `more`.
    pub(crate) async fn claim(&self, name: &str, pool: &str, more: Value) -> SandboxClaim {
        let mut spec = json!({"warmPoolRef": {"name": pool}});
        merge(&mut spec, more);
        self.create(json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "metadata": {"name": name}, "spec": spec,
        }))
        .await
    }

    pub(crate) async fn claim_ready(&self, name: &str) -> SandboxClaim {
        self.until::<SandboxClaim>(name, |c| condition(c.condition("Ready")).0 == "True")
            .await
    }

    /// Waits for a claim whose Ready condition has this reason.
    pub(crate) async fn claim_says(&self, name: &str, reason: &str) -> SandboxClaim {
        self.until::<SandboxClaim>(name, |c| condition(c.condition("Ready")).1 == reason)
            .await
    }

    /// A sandbox with one container, merged with `more`.
    pub(crate) async fn sandbox(&self, name: &str, more: Value) -> Sandbox {
        let mut spec = json!({"podTemplate": {"spec": pod_spec()}});
        merge(&mut spec, more);
        self.create(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": name}, "spec": spec,
        }))
        .await
    }

    pub(crate) async fn sandbox_ready(&self, name: &str) -> Sandbox {
        self.until::<Sandbox>(name, |s| condition(s.condition("Ready")).0 == "True")
            .await
    }

    /// Waits for a sandbox whose condition of this type has this status, reason and message.
    pub(crate) async fn sandbox_says(
        &self,
        name: &str,
        kind: &str,
        words: (&str, &str, &str),
    ) -> Sandbox {
        self.until::<Sandbox>(name, |s| condition(s.condition(kind)) == words)
            .await
    }

    /// The reasons of the events about an object.
    pub(crate) async fn events(&self, name: &str) -> Vec<(String, String)> {
        let events = self.list::<k8s_openapi::api::events::v1::Event>().await;
        let about = events
            .into_iter()
            .filter(|e| e.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(name));
        about
            .map(|e| (e.reason.unwrap_or_default(), e.note.unwrap_or_default()))
            .collect()
    }
}

/// Status, reason and message of a condition.
pub(crate) fn condition(condition: Option<&Condition>) -> (&str, &str, &str) {
    condition.map_or(("", "", ""), |c| {
        (c.status.as_str(), c.reason.as_str(), c.message.as_str())
    })
}

pub(crate) fn pod_spec() -> Value {
    json!({"containers": [{"name": "main", "image": "none"}]})
}

pub(crate) fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}
