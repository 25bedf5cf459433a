//! The SandboxClaim controller: binds a warm sandbox in two writes, or creates one (cold start), and mirrors its
//! status.

mod annotations;
mod bind;
mod cold;
mod expiry;
mod find;
mod inject;
mod pod_metadata;
mod status;

use crate::cache::Key;
use crate::context::Context;
use crate::crd::conditions::Verdict;
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use crate::error::{Class, Error, Result};
use crate::work_queue::Action;
use k8s_openapi::jiff::Timestamp;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use annotations::annotate;
use bind::Adopted;
use find::Existing;

/// Requeue interval while the pool or template does not exist; usually the watch requeues earlier.
const MISSING_RECHECK: Duration = Duration::from_secs(60);

/// Requeue delay while the caches and the API server disagree.
const RECHECK: Action = Action::RequeueAfter(Duration::from_millis(200));

/// Reconciles one claim.
pub(crate) async fn reconcile(ctx: &Context, key: &Key) -> Result<Action> {
    let Some(claim) = ctx.caches.claims.get(key) else {
        return Ok(Action::AwaitChange);
    };
    if claim.metadata.deletion_timestamp.is_some() {
        return Ok(Action::AwaitChange);
    }
    ctx.queues
        .annotations
        .add_after(key.clone(), annotations::ANNOTATE_DELAY);
    let now = Timestamp::now();
    if expiry::is_due(&claim, now) {
        return expiry::expire(ctx, &claim, now).await;
    }
    match serve(ctx, &claim).await {
        Ok(served) => {
            let next = status::write(ctx, &claim, served, now).await?;
            Ok(next.sooner(expiry::remaining(&claim, now)))
        }
        Err(error) => failed(ctx, &claim, error, now).await,
    }
}

/// The result of a reconcile for a claim.
pub(crate) enum Served {
    /// The claim is bound to this sandbox.
    By(Arc<Sandbox>),
    /// The claim has no sandbox: its `Ready` condition, and when to retry.
    Not(Verdict, Action),
}

async fn serve(ctx: &Context, claim: &SandboxClaim) -> Result<Served> {
    pod_metadata::check(claim, &ctx.options.allowed_label_domains)?;
    match find::existing(ctx, claim).await? {
        Existing::One(sandbox) => {
            let sandbox = bind::sync_metadata(ctx, claim, sandbox).await?;
            return Ok(Served::By(sandbox));
        }
        Existing::Leaving => {
            let missing = Verdict::no("SandboxMissing", "Sandbox does not exist");
            return Ok(Served::Not(missing, Action::AwaitChange));
        }
        Existing::None => {}
    }
    let (pool, template) = match sources(ctx, claim) {
        Ok(sources) => sources,
        Err(missing) => return Ok(Served::Not(missing, Action::RequeueAfter(MISSING_RECHECK))),
    };
    if !claim.needs_cold_start() {
        match bind::adopt(ctx, claim, &pool, &template).await? {
            Adopted::One(sandbox) => return Ok(Served::By(sandbox)),
            Adopted::Contested(why) => {
                let words = format!("{why}; the next pass retries from a converged view");
                return Ok(Served::Not(Verdict::no("AdoptionConflict", words), RECHECK));
            }
            Adopted::None => {}
        }
    }
    match cold::start(ctx, claim, &pool, &template).await? {
        Some(sandbox) => Ok(Served::By(sandbox)),
        None => {
            let words = "Sandbox already created; waiting for cache to converge";
            Ok(Served::Not(
                Verdict::no("SandboxCreatePending", words),
                RECHECK,
            ))
        }
    }
}

/// The pool of a claim, and the template of the pool; or the condition that names what is missing.
fn sources(
    ctx: &Context,
    claim: &SandboxClaim,
) -> std::result::Result<(Arc<SandboxWarmPool>, Arc<SandboxTemplate>), Verdict> {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let pool_name = &claim.spec.warm_pool_ref.name;
    let pool = ctx.caches.pools.get(&Key::new(namespace, pool_name));
    let pool = pool.ok_or_else(|| {
        Verdict::no(
            "WarmPoolNotFound",
            format!("SandboxWarmPool \"{pool_name}\" not found"),
        )
    })?;
    let template_name = &pool.spec.sandbox_template_ref.name;
    let template = ctx
        .caches
        .templates
        .get(&Key::new(namespace, template_name));
    let template = template.ok_or_else(|| {
        Verdict::no(
            "TemplateNotFound",
            format!("SandboxTemplate \"{template_name}\" not found"),
        )
    })?;
    Ok((pool, template))
}

/// Writes the error into the `Ready` condition. A permanent error is not retried.
async fn failed(
    ctx: &Context,
    claim: &SandboxClaim,
    error: Error,
    now: Timestamp,
) -> Result<Action> {
    if !error.is_reportable() {
        return Err(error);
    }
    let verdict = match (&error, error.class()) {
        (Error::Refused { reason, message }, _) => Verdict::no(reason, message.clone()),
        (_, Class::Permanent) => {
            Verdict::no("InvalidConfiguration", format!("Error seen: {error}"))
        }
        (_, _) => Verdict::no("ReconcilerError", format!("Error seen: {error}")),
    };
    status::write_keeping(ctx, claim, verdict, now).await?;
    match error.class() {
        Class::Permanent => Ok(expiry::remaining(claim, now)),
        Class::Conflict | Class::Gone | Class::Throttled(_) | Class::Transient => Err(error),
    }
}
