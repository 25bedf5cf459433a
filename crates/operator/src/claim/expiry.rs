//! The end of a claim: at its time, or a while after its pod finished, whichever is earlier.

use super::status;
use crate::cache::Key;
use crate::crd::conditions::{FINISHED, READY, Verdict, is_true};
use crate::crd::{ClaimShutdownPolicy, Sandbox, SandboxClaim};
use crate::error::Result;
use crate::events::Note;
use crate::held::{controller_of, owned_by, uid};
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::DeleteParams;
use std::time::Duration;

/// When the claim ends, if that is known.
fn end(claim: &SandboxClaim) -> Option<Timestamp> {
    let lifecycle = claim.spec.lifecycle.as_ref()?;
    let at = lifecycle.shutdown_time.as_ref().map(|time| time.0);
    let finished = claim.condition(FINISHED).filter(|c| is_true(Some(c)));
    let after = lifecycle
        .ttl_seconds_after_finished
        .zip(finished)
        .and_then(|(ttl, finished)| {
            finished
                .last_transition_time
                .0
                .checked_add(SignedDuration::from_secs(i64::from(ttl)))
                .ok()
        });
    [at, after].into_iter().flatten().min()
}

pub(super) fn is_due(claim: &SandboxClaim, now: Timestamp) -> bool {
    end(claim).is_some_and(|end| end <= now)
}

pub(super) fn remaining(claim: &SandboxClaim, now: Timestamp) -> Next {
    match end(claim) {
        Some(end) => Next::After(Duration::try_from(end.duration_since(now)).unwrap_or_default()),
        None => Next::Wait,
    }
}

/// Ends the claim as its policy says. The claim says so first: whoever watches it sees why it goes.
pub(super) async fn expire(world: &World, claim: &SandboxClaim, now: Timestamp) -> Result<Next> {
    let verdict = Verdict::no("ClaimExpired", words(world, claim));
    let already = claim
        .condition(READY)
        .is_some_and(|c| c.reason == "ClaimExpired");
    status::write_keeping(world, claim, verdict, now).await?;
    if !already {
        let text = format!(
            "Claim \"{}\" expired",
            claim.metadata.name.as_deref().unwrap_or_default()
        );
        world.note(claim, Note::normal("ClaimExpired", "Claim Expired", text));
    }
    let policy = claim
        .spec
        .lifecycle
        .as_ref()
        .and_then(|l| l.shutdown_policy)
        .unwrap_or_default();
    match policy {
        ClaimShutdownPolicy::Delete => {
            world.note(
                claim,
                Note::normal(
                    "ClaimExpired",
                    "Deleting",
                    "Deleting the expired claim".to_owned(),
                ),
            );
            world
                .delete::<SandboxClaim>(&claim.metadata, DeleteParams::background())
                .await?;
        }
        ClaimShutdownPolicy::DeleteForeground => {
            world.note(
                claim,
                Note::normal(
                    "ClaimExpired",
                    "Deleting",
                    "Deleting the expired claim".to_owned(),
                ),
            );
            world
                .delete::<SandboxClaim>(&claim.metadata, DeleteParams::foreground())
                .await?;
        }
        ClaimShutdownPolicy::Retain => {
            for sandbox in world.held.sandboxes.find(&owned_by(uid(&claim.metadata))) {
                world
                    .delete::<Sandbox>(&sandbox.metadata, DeleteParams::background())
                    .await?;
            }
        }
    }
    Ok(Next::Wait)
}

/// A sandbox that the claim names and does not own is left alone, and that is said.
fn words(world: &World, claim: &SandboxClaim) -> String {
    let foreign = claim.bound_name().filter(|name| {
        let namespace = claim.metadata.namespace.clone().unwrap_or_default();
        let sandbox = world.held.sandboxes.get(&Key::new(namespace, *name));
        sandbox.is_some_and(|s| {
            controller_of(&s.metadata).is_none_or(|o| o.uid != uid(&claim.metadata))
        })
    });
    match foreign {
        Some(name) => format!(
            "Claim expired. sandbox \"{name}\" is not controlled by this claim; deletion skipped."
        ),
        None => "Claim expired. Sandbox cleanup initiated.".to_owned(),
    }
}
