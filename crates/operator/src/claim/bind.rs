//! Warm start: binds a sandbox of the pool to a claim. One patch changes its owner; a second one is the claim's status.

use super::pod_metadata;
use crate::assign::Candidate;
use crate::cache::Key;
use crate::context::Context;
use crate::crd::names::{
    ASSIGNED, CLAIM_UID, CREATED_BY, LAUNCH_TYPE, POD_NAME, POD_TEMPLATE_HASH, TEMPLATE_HASH,
    TRACE_CONTEXT, WARM_POOL, is_system_key,
};
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, UpdateStrategyType};
use crate::error::{Class, Error, Result};
use crate::events::Event;
use crate::metrics;
use crate::object_meta::{annotation, label, owner_reference, uid};
use crate::pool::blueprint;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Candidates that are tried in one reconcile when other writers cause conflicts.
const ATTEMPTS: usize = 3;

/// Outcome of an adoption.
pub(super) enum Adopted {
    /// The claim is bound to this sandbox.
    One(Arc<Sandbox>),
    /// There are candidates, but every write had a conflict; the last error.
    Contested(Error),
    /// The pool has no usable candidate.
    None,
}

/// Binds a warm sandbox to the claim, if there is one.
pub(super) async fn adopt(
    ctx: &Context,
    claim: &SandboxClaim,
    pool: &SandboxWarmPool,
    template: &SandboxTemplate,
) -> Result<Adopted> {
    if let Some(sandbox) = interrupted(ctx, claim, pool) {
        let adopted = take(ctx, claim, template, &sandbox).await?;
        return Ok(Adopted::One(adopted));
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
                .is_some_and(|node| ctx.is_draining(node));
            !(leaving || stale && !same_blueprint(ctx, &candidate.key, template))
        };
        let Some(candidate) = ctx.assigner.take(uid(&pool.metadata), usable) else {
            return Ok(Adopted::None);
        };
        let Some(sandbox) = still_waiting(ctx, &candidate) else {
            continue; // the index was stale and is refreshed now
        };
        let result = take(ctx, claim, template, &sandbox).await;
        ctx.assigner.give_back(&candidate);
        match result {
            Ok(adopted) => {
                let name = &candidate.key.name;
                let text = format!("Adopted warm pool Sandbox \"{name}\"");
                ctx.record_event(claim, Event::normal("SandboxAdopted", "Adoption", text));
                metrics::claim_created(claim, template, "warm", candidate.ready);
                return Ok(Adopted::One(adopted));
            }
            Err(error) if matches!(error.class(), Class::Conflict | Class::Gone) => {
                ctx.reread_sandbox(&candidate.key).await?; // another writer changed or deleted it
                lost = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    // There are candidates: the next reconcile tries them again instead of starting cold.
    Ok(lost.map_or(Adopted::None, Adopted::Contested))
}

/// The cached version of a candidate, if it is still one: the write has this version as precondition.
fn still_waiting(ctx: &Context, candidate: &Candidate) -> Option<Arc<Sandbox>> {
    let current = ctx.caches.sandboxes.get(&candidate.key);
    let waits = |s: &Arc<Sandbox>| Candidate::of(s).is_some_and(|c| c.pool == candidate.pool);
    let sandbox = current.filter(waits);
    if sandbox.is_none() {
        ctx.assigner.give_back(candidate);
        let current = || ctx.caches.sandboxes.get(&candidate.key);
        ctx.assigner.refresh(&candidate.key, current);
    }
    sandbox
}

/// A sandbox that an interrupted controller assigned to the claim by annotation but did not bind: it is used.
fn interrupted(
    ctx: &Context,
    claim: &SandboxClaim,
    pool: &SandboxWarmPool,
) -> Option<Arc<Sandbox>> {
    let meta = &claim.metadata;
    let name = annotation(meta, ASSIGNED).or_else(|| label(meta, ASSIGNED))?;
    let key = Key::new(meta.namespace.clone().unwrap_or_default(), name);
    let sandbox = ctx.caches.sandboxes.get(&key)?;
    let candidate = Candidate::of(&sandbox)?;
    (candidate.pool == uid(&pool.metadata)).then_some(sandbox)
}

/// The write that binds, with the resourceVersion as precondition: of several writers one succeeds.
async fn take(
    ctx: &Context,
    claim: &SandboxClaim,
    template: &SandboxTemplate,
    sandbox: &Sandbox,
) -> Result<Arc<Sandbox>> {
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
        "ownerReferences": [owner_reference(claim)],
    }});
    if let Some(spec) = metadata_patch(claim, template, sandbox) {
        patch["spec"] = spec;
    }
    ctx.patch_sandbox(&Key::of(&sandbox.metadata), patch).await
}

/// Updates the pod labels and annotations of a bound sandbox to those of its template and its claim.
pub(super) async fn sync_metadata(
    ctx: &Context,
    claim: &SandboxClaim,
    sandbox: Arc<Sandbox>,
) -> Result<Arc<Sandbox>> {
    let Ok((_, template)) = super::sources(ctx, claim) else {
        return Ok(sandbox); // a deleted pool or template does not affect bound sandboxes
    };
    let Some(spec) = metadata_patch(claim, &template, &sandbox) else {
        return Ok(sandbox);
    };
    let key = Key::of(&sandbox.metadata);
    let version = &sandbox.metadata.resource_version;
    let patch = json!({"metadata": {"resourceVersion": version}, "spec": spec});
    ctx.patch_sandbox(&key, patch).await
}

/// The patch of the pod template's labels and annotations. Usually there is none: then the spec is not touched, the
/// generation stays the same, and the status need not be written again.
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

fn changes(
    have: crate::object_meta::Labels,
    want: crate::object_meta::Labels,
) -> Map<String, Value> {
    let set = want
        .iter()
        .filter(|(key, value)| have.get(*key) != Some(value));
    let set = set.map(|(key, value)| (key.clone(), json!(value)));
    // System keys that an older controller wrote here are kept.
    let gone = have.keys().filter(|key| !want.contains_key(*key));
    let gone = gone.filter(|key| !is_system_key(key));
    set.chain(gone.map(|key| (key.clone(), Value::Null)))
        .collect()
}

/// Whether a sandbox matches the template although the hashes differ: another controller may hash differently.
fn same_blueprint(ctx: &Context, key: &Key, template: &SandboxTemplate) -> bool {
    let sandbox = ctx.caches.sandboxes.get(key);
    sandbox.is_some_and(|sandbox| !blueprint::differs(template, &sandbox))
}
