//! The end of a sandbox's time: it says so, its pod and Service go, its volumes stay as long as the object.

use super::status::{self, Conditions};
use super::{pod, service};
use crate::cache::Key;
use crate::crd::conditions::{FINISHED, READY, SUSPENDED, Verdict};
use crate::crd::{OperatingMode, Sandbox, SandboxStatus, ShutdownPolicy};
use crate::error::Result;
use crate::events::Note;
use crate::held::uid;
use crate::metrics;
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::api::DeleteParams;
use std::time::Duration;

/// Clocks differ a little: a pass that comes a moment too early is not worth it.
const SHORTEST_WAIT: Duration = Duration::from_secs(2);

/// Whether the sandbox's time is up.
pub(super) fn is_due(sandbox: &Sandbox, now: Timestamp) -> bool {
    let end = sandbox.spec.shutdown_time.as_ref();
    end.is_some_and(|end| end.0 <= now)
}

/// When it will be.
pub(super) fn remaining(sandbox: &Sandbox, now: Timestamp) -> Next {
    let Some(end) = &sandbox.spec.shutdown_time else {
        return Next::Wait;
    };
    let left = Duration::try_from(end.0.duration_since(now)).unwrap_or_default();
    Next::After(left.max(SHORTEST_WAIT))
}

/// Ends it.
pub(super) async fn expire(world: &World, sandbox: &Sandbox, now: Timestamp) -> Result<Next> {
    let key = Key::of(&sandbox.metadata);
    let before = sandbox.status.clone().unwrap_or_default();
    let after = SandboxStatus {
        conditions: Some(conditions(sandbox, now)),
        ..SandboxStatus::default()
    };
    if !status::same(&before, &after) {
        world
            .patch_sandbox_status(&key, status::patch(&before, &after))
            .await?;
        metrics::sandbox_expired(world, sandbox);
        if policy(sandbox) == ShutdownPolicy::Retain {
            world.note(
                sandbox,
                Note::normal(
                    "SandboxExpired",
                    "Expiring",
                    "Sandbox has expired".to_owned(),
                ),
            );
        }
    }
    for pod in world.pods_of(uid(&sandbox.metadata)) {
        pod::delete(world, &pod).await?;
    }
    if let Some(service) = service::owned(world, sandbox) {
        service::delete(world, &service).await?;
    }
    if policy(sandbox) == ShutdownPolicy::Delete {
        world
            .delete::<Sandbox>(&sandbox.metadata, DeleteParams::background())
            .await?;
    }
    Ok(Next::Wait)
}

fn policy(sandbox: &Sandbox) -> ShutdownPolicy {
    sandbox.spec.shutdown_policy.unwrap_or_default()
}

fn conditions(sandbox: &Sandbox, now: Timestamp) -> Vec<Condition> {
    let mut conditions = Conditions::new(sandbox, now);
    conditions.set(READY, Verdict::no("SandboxExpired", "Sandbox has expired"));
    // How the pod ended is worth knowing after its end; whether it was suspended stays as it was.
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
