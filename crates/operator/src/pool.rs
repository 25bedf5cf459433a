//! The SandboxWarmPool controller: keeps `replicas` unclaimed sandboxes running.

pub(crate) mod blueprint;
mod make;
mod plan;

use crate::cache::Key;
use crate::context::Context;
use crate::crd::conditions::{FINISHED, POD_SCHEDULED, READY, is_true};
use crate::crd::names::{self, TEMPLATE_HASH, TEMPLATE_REF_HASH, WARM_POOL};
use crate::crd::{Sandbox, SandboxTemplate, SandboxWarmPool, SandboxWarmPoolStatus};
use crate::error::Result;
use crate::events::Event;
use crate::object_meta::{controller_of, is_controlled_by, label, owner_reference, uid};
use crate::work_queue::Action;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::DeleteParams;
use plan::{Member, Plan, Wanted};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// Debounce window for the status of a pool: a busy pool changes with every claim.
const STATUS_DEBOUNCE: Duration = Duration::from_millis(500);
/// Requeue interval while the template does not exist; usually the watch requeues earlier.
const MISSING_RECHECK: Duration = Duration::from_secs(60);

/// Throttled refill: time between two new sandboxes while the operator is busy with claims.
const THROTTLED_INTERVAL: Duration = Duration::from_millis(30);

/// The template of a pool, with its hashes.
struct Recipe {
    template: Arc<SandboxTemplate>,
    /// Hash of the template's name.
    name_hash: String,
    /// Hash of its content; see [`blueprint::hash`].
    hash: String,
}

/// Reconciles one pool.
pub(crate) async fn reconcile(ctx: &Context, key: &Key) -> Result<Action> {
    let Some(pool) = ctx.caches.pools.get(key) else {
        ctx.pool_status_debounce.clear(key);
        ctx.refill_throttle.clear(key);
        ctx.refill_delay.clear(key);
        for edge in [
            &ctx.pool_unschedulable,
            &ctx.pool_template_missing,
            &ctx.pool_create_failing,
        ] {
            edge.changed(key, false);
        }
        return Ok(Action::AwaitChange);
    };
    if pool.metadata.deletion_timestamp.is_some() {
        return Ok(Action::AwaitChange);
    }
    let template_key = Key::new(&key.namespace, &pool.spec.sandbox_template_ref.name);
    let template = ctx.caches.templates.get(&template_key);
    if ctx.pool_template_missing.changed(key, template.is_none()) && template.is_none() {
        ctx.record_event(
            pool.as_ref(),
            Event::warning(
                "TemplateNotFound",
                "Reconciling",
                format!("SandboxTemplate \"{}\" not found", template_key.name),
            ),
        );
    }
    let recipe = template.map(|template| Recipe::new(&pool, template));
    let members = own_members(ctx, &pool, recipe.as_ref()).await?;
    let now = Timestamp::now();
    let views: Vec<Member> = members
        .iter()
        .map(|member| view(member, recipe.as_ref(), now))
        .collect();
    let plan = plan::plan(&wanted(ctx, &pool), &views);
    let more = carry_out(ctx, &pool, recipe.as_ref(), &members, &plan).await;
    report(ctx, &pool, &plan);
    let recheck = plan
        .recheck
        .map_or(Action::AwaitChange, Action::RequeueAfter);
    let missing = if recipe.is_none() {
        Action::RequeueAfter(MISSING_RECHECK)
    } else {
        Action::AwaitChange
    };
    let status = write_status(ctx, &pool, &members, &plan).await?;
    let more = more?; // only now: the status is right even after an error
    Ok([recheck, missing, more, status]
        .into_iter()
        .fold(Action::AwaitChange, Action::sooner))
}

fn wanted(ctx: &Context, pool: &SandboxWarmPool) -> Wanted {
    Wanted {
        replicas: pool.desired(),
        strategy: pool.strategy(),
        grace: ctx.options.sandbox_warm_pool_readiness_grace_period,
        recheck: ctx.options.sandbox_warm_pool_unschedulable_recheck_interval,
        batch: ctx.options.sandbox_warm_pool_max_batch_size,
    }
}

