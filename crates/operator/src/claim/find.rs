//! Finds the sandbox that a claim already controls.

use crate::cache::Key;
use crate::caches::owned_by;
use crate::context::Context;
use crate::crd::names::ASSIGNED;
use crate::crd::{Sandbox, SandboxClaim};
use crate::error::{Error, Result};
use crate::object_meta::{annotation, is_controlled_by, label, uid};
use kube::api::DeleteParams;
use std::sync::Arc;

/// The sandbox that a claim controls.
pub(super) enum Existing {
    /// The claim controls this sandbox.
    One(Arc<Sandbox>),
    /// Its sandbox is being deleted; the next one is created after that.
    Leaving,
    /// The claim controls no sandbox.
    None,
}

/// Returns the sandbox of the claim. If two writers each bound one, the one in the status is kept and the other
/// deleted.
pub(super) async fn existing(ctx: &Context, claim: &SandboxClaim) -> Result<Existing> {
    let mut owned = ctx.caches.sandboxes.find(&owned_by(uid(&claim.metadata)));
    let leaving = owned.len();
    owned.retain(|sandbox| sandbox.metadata.deletion_timestamp.is_none());
    if owned.is_empty() {
        check_name(ctx, claim)?;
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
            tracing::warn!(claim = %Key::of(&claim.metadata), sandbox = surplus.metadata.name, "deleting a surplus sandbox: the claim has another");
            ctx.delete::<Sandbox>(&surplus.metadata, DeleteParams::background())
                .await?;
        }
    }
    Ok(Existing::One(chosen))
}

/// Fails if a sandbox with the claim's name has another owner: a cold start could not create its own.
fn check_name(ctx: &Context, claim: &SandboxClaim) -> Result<()> {
    let key = Key::of(&claim.metadata);
    let Some(sandbox) = ctx.caches.sandboxes.get(&key) else {
        return Ok(());
    };
    let ours = is_controlled_by(&sandbox.metadata, &claim.metadata);
    if ours || sandbox.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    Err(Error::NotOwned(format!(
        "sandbox \"{}\" exists and is not controlled by this claim",
        key.name
    )))
}

/// The sandbox that an earlier reconcile, maybe of another controller, assigned.
fn assigned(claim: &SandboxClaim) -> Option<&str> {
    let meta = &claim.metadata;
    annotation(meta, ASSIGNED)
        .or_else(|| label(meta, ASSIGNED))
        .filter(|name| !name.is_empty())
}
