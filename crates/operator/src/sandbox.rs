//! The Sandbox controller: a reconcile creates missing children (pod, Service, volumes) and writes the status.

mod expiry;
mod metadata;
mod pod;
mod service;
mod status;
mod volumes;

use crate::cache::Key;
use crate::caches::PodView;
use crate::context::Context;
use crate::crd::conditions::Verdict;
use crate::crd::{OperatingMode, Sandbox};
use crate::error::{Class, Error, Result};
use crate::work_queue::Action;
use k8s_openapi::jiff::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// Poll interval for a pod that the informer does not see, because it has no label of ours.
const UNWATCHED_POLL: Duration = Duration::from_secs(5);

/// The pods of a sandbox.
#[derive(Clone, Debug)]
pub(crate) enum Pods {
    /// The sandbox has no pod.
    Missing,
    /// The pod that the sandbox controls.
    One(Arc<PodView>),
    /// Several pods have an owner reference to the sandbox; their names.
    Many(Vec<String>),
    /// A pod with another owner has its name.
    Foreign,
    /// The API server could not be asked.
    Unknown,
}

/// The Service of a sandbox.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ServiceState {
    /// The spec does not ask for one, and there is none.
    NotWanted,
    /// The sandbox has its Service.
    Exists,
    /// The spec asks for one, and there is none.
    Missing,
}

/// The children of a sandbox after a reconcile.
pub(crate) struct Children {
    pub(crate) pods: Pods,
    pub(crate) service: ServiceState,
    /// The error that ended the reconcile early.
    pub(crate) error: Option<Error>,
}

/// Reconciles one sandbox.
pub(crate) async fn reconcile(ctx: &Context, key: &Key) -> Result<Action> {
    let Some(sandbox) = ctx.caches.sandboxes.get(key) else {
        ctx.sandbox_status_debounce.clear(key);
        ctx.pod_create_failing.changed(key, false);
        return Ok(Action::AwaitChange);
    };
    if sandbox.metadata.deletion_timestamp.is_some() {
        return Ok(Action::AwaitChange); // the garbage collector deletes its children by their owner references
    }
    let now = Timestamp::now();
    if expiry::is_due(&sandbox, now) {
        return expiry::expire(ctx, &sandbox, now).await;
    }
    let mut children = ensure(ctx, &sandbox).await;
    let passing = |error: &Error| !error.is_reportable();
    if let Some(error) = children.error.take_if(|error| passing(error)) {
        return Err(error);
    }
    let written = status::write(ctx, &sandbox, &children, now).await?;
    let next = [
        written,
        expiry::remaining(&sandbox, now),
        recheck(ctx, &sandbox, &children),
    ];
    let next = next.into_iter().fold(Action::AwaitChange, Action::sooner);
    match children.error {
        // A permanent error is in the condition and not retried; expiry still applies.
        Some(error) if error.class() != Class::Permanent => Err(error),
        _ => Ok(next),
    }
}

async fn ensure(ctx: &Context, sandbox: &Sandbox) -> Children {
    let mut children = Children {
        pods: Pods::Unknown,
        service: service::state(ctx, sandbox),
        error: None,
    };
    children.error = make(ctx, sandbox, &mut children).await.err();
    children
}

async fn make(ctx: &Context, sandbox: &Sandbox, children: &mut Children) -> Result<()> {
    volumes::ensure(ctx, sandbox).await?;
    pod::ensure(ctx, sandbox, &mut children.pods).await?;
    if !matches!(children.pods, Pods::Many(_)) {
        children.service = service::ensure(ctx, sandbox).await?;
    }
    Ok(())
}

/// Polls while a suspended sandbox waits for a pod that the informer does not see.
fn recheck(ctx: &Context, sandbox: &Sandbox, children: &Children) -> Action {
    let unseen = match &children.pods {
        Pods::Foreign => true,
        Pods::One(pod) => ctx.caches.pods.get(&Key::of(&pod.meta)).is_none(),
        Pods::Missing | Pods::Many(_) | Pods::Unknown => false,
    };
    if unseen && sandbox.operating_mode() == OperatingMode::Suspended {
        return Action::RequeueAfter(UNWATCHED_POLL);
    }
    Action::AwaitChange
}

/// The `Ready` condition for an error.
pub(crate) fn error_verdict(error: &Error) -> Verdict {
    let reason = match error.class() {
        Class::Permanent => "InvalidConfiguration",
        Class::Conflict | Class::Gone | Class::Throttled(_) | Class::Transient => "ReconcilerError",
    };
    Verdict::no(reason, format!("Error seen: {error}"))
}
