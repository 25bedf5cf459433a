//! Cold start: creates a sandbox from the template for this claim, with the claim's name.

use super::{inject, pod_metadata};
use crate::cache::Key;
use crate::context::Context;
use crate::crd::names::{
    self, CLAIM_UID, CREATED_BY, LAUNCH_TYPE, TEMPLATE_REF, TEMPLATE_REF_HASH, TRACE_CONTEXT,
};
use crate::crd::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use crate::error::{Error, Result};
use crate::events::Event;
use crate::metrics;
use crate::object_meta::{annotation, is_controlled_by, label, owner_reference, uid};
use crate::pool::blueprint;
use kube::api::ObjectMeta;
use std::sync::Arc;

/// Creates the claim's sandbox. `None`: it existed already, and was deleted before it could be read.
pub(super) async fn start(
    ctx: &Context,
    claim: &SandboxClaim,
    pool: &SandboxWarmPool,
    template: &SandboxTemplate,
) -> Result<Option<Arc<Sandbox>>> {
    let sandbox = desired(claim, pool, template)?;
    let key = Key::of(&claim.metadata);
    match ctx.create_sandbox(&sandbox).await {
        Ok(made) => {
            let text = format!("Created Sandbox \"{}\"", key.name);
            ctx.record_event(
                claim,
                Event::normal("SandboxProvisioned", "Provisioning", text),
            );
            metrics::claim_created(claim, template, "cold", false);
            Ok(Some(made))
        }
        Err(error) if error.is_already_exists() => {
            let Some(found) = ctx.reread_sandbox(&key).await? else {
                return Ok(None);
            };
            let ours = is_controlled_by(&found.metadata, &claim.metadata);
            if !ours {
                let message = format!(
                    "sandbox \"{}\" exists and is not controlled by this claim",
                    key.name
                );
                return Err(Error::NotOwned(message));
            }
            Ok(Some(found))
        }
        Err(error) => Err(error),
    }
}

fn desired(
    claim: &SandboxClaim,
    pool: &SandboxWarmPool,
    template: &SandboxTemplate,
) -> Result<Sandbox> {
    let key = Key::of(&claim.metadata);
    let mut spec = blueprint::spec(template);
    inject::into(&mut spec, claim, template)?;
    spec.pod_template.metadata = Some(pod_metadata::merged(claim, template));

    let template_name = &pool.spec.sandbox_template_ref.name;
    let mut labels: crate::object_meta::Labels = [
        (TEMPLATE_REF_HASH.to_owned(), names::hash(template_name)),
        (CLAIM_UID.to_owned(), uid(&claim.metadata).to_owned()),
        (LAUNCH_TYPE.to_owned(), "cold".to_owned()),
    ]
    .into();
    if let Some(client) = label(&claim.metadata, CREATED_BY) {
        labels.insert(CREATED_BY.to_owned(), client.to_owned());
    }
    let mut annotations: crate::object_meta::Labels =
        [(TEMPLATE_REF.to_owned(), template_name.clone())].into();
    if let Some(trace) = annotation(&claim.metadata, TRACE_CONTEXT) {
        annotations.insert(TRACE_CONTEXT.to_owned(), trace.to_owned());
    }
    let mut sandbox = Sandbox::new(&key.name, spec);
    sandbox.metadata = ObjectMeta {
        name: Some(key.name),
        namespace: Some(key.namespace),
        labels: Some(labels),
        annotations: Some(annotations),
        owner_references: Some(vec![owner_reference(claim)]),
        ..ObjectMeta::default()
    };
    Ok(sandbox)
}
