//! Binding a warm sandbox: one write makes it the claim's, one more (the claim's status) tells.

use super::{owner, pod_metadata};
use crate::assign::Candidate;
use crate::cache::Key;
use crate::crd::names::{
    ASSIGNED, CLAIM_UID, CREATED_BY, LAUNCH_TYPE, POD_NAME, POD_TEMPLATE_HASH, TEMPLATE_HASH,
    TRACE_CONTEXT, WARM_POOL, is_system_key,
};
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, UpdateStrategyType};
use crate::error::{Class, Error, Result};
use crate::events::Note;
use crate::held::{annotation, label, uid};
use crate::metrics;
use crate::pool::blueprint;
use crate::world::World;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Candidates that another writer may snatch in one pass.
const ATTEMPTS: usize = 3;

/// What came of it.
pub(super) enum Adopted {
    /// The claim has this sandbox now.
    One(Arc<Sandbox>),
    /// There are candidates, and somebody else changes them.
    Contested(Error),
    /// There is none.
    None,
}

/// Gives the claim a warm sandbox, or says that there is none.
pub(super) async fn adopt(
    world: &World,
    claim: &SandboxClaim,
    pool: &SandboxWarmPool,
    template: &SandboxTemplate,
) -> Result<Adopted> {
    if let Some(sandbox) = interrupted(world, claim, pool) {
        let key = Key::of(&sandbox.metadata);
        take(world, claim, template, &sandbox).await?;
        let adopted = world.held.sandboxes.get(&key);
        return Ok(adopted.map_or(Adopted::None, Adopted::One));
    }
    let fresh = blueprint::hash(template);
    let strict = pool.strategy() == UpdateStrategyType::Recreate;
    let mut lost = None;
    for _ in 0..ATTEMPTS {
        let usable = |candidate: &Candidate| {
            let stale = strict && candidate.template_hash.as_ref() != Some(&fresh);
            let leaving = candidate
                .node
                .as_deref()
                .is_some_and(|node| world.is_draining(node));
            !(leaving || stale && !same_blueprint(world, &candidate.key, template))
        };
        let Some(candidate) = world.assigner.take(uid(&pool.metadata), usable) else {
            return Ok(Adopted::None);
        };
        let Some(sandbox) = still_waiting(world, &candidate) else {
            continue; // the index was behind, and is not any more
        };
        let result = take(world, claim, template, &sandbox).await;
        world.assigner.give_back(&candidate);
        match result {
            Ok(()) => {
                let adopted = world.held.sandboxes.get(&candidate.key);
                let name = &candidate.key.name;
                let text = format!("Adopted warm pool Sandbox \"{name}\"");
                world.note(claim, Note::normal("SandboxAdopted", "Adoption", text));
                metrics::claim_created(claim, template, "warm", candidate.ready);
                return Ok(adopted.map_or(Adopted::None, Adopted::One));
            }
            Err(error) if matches!(error.class(), Class::Conflict | Class::Gone) => {
                world.reread_sandbox(&candidate.key).await?; // somebody was faster, or it changed
                lost = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    // There are candidates: the next pass looks at them anew rather than starting cold.
    Ok(lost.map_or(Adopted::None, Adopted::Contested))
}

/// The candidate as it is known now: what is written next names this version, so it must be one that waits.
fn still_waiting(world: &World, candidate: &Candidate) -> Option<Arc<Sandbox>> {
    let current = world.held.sandboxes.get(&candidate.key);
    let waits = |s: &Arc<Sandbox>| Candidate::of(s).is_some_and(|c| c.pool == candidate.pool);
    let sandbox = current.filter(waits);
    if sandbox.is_none() {
        world.assigner.give_back(candidate);
        let current = || world.held.sandboxes.get(&candidate.key);
        world.assigner.refresh(&candidate.key, current);
    }
    sandbox
}

/// Another controller chose a sandbox and did not come to write it: the choice stands.
fn interrupted(
    world: &World,
    claim: &SandboxClaim,
    pool: &SandboxWarmPool,
) -> Option<Arc<Sandbox>> {
    let meta = &claim.metadata;
    let name = annotation(meta, ASSIGNED).or_else(|| label(meta, ASSIGNED))?;
    let key = Key::new(meta.namespace.clone().unwrap_or_default(), name);
    let sandbox = world.held.sandboxes.get(&key)?;
    let candidate = Candidate::of(&sandbox)?;
    (candidate.pool == uid(&pool.metadata)).then_some(sandbox)
}

/// The write that decides: it names the version that was looked at.
async fn take(
    world: &World,
    claim: &SandboxClaim,
    template: &SandboxTemplate,
    sandbox: &Sandbox,
) -> Result<()> {
    let mut labels = json!({
        WARM_POOL: null, TEMPLATE_HASH: null, POD_TEMPLATE_HASH: null,
        CLAIM_UID: uid(&claim.metadata), LAUNCH_TYPE: "warm",
    });
    if let Some(client) = label(&claim.metadata, CREATED_BY) {
        labels[CREATED_BY] = json!(client);
    }
    let mut annotations = json!({POD_NAME: sandbox.metadata.name});
    if let Some(trace) = annotation(&claim.metadata, TRACE_CONTEXT) {
        annotations[TRACE_CONTEXT] = json!(trace);
    }
    let mut patch = json!({"metadata": {
        "resourceVersion": sandbox.metadata.resource_version,
        "uid": sandbox.metadata.uid,
        "labels": labels,
        "annotations": annotations,
        "ownerReferences": [owner(claim)],
    }});
    if let Some(spec) = metadata_patch(claim, template, sandbox) {
        patch["spec"] = spec;
    }
    world
        .patch_sandbox(&Key::of(&sandbox.metadata), patch)
        .await
}

/// A bound sandbox follows the labels and annotations of its template and its claim.
pub(super) async fn keep_up(
    world: &World,
    claim: &SandboxClaim,
    sandbox: Arc<Sandbox>,
) -> Result<Arc<Sandbox>> {
    let Ok((_, template)) = super::sources(world, claim) else {
        return Ok(sandbox); // a pool that is gone changes nothing for those who have theirs
    };
    let Some(spec) = metadata_patch(claim, &template, &sandbox) else {
        return Ok(sandbox);
    };
    let key = Key::of(&sandbox.metadata);
    let version = &sandbox.metadata.resource_version;
    let patch = json!({"metadata": {"resourceVersion": version}, "spec": spec});
    world.patch_sandbox(&key, patch).await?;
    Ok(world.held.sandboxes.get(&key).unwrap_or(sandbox))
}

/// What changes in the pod template's labels and annotations. Nothing, usually: the spec of the sandbox is not
/// touched then, its generation stays, and its status need not be written again.
fn metadata_patch(
    claim: &SandboxClaim,
    template: &SandboxTemplate,
    sandbox: &Sandbox,
) -> Option<Value> {
    let wanted = pod_metadata::merged(claim, template);
    let have = sandbox
        .spec
        .pod_template
        .metadata
        .clone()
        .unwrap_or_default();
    let labels = changes(
        have.labels.unwrap_or_default(),
        wanted.labels.unwrap_or_default(),
    );
    let annotations = changes(
        have.annotations.unwrap_or_default(),
        wanted.annotations.unwrap_or_default(),
    );
    if labels.is_empty() && annotations.is_empty() {
        return None;
    }
    Some(json!({"podTemplate": {"metadata": {"labels": labels, "annotations": annotations}}}))
}

fn changes(have: crate::held::Labels, want: crate::held::Labels) -> Map<String, Value> {
    let set = want
        .iter()
        .filter(|(key, value)| have.get(*key) != Some(value));
    let set = set.map(|(key, value)| (key.clone(), json!(value)));
    // Keys of the controllers, which an older one wrote here, do no harm and stay.
    let gone = have.keys().filter(|key| !want.contains_key(*key));
    let gone = gone.filter(|key| !is_system_key(key));
    set.chain(gone.map(|key| (key.clone(), Value::Null)))
        .collect()
}

/// Another encoder may have hashed the same template differently.
fn same_blueprint(world: &World, key: &Key, template: &SandboxTemplate) -> bool {
    let sandbox = world.held.sandboxes.get(key);
    sandbox.is_some_and(|sandbox| !blueprint::differs(template, &sandbox))
}
