//! The SandboxWarmPool controller: keeps as many sandboxes waiting as the pool says.

pub(crate) mod blueprint;
mod make;
mod plan;

use crate::cache::Key;
use crate::crd::conditions::{FINISHED, POD_SCHEDULED, READY, is_true};
use crate::crd::names::{self, TEMPLATE_HASH, TEMPLATE_REF_HASH, WARM_POOL};
use crate::crd::{Sandbox, SandboxTemplate, SandboxWarmPool, SandboxWarmPoolStatus};
use crate::error::Result;
use crate::events::Note;
use crate::held::{controller_of, label, uid};
use crate::queue::Next;
use crate::world::World;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::DeleteParams;
use plan::{Member, Plan, Wanted};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// A pool's figures are written at most this often: a busy pool changes with every claim.
const STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// A template that is missing is looked for again this often; the watch usually tells earlier.
const MISSING_RECHECK: Duration = Duration::from_secs(60);

/// Between two sandboxes that are made while claims come in.
const GENTLE_PAUSE: Duration = Duration::from_millis(30);

/// What the pool's sandboxes are made from.
struct Recipe {
    template: Arc<SandboxTemplate>,
    /// Hash of the template's name.
    name_hash: String,
    /// Hash of what it says.
    hash: String,
}

/// One pass over one pool.
pub(crate) async fn reconcile(world: &World, key: &Key) -> Result<Next> {
    let Some(pool) = world.held.pools.get(key) else {
        world.pool_figures.release(key);
        world.refills.release(key);
        world.delays.release(key);
        for known in [&world.held_up, &world.no_template, &world.pool_failing] {
            known.changed(key, false);
        }
        return Ok(Next::Wait);
    };
    if pool.metadata.deletion_timestamp.is_some() {
        return Ok(Next::Wait);
    }
    let template_key = Key::new(&key.namespace, &pool.spec.sandbox_template_ref.name);
    let template = world.held.templates.get(&template_key);
    if world.no_template.changed(key, template.is_none()) && template.is_none() {
        world.note(
            pool.as_ref(),
            Note::warning(
                "TemplateNotFound",
                "Reconciling",
                format!("SandboxTemplate \"{}\" not found", template_key.name),
            ),
        );
    }
    let recipe = template.map(|template| Recipe::new(&pool, template));
    let members = own_members(world, &pool, recipe.as_ref()).await?;
    let now = Timestamp::now();
    let views: Vec<Member> = members
        .iter()
        .map(|member| view(member, recipe.as_ref(), now))
        .collect();
    let plan = plan::plan(&wanted(world, &pool), &views);
    let more = carry_out(world, &pool, recipe.as_ref(), &members, &plan).await;
    tell(world, &pool, &plan);
    let recheck = plan.recheck.map_or(Next::Wait, Next::After);
    let missing = if recipe.is_none() {
        Next::After(MISSING_RECHECK)
    } else {
        Next::Wait
    };
    let status = write_status(world, &pool, &members, &plan).await?;
    let more = more?; // its figures are true whatever went wrong
    Ok([recheck, missing, more, status]
        .into_iter()
        .fold(Next::Wait, Next::sooner))
}

fn wanted(world: &World, pool: &SandboxWarmPool) -> Wanted {
    Wanted {
        replicas: pool.desired(),
        strategy: pool.strategy(),
        grace: world.options.sandbox_warm_pool_readiness_grace_period,
        recheck: world
            .options
            .sandbox_warm_pool_unschedulable_recheck_interval,
        batch: world.options.sandbox_warm_pool_max_batch_size,
    }
}

/// The sandboxes of the pool. One without an owner that carries the pool's label is taken in.
async fn own_members(
    world: &World,
    pool: &SandboxWarmPool,
    recipe: Option<&Recipe>,
) -> Result<Vec<Arc<Sandbox>>> {
    let mut members = Vec::new();
    for sandbox in world.members_of(pool) {
        match controller_of(&sandbox.metadata) {
            Some(owner) if owner.uid == uid(&pool.metadata) => members.push(sandbox),
            Some(_) => {}
            None if sandbox.metadata.deletion_timestamp.is_some() => {}
            None if recipe.is_some_and(|recipe| recipe.is_stale(&sandbox)) => {
                world
                    .delete::<Sandbox>(&sandbox.metadata, DeleteParams::background())
                    .await?;
            }
            None => members.extend(take_in(world, pool, &sandbox).await?),
        }
    }
    Ok(members)
}

async fn take_in(
    world: &World,
    pool: &SandboxWarmPool,
    sandbox: &Sandbox,
) -> Result<Option<Arc<Sandbox>>> {
    let key = Key::of(&sandbox.metadata);
    let patch = json!({"metadata": {
        "resourceVersion": sandbox.metadata.resource_version,
        "ownerReferences": [owner(pool)],
    }});
    world.patch_sandbox(&key, patch).await?;
    Ok(world.held.sandboxes.get(&key))
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
        // Unschedulable, or held back by a scheduling gate.
        held_up: sandbox
            .condition(POD_SCHEDULED)
            .is_some_and(|c| c.status == "False"),
        age,
        unready: since(unready).unwrap_or(age),
    }
}

