//! Context of the reconcilers: client, informer caches and work queues, and which change requeues which objects.

mod watch;
mod writes;

use crate::assign::Assigner;
use crate::cache::{Change, Key};
use crate::caches::{Caches, Child, PodView, PolicyView, owned_by, pooled_in, refers_to};
use crate::crd::names::{self, WARM_POOL};
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use crate::debounce::Debounce;
use crate::edge_detector::EdgeDetector;
use crate::events::EventRecorder;
use crate::object_meta::{controller_of, label};
use crate::options::ControllerOptions;
use crate::timing::Timings;
use crate::work_queue::WorkQueue;
use kube::Client;
use std::sync::{Arc, Mutex};

/// What every reconciler gets: client, options, informer caches and work queues of one operator process.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) options: ControllerOptions,
    pub(crate) caches: Caches,
    pub(crate) queues: Queues,
    pub(crate) assigner: Assigner,
    pub(crate) timings: Timings,
    /// Coalesces the status writes of pooled sandboxes that are not ready yet.
    pub(crate) sandbox_status_debounce: Debounce,
    /// Coalesces the status writes of a pool.
    pub(crate) pool_status_debounce: Debounce,
    /// Spaces the sandboxes of a pool whose refill is throttled.
    pub(crate) refill_throttle: Debounce,
    /// Delays the refill of a pool by `--sandbox-warm-pool-replenish-delay`.
    pub(crate) refill_delay: Debounce,
    /// Sandboxes whose pod could not be created.
    pub(crate) pod_create_failing: EdgeDetector,
    /// Pools of which a sandbox could not be created.
    pub(crate) pool_create_failing: EdgeDetector,
    /// Pools with a pod that no node takes.
    pub(crate) pool_unschedulable: EdgeDetector,
    /// Pools whose template does not exist.
    pub(crate) pool_template_missing: EdgeDetector,
    pub(crate) events: EventRecorder,
    /// Label sets of `agent_sandboxes` at the last scrape; those that are gone are set to 0.
    pub(crate) measured: Mutex<Vec<[String; 8]>>,
}

/// The work queues: one per controller, and one for claim annotations, which are written later.
#[derive(Default)]
pub(crate) struct Queues {
    pub(crate) sandboxes: WorkQueue,
    pub(crate) claims: WorkQueue,
    pub(crate) pools: WorkQueue,
    pub(crate) templates: WorkQueue,
    pub(crate) annotations: WorkQueue,
}

// === impl Queues ===

impl Queues {
    pub(crate) fn all(&self) -> [(&'static str, &WorkQueue); 5] {
        [
            ("sandbox", &self.sandboxes),
            ("claim", &self.claims),
            ("pool", &self.pools),
            ("template", &self.templates),
            ("annotation", &self.annotations),
        ]
    }
}

// === impl Context ===

impl Context {
    /// Requeues a changed sandbox, its owner, and the pool whose label it carries.
    pub(crate) fn sandbox_changed(&self, change: &Change<Sandbox>) {
        self.queues.sandboxes.add(change.key.clone());
        let current = || self.caches.sandboxes.get(&change.key);
        self.assigner.refresh(&change.key, current);
        for sandbox in [&change.before, &change.after].into_iter().flatten() {
            let namespace = &change.key.namespace;
            if let Some(owner) = controller_of(&sandbox.metadata) {
                let owner_key = Key::new(namespace, &owner.name);
                match owner.kind.as_str() {
                    "SandboxClaim" => self.queues.claims.add(owner_key),
                    "SandboxWarmPool" => self.queues.pools.add(owner_key),
                    _ => {}
                }
            } else if let Some(hash) = label(&sandbox.metadata, WARM_POOL) {
                self.pools_with_hash(namespace, hash);
            }
        }
    }

    /// A sandbox without an owner reference names its pool by hash only.
    fn pools_with_hash(&self, namespace: &str, hash: &str) {
        for pool in self.caches.pools.all() {
            let key = Key::of(&pool.metadata);
            if key.namespace == namespace && names::hash(&key.name) == hash {
                self.queues.pools.add(key);
            }
        }
    }

