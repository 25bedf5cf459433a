//! The sandbox that a claim has already.

use crate::cache::Key;
use crate::crd::names::ASSIGNED;
use crate::crd::{Sandbox, SandboxClaim};
use crate::error::{Error, Result};
use crate::held::{annotation, controller_of, label, owned_by, uid};
use crate::world::World;
use kube::api::DeleteParams;
use std::sync::Arc;

/// What a claim has.
pub(super) enum Existing {
    /// Its sandbox.
    One(Arc<Sandbox>),
    /// A sandbox that is being deleted; the next one comes when it is gone.
    Leaving,
    /// None.
    None,
}

/// The one sandbox of the claim. Two writers may each have given it one: the one that the status names stays.
pub(super) async fn existing(world: &World, claim: &SandboxClaim) -> Result<Existing> {
    let mut owned = world.held.sandboxes.find(&owned_by(uid(&claim.metadata)));
    let leaving = owned.len();
    owned.retain(|sandbox| sandbox.metadata.deletion_timestamp.is_none());
    if owned.is_empty() {
        stranger(world, claim)?;
        return Ok(if leaving > 0 {
            Existing::Leaving
        } else {
            Existing::None
        });
    }
    owned.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let place = |name: &str| {
        owned
            .iter()
            .position(|s| s.metadata.name.as_deref() == Some(name))
    };
    let at = claim
        .bound_name()
        .and_then(place)
        .or_else(|| assigned(claim).and_then(place));
    let chosen = owned.remove(at.unwrap_or(0));
    if claim.bound_name() == chosen.metadata.name.as_deref() {
        for surplus in owned {
            tracing::warn!(claim = %Key::of(&claim.metadata), sandbox = surplus.metadata.name, "a second sandbox of one claim is deleted");
            world
                .delete::<Sandbox>(&surplus.metadata, DeleteParams::background())
                .await?;
        }
    }
    Ok(Existing::One(chosen))
}

/// A sandbox with the claim's name that belongs to somebody else stands in the way of a cold start.
fn stranger(world: &World, claim: &SandboxClaim) -> Result<()> {
    let key = Key::of(&claim.metadata);
    let Some(sandbox) = world.held.sandboxes.get(&key) else {
        return Ok(());
    };
    let ours = controller_of(&sandbox.metadata).is_some_and(|o| o.uid == uid(&claim.metadata));
    if ours || sandbox.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    Err(Error::NotOwned(format!(
        "sandbox \"{}\" exists and is not controlled by this claim",
        key.name
    )))
}

/// The sandbox that an earlier pass, maybe of another controller, chose.
fn assigned(claim: &SandboxClaim) -> Option<&str> {
    let meta = &claim.metadata;
    annotation(meta, ASSIGNED)
        .or_else(|| label(meta, ASSIGNED))
        .filter(|name| !name.is_empty())
}
