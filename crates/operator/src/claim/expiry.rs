//! Expiry of a claim: at `shutdownTime`, or `ttlSecondsAfterFinished` after its pod finished, whichever is earlier.

use super::status;
use crate::cache::Key;
use crate::caches::owned_by;
use crate::context::Context;
use crate::crd::conditions::{FINISHED, READY, Verdict, is_true};
use crate::crd::{ClaimShutdownPolicy, Sandbox, SandboxClaim};
use crate::error::Result;
use crate::events::Event;
use crate::object_meta::{controller_of, uid};
use crate::work_queue::Action;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::DeleteParams;
use std::time::Duration;

/// When the claim expires, if that is known.
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

pub(super) fn remaining(claim: &SandboxClaim, now: Timestamp) -> Action {
    match end(claim) {
        Some(end) => {
            Action::RequeueAfter(Duration::try_from(end.duration_since(now)).unwrap_or_default())
        }
        None => Action::AwaitChange,
    }
}

/// Expires the claim according to its policy. The status is written first, so that watchers see the reason.
pub(super) async fn expire(ctx: &Context, claim: &SandboxClaim, now: Timestamp) -> Result<Action> {
    let verdict = Verdict::no("ClaimExpired", message(ctx, claim));
    let already = claim
        .condition(READY)
        .is_some_and(|c| c.reason == "ClaimExpired");
    status::write_keeping(ctx, claim, verdict, now).await?;
    if !already {
        let text = format!(
            "Claim \"{}\" expired",
            claim.metadata.name.as_deref().unwrap_or_default()
        );
        ctx.record_event(claim, Event::normal("ClaimExpired", "Claim Expired", text));
    }
    let policy = claim
        .spec
        .lifecycle
        .as_ref()
        .and_then(|l| l.shutdown_policy)
        .unwrap_or_default();
    match policy {
        ClaimShutdownPolicy::Delete => {
            ctx.record_event(
                claim,
                Event::normal(
                    "ClaimExpired",
                    "Deleting",
                    "Deleting the expired claim".to_owned(),
                ),
            );
            ctx.delete::<SandboxClaim>(&claim.metadata, DeleteParams::background())
                .await?;
        }
        ClaimShutdownPolicy::DeleteForeground => {
            ctx.record_event(
                claim,
                Event::normal(
                    "ClaimExpired",
                    "Deleting",
                    "Deleting the expired claim".to_owned(),
                ),
            );
            ctx.delete::<SandboxClaim>(&claim.metadata, DeleteParams::foreground())
                .await?;
        }
        ClaimShutdownPolicy::Retain => {
            for sandbox in ctx.caches.sandboxes.find(&owned_by(uid(&claim.metadata))) {
                ctx.delete::<Sandbox>(&sandbox.metadata, DeleteParams::background())
                    .await?;
            }
        }
    }
    Ok(Action::AwaitChange)
}

/// Message of the condition. A sandbox that the claim names but does not control is not deleted, which the message
/// says.
fn message(ctx: &Context, claim: &SandboxClaim) -> String {
    let foreign = claim.bound_name().filter(|name| {
        let namespace = claim.metadata.namespace.clone().unwrap_or_default();
        let sandbox = ctx.caches.sandboxes.get(&Key::new(namespace, *name));
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