/// The sandboxes of the pool. One with the pool's label and without an owner is adopted.
async fn own_members(
    ctx: &Context,
    pool: &SandboxWarmPool,
    recipe: Option<&Recipe>,
) -> Result<Vec<Arc<Sandbox>>> {
    let mut members = Vec::new();
    for sandbox in ctx.members_of(pool) {
        match controller_of(&sandbox.metadata) {
            Some(owner) if owner.uid == uid(&pool.metadata) => members.push(sandbox),
            Some(_) => {}
            None if sandbox.metadata.deletion_timestamp.is_some() => {}
            None if recipe.is_some_and(|recipe| recipe.is_stale(&sandbox)) => {
                ctx.delete::<Sandbox>(&sandbox.metadata, DeleteParams::background())
                    .await?;
            }
            None => members.push(adopt(ctx, pool, &sandbox).await?),
        }
    }
    Ok(members)
}

async fn adopt(ctx: &Context, pool: &SandboxWarmPool, sandbox: &Sandbox) -> Result<Arc<Sandbox>> {
    let key = Key::of(&sandbox.metadata);
    let patch = json!({"metadata": {
        "resourceVersion": sandbox.metadata.resource_version,
        "ownerReferences": [owner_reference(pool)],
    }});
    ctx.patch_sandbox(&key, patch).await
}

fn view(sandbox: &Sandbox, recipe: Option<&Recipe>, now: Timestamp) -> Member {
    let since = |time: Option<&Time>| {
        let passed = time.map(|time| now.duration_since(time.0));
        passed.and_then(|passed| Duration::try_from(passed).ok())
    };
    let age = since(sandbox.metadata.creation_timestamp.as_ref()).unwrap_or_default();
    let ready = sandbox.condition(READY);
    let unready = ready
        .filter(|c| c.status != "True")
        .map(|c| &c.last_transition_time);
    Member {
        name: sandbox.metadata.name.clone().unwrap_or_default(),
        ready: is_true(ready),
        deleting: sandbox.metadata.deletion_timestamp.is_some(),
        finished: sandbox.condition(FINISHED).is_some(),
        stale: recipe.is_some_and(|recipe| recipe.is_stale(sandbox)),
        // Unschedulable, or waiting for a scheduling gate.
        unschedulable: sandbox
            .condition(POD_SCHEDULED)
            .is_some_and(|c| c.status == "False"),
        age,
        unready: since(unready).unwrap_or(age),
    }
}

async fn carry_out(
    ctx: &Context,
    pool: &SandboxWarmPool,
    recipe: Option<&Recipe>,
    members: &[Arc<Sandbox>],
    plan: &Plan,
) -> Result<Action> {
    for name in &plan.delete {
        let member = members
            .iter()
            .find(|m| m.metadata.name.as_ref() == Some(name));
        if let Some(member) = member {
            ctx.delete_member(member).await?;
        }
    }
    let key = Key::of(&pool.metadata);
    let Some(recipe) = recipe.filter(|_| plan.create > 0) else {
        ctx.refill_delay.clear(&key);
        return Ok(Action::AwaitChange);
    };
    let delay = ctx.options.sandbox_warm_pool_replenish_delay;
    if !delay.is_zero()
        && let Some(wait) = ctx.refill_delay.remaining(&key, delay)
    {
        return Ok(Action::RequeueAfter(wait));
    }
    let Some(interval) = refill_interval(ctx, pool, plan) else {
        make::sandboxes(ctx, pool, recipe, plan.create).await?;
        return Ok(Action::AwaitChange);
    };
    if let Some(wait) = ctx.refill_throttle.delay(&key, interval) {
        return Ok(Action::RequeueAfter(wait));
    }
    make::sandboxes(ctx, pool, recipe, 1).await?;
    Ok(Action::RequeueAfter(interval))
}

