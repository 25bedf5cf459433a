//! The SandboxClaim controller: a claim gets a warm sandbox in two writes, or a new one, and mirrors what becomes of it.

mod bind;
mod cold;
mod expiry;
mod find;
mod inject;
mod notes;
mod pod_metadata;
mod status;

use crate::cache::Key;
use crate::crd::conditions::Verdict;
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use crate::error::{Class, Error, Result};
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use std::sync::Arc;
use std::time::Duration;

use bind::Adopted;
use find::Existing;
pub(crate) use notes::annotate;

/// A pool or a template that is missing is looked for again this often; the watch usually tells earlier.
const MISSING_RECHECK: Duration = Duration::from_secs(60);

/// What is contradictory is looked at again after this.
const RECHECK: Next = Next::After(Duration::from_millis(200));

/// One pass over one claim.
pub(crate) async fn reconcile(world: &World, key: &Key) -> Result<Next> {
    let Some(claim) = world.held.claims.get(key) else {
        return Ok(Next::Wait);
    };
    if claim.metadata.deletion_timestamp.is_some() {
        return Ok(Next::Wait);
    }
    world.queues.notes.add_after(key.clone(), notes::LATEST);
    let now = Timestamp::now();
    if expiry::is_due(&claim, now) {
        return expiry::expire(world, &claim, now).await;
    }
    match serve(world, &claim).await {
        Ok(served) => {
            let next = status::write(world, &claim, served, now).await?;
            Ok(next.sooner(expiry::remaining(&claim, now)))
        }
        Err(error) => failed(world, &claim, error, now).await,
    }
}

/// What a pass found for a claim.
pub(crate) enum Served {
    /// Its sandbox.
    By(Arc<Sandbox>),
    /// Nothing yet, and why.
    Not(Verdict, Next),
}

async fn serve(world: &World, claim: &SandboxClaim) -> Result<Served> {
    pod_metadata::check(claim, &world.options.allowed_label_domains)?;
    match find::existing(world, claim).await? {
        Existing::One(sandbox) => {
            let sandbox = bind::keep_up(world, claim, sandbox).await?;
            return Ok(Served::By(sandbox));
        }
        Existing::Leaving => {
            let missing = Verdict::no("SandboxMissing", "Sandbox does not exist");
            return Ok(Served::Not(missing, Next::Wait));
        }
        Existing::None => {}
    }
    let (pool, template) = match sources(world, claim) {
        Ok(sources) => sources,
        Err(missing) => return Ok(Served::Not(missing, Next::After(MISSING_RECHECK))),
    };
    if !claim.needs_cold_start() {
        match bind::adopt(world, claim, &pool, &template).await? {
            Adopted::One(sandbox) => return Ok(Served::By(sandbox)),
            Adopted::Contested(why) => {
                let words = format!("{why}; the next pass retries from a converged view");
                return Ok(Served::Not(Verdict::no("AdoptionConflict", words), RECHECK));
            }
            Adopted::None => {}
        }
    }
    match cold::start(world, claim, &pool, &template).await? {
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

/// The pool of a claim and its template.
fn sources(
    world: &World,
    claim: &SandboxClaim,
) -> std::result::Result<(Arc<SandboxWarmPool>, Arc<SandboxTemplate>), Verdict> {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let pool_name = &claim.spec.warm_pool_ref.name;
    let pool = world.held.pools.get(&Key::new(namespace, pool_name));
    let pool = pool.ok_or_else(|| {
        Verdict::no(
            "WarmPoolNotFound",
            format!("SandboxWarmPool \"{pool_name}\" not found"),
        )
    })?;
    let template_name = &pool.spec.sandbox_template_ref.name;
    let template = world
        .held
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

/// Writes the error into the claim; what cannot be helped by trying again is not tried again.
async fn failed(world: &World, claim: &SandboxClaim, error: Error, now: Timestamp) -> Result<Next> {
    if !error.is_worth_telling() {
        return Err(error);
    }
    let verdict = match (&error, error.class()) {
        (Error::Refused { reason, message }, _) => Verdict::no(reason, message.clone()),
        (_, Class::Permanent) => {
            Verdict::no("InvalidConfiguration", format!("Error seen: {error}"))
        }
        (_, _) => Verdict::no("ReconcilerError", format!("Error seen: {error}")),
    };
    status::write_keeping(world, claim, verdict, now).await?;
    match error.class() {
        Class::Permanent => Ok(expiry::remaining(claim, now)),
        Class::Conflict | Class::Gone | Class::Throttled(_) | Class::Transient => Err(error),
    }
}

/// The reference by which a claim owns its sandbox.
fn owner(claim: &SandboxClaim) -> OwnerReference {
    OwnerReference {
        api_version: "extensions.agents.x-k8s.io/v1beta1".to_owned(),
        kind: "SandboxClaim".to_owned(),
        name: claim.metadata.name.clone().unwrap_or_default(),
        uid: claim.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
