//! Expiry of a sandbox (`shutdownTime`): status `SandboxExpired`, then pod and Service are deleted. Volumes are kept as
//! long as the Sandbox object.

use super::status::{self, Conditions};
use super::{pod, service};
use crate::cache::Key;
use crate::context::Context;
use crate::crd::conditions::{FINISHED, READY, SUSPENDED, Verdict};
use crate::crd::{OperatingMode, Sandbox, SandboxStatus, ShutdownPolicy};
use crate::error::Result;
use crate::events::Event;
use crate::metrics;
use crate::object_meta::uid;
use crate::work_queue::Action;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::api::DeleteParams;
use std::time::Duration;

/// Shortest wait for the expiry: clocks differ a little, and a reconcile just before it is wasted.
const SHORTEST_WAIT: Duration = Duration::from_secs(2);

/// Whether the sandbox has expired.
pub(super) fn is_due(sandbox: &Sandbox, now: Timestamp) -> bool {
    let end = sandbox.spec.shutdown_time.as_ref();
    end.is_some_and(|end| end.0 <= now)
}

/// Requeues the sandbox at its expiry.
pub(super) fn remaining(sandbox: &Sandbox, now: Timestamp) -> Action {
    let Some(end) = &sandbox.spec.shutdown_time else {
        return Action::AwaitChange;
    };
    let left = Duration::try_from(end.0.duration_since(now)).unwrap_or_default();
    Action::RequeueAfter(left.max(SHORTEST_WAIT))
}

/// Writes the status, deletes the children and, with policy Delete, the Sandbox.
pub(super) async fn expire(ctx: &Context, sandbox: &Sandbox, now: Timestamp) -> Result<Action> {
    let key = Key::of(&sandbox.metadata);
    let before = sandbox.status.clone().unwrap_or_default();
    let after = SandboxStatus {
        conditions: Some(conditions(sandbox, now)),
        ..SandboxStatus::default()
    };
    if !status::same(&before, &after) {
        ctx.patch_sandbox_status(&key, status::patch(&before, &after))
            .await?;
        metrics::sandbox_expired(ctx, sandbox);
        if policy(sandbox) == ShutdownPolicy::Retain {
            ctx.record_event(
                sandbox,
                Event::normal(
                    "SandboxExpired",
                    "Expiring",
                    "Sandbox has expired".to_owned(),
                ),
            );
        }
    }
    for pod in ctx.pods_of(uid(&sandbox.metadata)) {
        pod::delete(ctx, &pod).await?;
    }
    if let Some(service) = service::owned(ctx, sandbox) {
        service::delete(ctx, &service).await?;
    }
    if policy(sandbox) == ShutdownPolicy::Delete {
        ctx.delete::<Sandbox>(&sandbox.metadata, DeleteParams::background())
            .await?;
    }
    Ok(Action::AwaitChange)
}

fn policy(sandbox: &Sandbox) -> ShutdownPolicy {
    sandbox.spec.shutdown_policy.unwrap_or_default()
}

fn conditions(sandbox: &Sandbox, now: Timestamp) -> Vec<Condition> {
    let mut conditions = Conditions::new(sandbox, now);
    conditions.set(READY, Verdict::no("SandboxExpired", "Sandbox has expired"));
    // Kept as they were: whether the sandbox was suspended, and how its pod finished.
    for kind in [SUSPENDED, FINISHED] {
        if let Some(condition) = sandbox.condition(kind) {
            let mut condition = condition.clone();
            condition.observed_generation = sandbox.metadata.generation;
            conditions.list.push(condition);
        }
    }
    if sandbox.condition(SUSPENDED).is_none() && sandbox.operating_mode() == OperatingMode::Running
    {
        conditions.set(
            SUSPENDED,
            Verdict::no("NotSuspended", "Sandbox is not suspended"),
        );
    }
    conditions.list
}
