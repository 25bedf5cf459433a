//! The Sandbox controller: one pass makes the children that are missing and says what is there.

mod expiry;
mod metadata;
mod pod;
mod service;
mod status;
mod volumes;

use crate::cache::Key;
use crate::crd::conditions::Verdict;
use crate::crd::{OperatingMode, Sandbox};
use crate::error::{Class, Error, Result};
use crate::held::PodView;
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// How often a pod that is not watched is looked for.
const UNSEEN_RECHECK: Duration = Duration::from_secs(5);

/// The pods of a sandbox.
#[derive(Clone, Debug)]
pub(crate) enum Pods {
    /// There is none.
    Missing,
    /// There is the one that belongs to it.
    One(Arc<PodView>),
    /// More than one say that they belong to it; their names.
    Many(Vec<String>),
    /// Its name is taken by a pod of somebody else.
    Foreign,
    /// The API server did not say.
    Unknown,
}

/// The Service of a sandbox.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ServiceState {
    /// None is asked for and none is there.
    NotWanted,
    /// It is there.
    Exists,
    /// It is asked for and is not there.
    Missing,
}

/// What a pass found and made.
pub(crate) struct Children {
    pub(crate) pods: Pods,
    pub(crate) service: ServiceState,
    /// Why it did not get further.
    pub(crate) error: Option<Error>,
}

/// One pass over one sandbox.
pub(crate) async fn reconcile(world: &World, key: &Key) -> Result<Next> {
    let Some(sandbox) = world.held.sandboxes.get(key) else {
        world.gathering.release(key);
        world.failing.changed(key, false);
        return Ok(Next::Wait);
    };
    if sandbox.metadata.deletion_timestamp.is_some() {
        return Ok(Next::Wait); // its children follow by their owner references
    }
    let now = Timestamp::now();
    if expiry::is_due(&sandbox, now) {
        return expiry::expire(world, &sandbox, now).await;
    }
    let mut children = ensure(world, &sandbox).await;
    let passing = |error: &Error| !error.is_worth_telling();
    if let Some(error) = children.error.take_if(|error| passing(error)) {
        return Err(error);
    }
    let written = status::write(world, &sandbox, &children, now).await?;
    let next = [
        written,
        expiry::remaining(&sandbox, now),
        recheck(world, &sandbox, &children),
    ];
    let next = next.into_iter().fold(Next::Wait, Next::sooner);
    match children.error {
        // Its words stand in the condition, and trying again does not help; its time still comes.
        Some(error) if error.class() != Class::Permanent => Err(error),
        _ => Ok(next),
    }
}

async fn ensure(world: &World, sandbox: &Sandbox) -> Children {
    let mut children = Children {
        pods: Pods::Unknown,
        service: service::state(world, sandbox),
        error: None,
    };
    children.error = make(world, sandbox, &mut children).await.err();
    children
}

async fn make(world: &World, sandbox: &Sandbox, children: &mut Children) -> Result<()> {
    volumes::ensure(world, sandbox).await?;
    pod::ensure(world, sandbox, &mut children.pods).await?;
    if !matches!(children.pods, Pods::Many(_)) {
        children.service = service::ensure(world, sandbox).await?;
    }
    Ok(())
}

/// Pods without our label are not watched: one that stands in the way is looked for.
fn recheck(world: &World, sandbox: &Sandbox, children: &Children) -> Next {
    let unseen = match &children.pods {
        Pods::Foreign => true,
        Pods::One(pod) => world.held.pods.get(&Key::of(&pod.meta)).is_none(),
        Pods::Missing | Pods::Many(_) | Pods::Unknown => false,
    };
    if unseen && sandbox.operating_mode() == OperatingMode::Suspended {
        return Next::After(UNSEEN_RECHECK);
    }
    Next::Wait
}

/// The condition that tells of an error.
pub(crate) fn error_verdict(error: &Error) -> Verdict {
    let reason = match error.class() {
        Class::Permanent => "InvalidConfiguration",
        Class::Conflict | Class::Gone | Class::Throttled(_) | Class::Transient => "ReconcilerError",
    };
    Verdict::no(reason, format!("Error seen: {error}"))
}

/// The reference by which a sandbox owns a child.
fn owner(sandbox: &Sandbox) -> OwnerReference {
    OwnerReference {
        api_version: "agents.x-k8s.io/v1beta1".to_owned(),
        kind: "Sandbox".to_owned(),
        name: sandbox.metadata.name.clone().unwrap_or_default(),
        uid: sandbox.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