async fn carry_out(
    world: &World,
    pool: &SandboxWarmPool,
    recipe: Option<&Recipe>,
    members: &[Arc<Sandbox>],
    plan: &Plan,
) -> Result<Next> {
    for name in &plan.delete {
        let member = members
            .iter()
            .find(|m| m.metadata.name.as_ref() == Some(name));
        if let Some(member) = member {
            world.delete_member(member).await?;
        }
    }
    let key = Key::of(&pool.metadata);
    let Some(recipe) = recipe.filter(|_| plan.create > 0) else {
        world.delays.release(&key);
        return Ok(Next::Wait);
    };
    let delay = world.options.sandbox_warm_pool_replenish_delay;
    if !delay.is_zero()
        && let Some(wait) = world.delays.left(&key, delay)
    {
        return Ok(Next::After(wait));
    }
    let Some(pause) = pause(world, pool, plan) else {
        make::sandboxes(world, pool, recipe, plan.create).await?;
        return Ok(Next::Wait);
    };
    if let Some(wait) = world.refills.hold(&key, pause) {
        return Ok(Next::After(wait));
    }
    make::sandboxes(world, pool, recipe, 1).await?;
    Ok(Next::After(pause))
}

/// The time between two sandboxes, where they are not made all at once: what the operator was told, and while claims
/// come in and a quarter of the pool is ready, walking pace: the API server is theirs.
fn pause(world: &World, pool: &SandboxWarmPool, plan: &Plan) -> Option<Duration> {
    let rate = world.options.sandbox_warm_pool_max_refill_rate;
    let told = (rate > 0.0).then(|| Duration::from_secs_f64(1.0 / rate.max(0.001)));
    let calm = plan.ready * 4 < pool.desired() || !world.timings.claims_come_in();
    let gentle = (!calm).then_some(GENTLE_PAUSE);
    told.max(gentle)
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

    /// Whether a sandbox was made from something else.
    fn is_stale(&self, sandbox: &Sandbox) -> bool {
        let meta = &sandbox.metadata;
        if label(meta, TEMPLATE_REF_HASH) != Some(&self.name_hash) {
            return true;
        }
        // Another encoder may have hashed the same template differently.
        label(meta, TEMPLATE_HASH) != Some(&self.hash)
            && blueprint::differs(&self.template, sandbox)
    }
}

// === impl World ===

impl World {
    /// Deletes a waiting sandbox unless somebody claims it first: the version that was looked at must still be there.
    async fn delete_member(&self, member: &Sandbox) -> Result<()> {
        self.delete_version::<Sandbox>(&member.metadata, DeleteParams::background())
            .await
    }
}

fn tell(world: &World, pool: &SandboxWarmPool, plan: &Plan) {
    let key = Key::of(&pool.metadata);
    if world.held_up.changed(&key, plan.held_up) {
        let note = if plan.held_up {
            Note::warning(
                "WarmPoolNotProgressing",
                "Replenishing",
                "no node takes some of the pool's pods".to_owned(),
            )
        } else {
            Note::normal(
                "WarmPoolProgressing",
                "Replenishing",
                "the pool's pods are being scheduled again".to_owned(),
            )
        };
        world.note(pool, note);
    }
}

async fn write_status(
    world: &World,
    pool: &SandboxWarmPool,
    members: &[Arc<Sandbox>],
    plan: &Plan,
) -> Result<Next> {
    let key = Key::of(&pool.metadata);
    // What this pass made is in the table already.
    let current = world.members_of(pool);
    let alive = current
        .iter()
        .filter(|m| m.metadata.deletion_timestamp.is_none());
    let alive =
        alive.filter(|m| controller_of(&m.metadata).is_some_and(|o| o.uid == uid(&pool.metadata)));
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
        return Ok(Next::Wait);
    }
    let urgent = before.observed_generation != status.observed_generation || members.is_empty();
    if !urgent && let Some(wait) = world.pool_figures.hold(&key, STATUS_INTERVAL) {
        return Ok(Next::After(wait));
    }
    world.pool_figures.release(&key);
    world
        .patch_pool_status(&key, json!({"status": status}))
        .await?;
    Ok(Next::Wait)
}

/// The reference by which a pool owns its sandboxes.
fn owner(pool: &SandboxWarmPool) -> OwnerReference {
    OwnerReference {
        api_version: "extensions.agents.x-k8s.io/v1beta1".to_owned(),
        kind: "SandboxWarmPool".to_owned(),
        name: pool.metadata.name.clone().unwrap_or_default(),
        uid: pool.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
