//! Observability annotations of a claim: when it was first observed and first ready, and its sandbox. Written later and
//! in one patch, so that they do not delay the claim.

use crate::cache::Key;
use crate::context::Context;
use crate::crd::conditions::{READY, is_true};
use crate::crd::names::{ASSIGNED, OBSERVED_AT, READY_AT};
use crate::error::Result;
use crate::object_meta::{annotation, uid};
use crate::work_queue::Action;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Map, json};
use std::time::Duration;

/// Delay of the annotations after a claim was reconciled; it may be ready by then, which saves a write.
pub(super) const ANNOTATE_DELAY: Duration = Duration::from_secs(1);

/// Annotations are deferred while the operator is busy with claims, at most this long.
const DEFER_MAX: SignedDuration = SignedDuration::from_secs(15);

/// Writes the annotations that are known and missing.
pub(crate) async fn annotate(ctx: &Context, key: &Key) -> Result<Action> {
    let Some(claim) = ctx.caches.claims.get(key) else {
        return Ok(Action::AwaitChange);
    };
    let gone = claim.metadata.deletion_timestamp.is_some();
    let seen = ctx
        .timings
        .get(key)
        .filter(|seen| seen.uid == uid(&claim.metadata));
    let Some(seen) = seen.filter(|_| !gone && !ctx.options.disable_claim_observability_annotations)
    else {
        return Ok(Action::AwaitChange);
    };
    // New claims have priority at the API server.
    let may_defer = Timestamp::now().duration_since(seen.observed) < DEFER_MAX;
    if may_defer && ctx.timings.is_busy() {
        return Ok(Action::RequeueAfter(ANNOTATE_DELAY));
    }
    let mut annotations = Map::new();
    if annotation(&claim.metadata, OBSERVED_AT).is_none() {
        annotations.insert(OBSERVED_AT.to_owned(), json!(seen.observed.to_string()));
    }
    if is_true(claim.condition(READY)) && annotation(&claim.metadata, READY_AT).is_none() {
        let at = seen.ready.filter(|_| !seen.old);
        let at = at.map_or_else(|| "unknown".to_owned(), |at| at.to_string());
        annotations.insert(READY_AT.to_owned(), json!(at));
    }
    if let Some(name) = claim
        .bound_name()
        .filter(|name| annotation(&claim.metadata, ASSIGNED) != Some(name))
    {
        annotations.insert(ASSIGNED.to_owned(), json!(name));
    }
    if annotations.is_empty() {
        return Ok(Action::AwaitChange);
    }
    let patch = json!({"metadata": {"uid": claim.metadata.uid, "annotations": annotations}});
    match ctx.patch_claim(key, patch).await {
        Err(error) if error.is_gone() => Ok(Action::AwaitChange),
        other => other.map(|_| Action::AwaitChange),
    }
}
