//! Everything the controllers share: the client, what the cluster is known to hold, and who has to look at what.

mod watch;
mod writes;

use crate::assign::Assigner;
use crate::cache::{Cache, Change, Key};
use crate::crd::names::{self, WARM_POOL};
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use crate::events::NoteBook;
use crate::gathering::{Gathering, Known};
use crate::held::label;
use crate::held::{
    Child, NodeView, PodView, PolicyView, controller_of, owned_by, pooled_in, refers_to,
};
use crate::options::ControllerOptions;
use crate::queue::Queue;
use crate::timing::Timings;
use kube::Client;
use std::sync::{Arc, Mutex};

/// What one operator process knows and does.
pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) options: ControllerOptions,
    pub(crate) held: Holdings,
    pub(crate) queues: Queues,
    pub(crate) assigner: Assigner,
    pub(crate) timings: Timings,
    pub(crate) gathering: Gathering,
    pub(crate) pool_figures: Gathering,
    /// Pools that are refilled at walking pace.
    pub(crate) refills: Gathering,
    /// Pools that wait before they are refilled.
    pub(crate) delays: Gathering,
    /// Sandboxes whose pod could not be made, and pools whose sandboxes could not.
    pub(crate) failing: Known,
    pub(crate) pool_failing: Known,
    /// Pools that wait for a node.
    pub(crate) held_up: Known,
    /// Pools whose template is missing.
    pub(crate) no_template: Known,
    pub(crate) notes: NoteBook,
    /// States that `agent_sandboxes` showed last.
    pub(crate) measured: Mutex<Vec<[String; 8]>>,
}

/// The tables.
#[derive(Default)]
pub(crate) struct Holdings {
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

/// The queues, one per controller, and one for what may be written late.
#[derive(Default)]
pub(crate) struct Queues {
    pub(crate) sandboxes: Queue,
    pub(crate) claims: Queue,
    pub(crate) pools: Queue,
    pub(crate) templates: Queue,
    pub(crate) notes: Queue,
}

// === impl Queues ===

impl Queues {
    pub(crate) fn all(&self) -> [(&'static str, &Queue); 5] {
        [
            ("sandbox", &self.sandboxes),
            ("claim", &self.claims),
            ("pool", &self.pools),
            ("template", &self.templates),
            ("note", &self.notes),
        ]
    }
}

// === impl World ===

impl World {
    /// A sandbox changed: its own pass, its owner's, its pool's.
    pub(crate) fn sandbox_changed(&self, change: &Change<Sandbox>) {
        self.queues.sandboxes.add(change.key.clone());
        let current = || self.held.sandboxes.get(&change.key);
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

    /// An orphan names its pool by hash only.
    fn pools_with_hash(&self, namespace: &str, hash: &str) {
        for pool in self.held.pools.all() {
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

    /// Claims without a sandbox look again when their pool or template appears or changes.
    fn claims_that_wait(&self, pool: &Key) {
        for claim in self
            .held
            .claims
            .find(&refers_to(&pool.namespace, &pool.name))
        {
            self.queues.claims.add(Key::of(&claim.metadata));
        }
    }

    pub(crate) fn template_changed(&self, change: &Change<SandboxTemplate>) {
        self.queues.templates.add(change.key.clone());
        let Key { namespace, name } = &change.key;
        for pool in self.held.pools.find(&refers_to(namespace, name)) {
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

    /// Names the sandbox by ownership, and by name: a pod that nobody owns may stand in its way.
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
        // Volumes are made and then left alone: only one that vanished is looked after.
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

    /// Whether pods of this node are about to go.
    pub(crate) fn is_draining(&self, node: &str) -> bool {
        let node = self.held.nodes.get(&Key::new("", node));
        node.is_some_and(|node| node.cordoned)
    }

    /// The pods that a sandbox controls.
    pub(crate) fn pods_of(&self, sandbox_uid: &str) -> Vec<Arc<PodView>> {
        self.held.pods.find(&owned_by(sandbox_uid))
    }

    /// The sandboxes that carry the label of a pool, owned by it or by nobody.
    pub(crate) fn members_of(&self, pool: &SandboxWarmPool) -> Vec<Arc<Sandbox>> {
        let key = Key::of(&pool.metadata);
        let hash = names::hash(&key.name);
        self.held.sandboxes.find(&pooled_in(&key.namespace, &hash))
    }
}
