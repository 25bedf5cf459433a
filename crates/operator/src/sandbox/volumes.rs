//! The volumes of a sandbox: made once, never changed or deleted here; they go with the Sandbox.

use super::owner;
use crate::cache::Key;
use crate::crd::names::{self, NAME_HASH};
use crate::crd::{Sandbox, VolumeClaimTemplate};
use crate::error::{Error, Result};
use crate::held::{Child, controller_of, may_adopt, uid};
use crate::world::World;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, PodSpec, Volume,
};
use kube::api::ObjectMeta;
use serde_json::json;

/// Makes the claims that are missing.
pub(super) async fn ensure(world: &World, sandbox: &Sandbox) -> Result<()> {
    for template in sandbox.spec.volume_claim_templates.iter().flatten() {
        let key = claim_key(sandbox, template);
        match world.held.volumes.get(&key) {
            Some(claim) => check(world, sandbox, &claim).await?,
            None => make(world, sandbox, template).await?,
        }
    }
    Ok(())
}

/// Puts the volumes into the pod; a volume of the same name in its spec gives way.
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

async fn make(world: &World, sandbox: &Sandbox, template: &VolumeClaimTemplate) -> Result<()> {
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
            owner_references: Some(vec![owner(sandbox)]),
            ..ObjectMeta::default()
        },
        spec: Some(template.spec.clone()),
        status: None,
    };
    match world.create_volume(&claim).await {
        Err(error) if error.is_already_exists() => {
            match world.read::<PersistentVolumeClaim>(&key).await? {
                Some(found) => check(world, sandbox, &found.into()).await,
                None => Err(error),
            }
        }
        other => other,
    }
}

/// A claim of that name is ours, or becomes ours if it may, or stands in the way.
async fn check(world: &World, sandbox: &Sandbox, claim: &Child) -> Result<()> {
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
                "ownerReferences": [owner(sandbox)],
                "labels": {NAME_HASH: names::hash(name)},
            }});
            let adopted = world.patch::<PersistentVolumeClaim>(&key, patch).await?;
            world.held.volumes.put(adopted.into());
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