    pub(crate) fn claim_changed(&self, change: &Change<SandboxClaim>) {
        match (&change.before, &change.after) {
            (_, None) => self.timings.forget(&change.key),
            (Some(before), Some(claim)) if before.metadata.uid == claim.metadata.uid => {}
            (_, Some(claim)) => self.timings.saw(claim),
        }
        self.queues.claims.add(change.key.clone());
    }

    pub(crate) fn pool_changed(&self, change: &Change<SandboxWarmPool>) {
        self.queues.pools.add(change.key.clone());
        let generation =
            |pool: &Option<Arc<SandboxWarmPool>>| pool.as_ref().and_then(|p| p.metadata.generation);
        if generation(&change.before) != generation(&change.after) {
            self.claims_that_wait(&change.key);
        }
    }

    /// Requeues the claims of a pool when the pool or its template appears or changes.
    fn claims_that_wait(&self, pool: &Key) {
        for claim in self
            .caches
            .claims
            .find(&refers_to(&pool.namespace, &pool.name))
        {
            self.queues.claims.add(Key::of(&claim.metadata));
        }
    }

    pub(crate) fn template_changed(&self, change: &Change<SandboxTemplate>) {
        self.queues.templates.add(change.key.clone());
        let Key { namespace, name } = &change.key;
        for pool in self.caches.pools.find(&refers_to(namespace, name)) {
            let key = Key::of(&pool.metadata);
            self.claims_that_wait(&key);
            self.queues.pools.add(key);
        }
    }

    pub(crate) fn pod_changed(&self, change: &Change<PodView>) {
        self.child_changed(
            &change.key,
            [&change.before, &change.after].map(|p| p.as_ref().map(|p| &p.meta)),
        );
    }

    pub(crate) fn service_changed(&self, change: &Change<Child>) {
        self.child_changed(
            &change.key,
            [&change.before, &change.after].map(|p| p.as_ref().map(|p| &p.meta)),
        );
    }

    /// Requeues the owning sandbox, or the sandbox of the same name: a pod without an owner may block its creation.
    fn child_changed(&self, key: &Key, metas: [Option<&kube::api::ObjectMeta>; 2]) {
        for meta in metas.into_iter().flatten() {
            match controller_of(meta).filter(|owner| owner.kind == "Sandbox") {
                Some(owner) => self
                    .queues
                    .sandboxes
                    .add(Key::new(&key.namespace, &owner.name)),
                None => self.queues.sandboxes.add(key.clone()),
            }
        }
    }

    pub(crate) fn volume_changed(&self, change: &Change<Child>) {
        // Volumes are created and never changed: only a deletion matters.
        if change.after.is_none()
            && let Some(owner) = change
                .before
                .as_ref()
                .and_then(|v| controller_of(&v.meta).cloned())
        {
            self.queues
                .sandboxes
                .add(Key::new(&change.key.namespace, owner.name));
        }
    }

    pub(crate) fn policy_changed(&self, change: &Change<PolicyView>) {
        for policy in [&change.before, &change.after].into_iter().flatten() {
            if let Some(owner) = controller_of(&policy.meta).filter(|o| o.kind == "SandboxTemplate")
            {
                self.queues
                    .templates
                    .add(Key::new(&change.key.namespace, &owner.name));
            }
        }
    }

    /// Whether a node is cordoned: its pods may be evicted soon.
    pub(crate) fn is_draining(&self, node: &str) -> bool {
        let node = self.caches.nodes.get(&Key::new("", node));
        node.is_some_and(|node| node.cordoned)
    }

    /// The pods that a sandbox controls.
    pub(crate) fn pods_of(&self, sandbox_uid: &str) -> Vec<Arc<PodView>> {
        self.caches.pods.find(&owned_by(sandbox_uid))
    }

    /// The sandboxes with the label of a pool, whether or not it owns them.
    pub(crate) fn members_of(&self, pool: &SandboxWarmPool) -> Vec<Arc<Sandbox>> {
        let key = Key::of(&pool.metadata);
        let hash = names::hash(&key.name);
        self.caches
            .sandboxes
            .find(&pooled_in(&key.namespace, &hash))
    }
}