/// Time between two new sandboxes, when the refill is throttled: by `--sandbox-warm-pool-max-refill-rate`, or while
/// the operator is busy with claims and at least a quarter of the pool is ready. New claims have priority at the API
/// server.
fn refill_interval(ctx: &Context, pool: &SandboxWarmPool, plan: &Plan) -> Option<Duration> {
    let rate = ctx.options.sandbox_warm_pool_max_refill_rate;
    let configured = (rate > 0.0).then(|| Duration::from_secs_f64(1.0 / rate.max(0.001)));
    let urgent = plan.ready * 4 < pool.desired() || !ctx.timings.is_busy();
    let throttled = (!urgent).then_some(THROTTLED_INTERVAL);
    configured.max(throttled)
}

// === impl Recipe ===

impl Recipe {
    fn new(pool: &SandboxWarmPool, template: Arc<SandboxTemplate>) -> Self {
        Self {
            name_hash: names::hash(&pool.spec.sandbox_template_ref.name),
            hash: blueprint::hash(&template),
            template,
        }
    }

    /// Whether a sandbox was created from another template, or from an older version of it.
    fn is_stale(&self, sandbox: &Sandbox) -> bool {
        let meta = &sandbox.metadata;
        if label(meta, TEMPLATE_REF_HASH) != Some(&self.name_hash) {
            return true;
        }
        // Another controller may hash the same template differently.
        label(meta, TEMPLATE_HASH) != Some(&self.hash)
            && blueprint::differs(&self.template, sandbox)
    }
}

// === impl Context ===

impl Context {
    /// Deletes a pooled sandbox, with its resourceVersion as precondition: one that was claimed meanwhile is kept.
    async fn delete_member(&self, member: &Sandbox) -> Result<()> {
        self.delete_version::<Sandbox>(&member.metadata, DeleteParams::background())
            .await
    }
}

fn report(ctx: &Context, pool: &SandboxWarmPool, plan: &Plan) {
    let key = Key::of(&pool.metadata);
    if ctx.pool_unschedulable.changed(&key, plan.unschedulable) {
        let event = if plan.unschedulable {
            Event::warning(
                "WarmPoolNotProgressing",
                "Replenishing",
                "no node takes some of the pool's pods".to_owned(),
            )
        } else {
            Event::normal(
                "WarmPoolProgressing",
                "Replenishing",
                "the pool's pods are being scheduled again".to_owned(),
            )
        };
        ctx.record_event(pool, event);
    }
}

async fn write_status(
    ctx: &Context,
    pool: &SandboxWarmPool,
    members: &[Arc<Sandbox>],
    plan: &Plan,
) -> Result<Action> {
    let key = Key::of(&pool.metadata);
    // The sandboxes that this reconcile created are in the cache already.
    let current = ctx.members_of(pool);
    let alive = current
        .iter()
        .filter(|m| m.metadata.deletion_timestamp.is_none());
    let alive = alive.filter(|m| is_controlled_by(&m.metadata, &pool.metadata));
    let deleted = |m: &&Arc<Sandbox>| {
        m.metadata
            .name
            .as_ref()
            .is_some_and(|n| plan.delete.contains(n))
    };
    let alive: Vec<_> = alive.filter(|m| !deleted(m)).collect();
    let ready = alive.iter().filter(|m| is_true(m.condition(READY))).count();
    let status = SandboxWarmPoolStatus {
        replicas: Some(i32::try_from(alive.len()).unwrap_or(i32::MAX)),
        ready_replicas: Some(i32::try_from(ready).unwrap_or(i32::MAX)),
        selector: Some(format!("{WARM_POOL}={}", names::hash(&key.name))),
        observed_generation: pool.metadata.generation,
    };
    let before = pool.status.clone().unwrap_or_default();
    if before == status {
        return Ok(Action::AwaitChange);
    }
    let urgent = before.observed_generation != status.observed_generation || members.is_empty();
    if !urgent && let Some(wait) = ctx.pool_status_debounce.delay(&key, STATUS_DEBOUNCE) {
        return Ok(Action::RequeueAfter(wait));
    }
    ctx.pool_status_debounce.clear(&key);
    ctx.patch_pool_status(&key, json!({"status": status}))
        .await?;
    Ok(Action::AwaitChange)
}
