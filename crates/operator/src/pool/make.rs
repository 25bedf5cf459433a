//! Creates the sandboxes of a pool with slow start: one first, then batches that double as long as there is no error.

use super::{Recipe, blueprint};
use crate::cache::Key;
use crate::caches::pooled_in;
use crate::context::Context;
use crate::crd::names::{
    self, CREATED_BY, LAUNCH_TYPE, TEMPLATE_HASH, TEMPLATE_REF, TEMPLATE_REF_HASH, WARM_POOL,
};
use crate::crd::{Sandbox, SandboxWarmPool};
use crate::error::{ErrorContext, Result, within};
use crate::events::Event;
use crate::object_meta::owner_reference;
use futures::future::join_all;
use kube::api::{ListParams, ObjectMeta};
use std::collections::BTreeSet;

/// Concurrent create requests: enough to use the connection, few enough to leave the API server to claims.
const AT_ONCE: usize = 16;

/// Creates `count` sandboxes. Stops at the first error.
pub(super) async fn sandboxes(
    ctx: &Context,
    pool: &SandboxWarmPool,
    recipe: &Recipe,
    count: usize,
) -> Result<()> {
    let key = Key::of(&pool.metadata);
    let sandbox = desired(pool, recipe);
    let (mut left, mut step) = (count, 1);
    while left > 0 {
        let now = step.min(left).min(AT_ONCE);
        let made = join_all((0..now).map(|_| ctx.create_sandbox(&sandbox))).await;
        if let Some(error) = made.into_iter().find_map(std::result::Result::err) {
            if error.is_ambiguous() {
                // It may have been created all the same: list before creating more.
                relist(ctx, pool).await?;
            } else if error.is_reportable() && ctx.pool_create_failing.changed(&key, true) {
                let text = format!("a sandbox could not be made: {error}");
                let event = Event::warning("SandboxCreateFailed", "Replenishing", text);
                ctx.record_event(pool, event);
            }
            return Err(error);
        }
        left -= now;
        step *= 2;
    }
    ctx.pool_create_failing.changed(&key, false);
    Ok(())
}

/// Lists the sandboxes of the pool and caches those that are missing.
async fn relist(ctx: &Context, pool: &SandboxWarmPool) -> Result<()> {
    let namespace = pool.metadata.namespace.as_deref().unwrap_or_default();
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    let selector = format!("{WARM_POOL}={}", names::hash(name));
    let api = ctx.api::<Sandbox>(namespace);
    let selected = ListParams::default().labels(&selector);
    let list = within(api.list(&selected)).await;
    let list = list.with_context(|| format!("list sandboxes of pool {namespace}/{name}"))?;
    let known: BTreeSet<_> = ctx
        .caches
        .sandboxes
        .find(&pooled_in(namespace, &names::hash(name)))
        .iter()
        .filter_map(|s| s.metadata.uid.clone())
        .collect();
    for sandbox in list.items {
        if sandbox
            .metadata
            .uid
            .as_ref()
            .is_none_or(|uid| !known.contains(uid))
        {
            ctx.cache_sandbox(sandbox);
        }
    }
    Ok(())
}

fn desired(pool: &SandboxWarmPool, recipe: &Recipe) -> Sandbox {
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    let template_name = &pool.spec.sandbox_template_ref.name;
    let labels = [
        (WARM_POOL, names::hash(name)),
        (TEMPLATE_REF_HASH, recipe.name_hash.clone()),
        (TEMPLATE_HASH, recipe.hash.clone()),
        (LAUNCH_TYPE, "warm".to_owned()),
        (CREATED_BY, "controller".to_owned()),
    ];
    let mut sandbox = Sandbox::new("", blueprint::spec(&recipe.template));
    sandbox.metadata = ObjectMeta {
        generate_name: Some(format!("{name}-")),
        namespace: pool.metadata.namespace.clone(),
        labels: Some(labels.map(|(key, value)| (key.to_owned(), value)).into()),
        annotations: Some([(TEMPLATE_REF.to_owned(), template_name.clone())].into()),
        owner_references: Some(vec![owner_reference(pool)]),
        ..ObjectMeta::default()
    };
    sandbox
}
