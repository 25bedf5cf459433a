//! The PersistentVolumeClaims of a sandbox: created once, never changed or deleted here. The garbage collector deletes
//! them with the Sandbox.

use crate::cache::Key;
use crate::caches::Child;
use crate::context::Context;
use crate::crd::names::{self, NAME_HASH};
use crate::crd::{Sandbox, VolumeClaimTemplate};
use crate::error::{Error, Result};
use crate::object_meta::{controller_of, may_adopt, owner_reference, uid};
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, PodSpec, Volume,
};
use kube::api::ObjectMeta;
use serde_json::json;

/// Creates the volume claims that are missing.
pub(super) async fn ensure(ctx: &Context, sandbox: &Sandbox) -> Result<()> {
    for template in sandbox.spec.volume_claim_templates.iter().flatten() {
        let key = claim_key(sandbox, template);
        match ctx.caches.volumes.get(&key) {
            Some(claim) => check(ctx, sandbox, &claim).await?,
            None => make(ctx, sandbox, template).await?,
        }
    }
    Ok(())
}

/// Adds the volumes to the pod spec; they replace volumes of the same name.
pub(super) fn mount(sandbox: &Sandbox, spec: &mut PodSpec) {
    let Some(templates) = &sandbox.spec.volume_claim_templates else {
        return;
    };
    let volumes = spec.volumes.get_or_insert_default();
    volumes.retain(|volume| templates.iter().all(|t| t.name() != volume.name));
    volumes.extend(templates.iter().map(|template| Volume {
        name: template.name().to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim_key(sandbox, template).name,
            read_only: None,
        }),
        ..Volume::default()
    }));
}

async fn make(ctx: &Context, sandbox: &Sandbox, template: &VolumeClaimTemplate) -> Result<()> {
    let key = claim_key(sandbox, template);
    let metadata = template.metadata.clone().unwrap_or_default();
    let mut labels = metadata.labels.unwrap_or_default();
    let sandbox_name = sandbox.metadata.name.as_deref().unwrap_or_default();
    labels.insert(NAME_HASH.to_owned(), names::hash(sandbox_name));
    let claim = PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(key.name.clone()),
            namespace: Some(key.namespace.clone()),
            labels: Some(labels),
            annotations: metadata.annotations,
            owner_references: Some(vec![owner_reference(sandbox)]),
            ..ObjectMeta::default()
        },
        spec: Some(template.spec.clone()),
        status: None,
    };
    match ctx.create_volume(&claim).await {
        Err(error) if error.is_already_exists() => {
            match ctx.read::<PersistentVolumeClaim>(&key).await? {
                Some(found) => check(ctx, sandbox, &found.into()).await,
                None => Err(error),
            }
        }
        other => other.map(drop),
    }
}

/// Checks an existing volume claim: it is ours, or is adopted if it may be, or is an error.
async fn check(ctx: &Context, sandbox: &Sandbox, claim: &Child) -> Result<()> {
    let key = Key::of(&claim.meta);
    match controller_of(&claim.meta) {
        Some(controller) if controller.uid == uid(&sandbox.metadata) => Ok(()),
        None if may_adopt(
            &claim.meta,
            &names::hash(sandbox.metadata.name.as_deref().unwrap_or_default()),
        ) =>
        {
            let name = sandbox.metadata.name.as_deref().unwrap_or_default();
            let patch = json!({"metadata": {
                "uid": claim.meta.uid,
                "ownerReferences": [owner_reference(sandbox)],
                "labels": {NAME_HASH: names::hash(name)},
            }});
            ctx.patch_volume(&key, patch).await?;
            Ok(())
        }
        _ => Err(Error::NotOwned(format!(
            "persistent volume claim \"{}\" exists and is not owned by this sandbox",
            key.name
        ))),
    }
}

fn claim_key(sandbox: &Sandbox, template: &VolumeClaimTemplate) -> Key {
    let sandbox = Key::of(&sandbox.metadata);
    Key::new(
        sandbox.namespace,
        format!("{}-{}", template.name(), sandbox.name),
    )
}
