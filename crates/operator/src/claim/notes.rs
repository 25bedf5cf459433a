//! What is noted on a claim after the fact: when it was seen and ready, and which sandbox it got. One write, off the
//! path of the claim.

use crate::cache::Key;
use crate::crd::conditions::{READY, is_true};
use crate::crd::names::{ASSIGNED, OBSERVED_AT, READY_AT};
use crate::error::Result;
use crate::held::{annotation, uid};
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Map, json};
use std::time::Duration;

/// A claim that is not ready by then gets what is known.
pub(super) const LATEST: Duration = Duration::from_secs(1);

/// A note is written at the latest this long after its claim.
const PATIENCE: SignedDuration = SignedDuration::from_secs(15);

/// Notes what is known and not yet written.
pub(crate) async fn annotate(world: &World, key: &Key) -> Result<Next> {
    let Some(claim) = world.held.claims.get(key) else {
        return Ok(Next::Wait);
    };
    let gone = claim.metadata.deletion_timestamp.is_some();
    let seen = world
        .timings
        .get(key)
        .filter(|seen| seen.uid == uid(&claim.metadata));
    let Some(seen) =
        seen.filter(|_| !gone && !world.options.disable_claim_observability_annotations)
    else {
        return Ok(Next::Wait);
    };
    // While claims come in, the API server is theirs; but not for ever.
    let patient = Timestamp::now().duration_since(seen.observed) < PATIENCE;
    if patient && world.timings.claims_come_in() {
        return Ok(Next::After(LATEST));
    }
    let mut notes = Map::new();
    if annotation(&claim.metadata, OBSERVED_AT).is_none() {
        notes.insert(OBSERVED_AT.to_owned(), json!(seen.observed.to_string()));
    }
    if is_true(claim.condition(READY)) && annotation(&claim.metadata, READY_AT).is_none() {
        let at = seen.ready.filter(|_| !seen.old);
        let at = at.map_or_else(|| "unknown".to_owned(), |at| at.to_string());
        notes.insert(READY_AT.to_owned(), json!(at));
    }
    if let Some(name) = claim
        .bound_name()
        .filter(|name| annotation(&claim.metadata, ASSIGNED) != Some(name))
    {
        notes.insert(ASSIGNED.to_owned(), json!(name));
    }
    if notes.is_empty() {
        return Ok(Next::Wait);
    }
    let patch = json!({"metadata": {"uid": claim.metadata.uid, "annotations": notes}});
    match world.patch_claim(key, patch).await {
        Err(error) if error.is_gone() => Ok(Next::Wait),
        other => other.map(|()| Next::Wait),
    }
}
