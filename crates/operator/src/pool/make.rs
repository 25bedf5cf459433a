//! Making the sandboxes of a pool: a few first, twice as many when that went well.

use super::{Recipe, blueprint, owner};
use crate::cache::Key;
use crate::crd::names::{
    self, CREATED_BY, LAUNCH_TYPE, TEMPLATE_HASH, TEMPLATE_REF, TEMPLATE_REF_HASH, WARM_POOL,
};
use crate::crd::{Sandbox, SandboxWarmPool};
use crate::error::{Context, Result, within};
use crate::events::Note;
use crate::held::pooled_in;
use crate::world::World;
use futures::future::join_all;
use kube::api::{ListParams, ObjectMeta};
use std::collections::BTreeSet;

/// Sandboxes that are made at the same time at most: enough to fill the connection, few enough to leave the API server
/// to claims.
const AT_ONCE: usize = 16;

/// Makes `count` sandboxes, or fewer where the API server refuses.
pub(super) async fn sandboxes(
    world: &World,
    pool: &SandboxWarmPool,
    recipe: &Recipe,
    count: usize,
) -> Result<()> {
    let key = Key::of(&pool.metadata);
    let sandbox = desired(pool, recipe);
    let (mut left, mut step) = (count, 1);
    while left > 0 {
        let now = step.min(left).min(AT_ONCE);
        let made = join_all((0..now).map(|_| world.create_sandbox(&sandbox))).await;
        if let Some(error) = made.into_iter().find_map(std::result::Result::err) {
            if error.is_ambiguous() {
                // It may have been made all the same: what is there is asked before more are made.
                take_stock(world, pool).await?;
            } else if error.is_worth_telling() && world.pool_failing.changed(&key, true) {
                let text = format!("a sandbox could not be made: {error}");
                let note = Note::warning("SandboxCreateFailed", "Replenishing", text);
                world.note(pool, note);
            }
            return Err(error);
        }
        left -= now;
        step *= 2;
    }
    world.pool_failing.changed(&key, false);
    Ok(())
}

/// Takes in every sandbox of the pool that the API server has.
async fn take_stock(world: &World, pool: &SandboxWarmPool) -> Result<()> {
    let namespace = pool.metadata.namespace.as_deref().unwrap_or_default();
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    let selector = format!("{WARM_POOL}={}", names::hash(name));
    let api = world.api::<Sandbox>(namespace);
    let selected = ListParams::default().labels(&selector);
    let list = within(api.list(&selected)).await;
    let list = list.doing(|| format!("list sandboxes of pool {namespace}/{name}"))?;
    let known: BTreeSet<_> = world
        .held
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
            world.hold_sandbox(sandbox);
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
        owner_references: Some(vec![owner(pool)]),
        ..ObjectMeta::default()
    };
    sandbox
}
