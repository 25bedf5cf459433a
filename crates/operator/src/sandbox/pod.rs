//! The pod of a sandbox: made when it runs, deleted when it is suspended, never changed but for its labels.

use super::{Pods, metadata, owner, volumes};
use crate::cache::Key;
use crate::crd::names;
use crate::crd::{OperatingMode, Sandbox};
use crate::error::{Error, Result};
use crate::events::Note;
use crate::held::{PodView, annotation, controller_of, may_adopt, uid};
use crate::world::World;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ObjectMeta};
use serde_json::{Value, json};
use std::sync::Arc;

/// Finds the pod, and makes, marks or deletes it. `pods` tells what was found even where this fails.
pub(super) async fn ensure(world: &World, sandbox: &Sandbox, pods: &mut Pods) -> Result<()> {
    *pods = owned(world, sandbox);
    match (sandbox.operating_mode(), &*pods) {
        (_, Pods::Many(_)) => Ok(()),
        (OperatingMode::Suspended, Pods::One(pod)) => delete(world, pod).await,
        (OperatingMode::Suspended, _) => {
            *pods = Pods::Unknown;
            *pods = standing_in_the_way(world, sandbox).await?;
            Ok(())
        }
        (OperatingMode::Running, Pods::One(pod)) => mark(world, sandbox, pod, json!({})).await,
        (OperatingMode::Running, _) => {
            *pods = Pods::Missing;
            *pods = create(world, sandbox).await?;
            Ok(())
        }
    }
}

/// The pods that say they belong to this very sandbox.
pub(super) fn owned(world: &World, sandbox: &Sandbox) -> Pods {
    let mut pods = world.pods_of(uid(&sandbox.metadata));
    match pods.len() {
        0 => Pods::Missing,
        1 => Pods::One(pods.remove(0)),
        _ => {
            let mut names: Vec<_> = pods.iter().filter_map(|p| p.meta.name.clone()).collect();
            names.sort();
            Pods::Many(names)
        }
    }
}

/// Deletes a pod, once.
pub(super) async fn delete(world: &World, pod: &PodView) -> Result<()> {
    if pod.meta.deletion_timestamp.is_some() {
        return Ok(());
    }
    world
        .delete::<Pod>(&pod.meta, DeleteParams::default())
        .await
}

/// A pod without our label is not in the table: whether one has the sandbox's name is asked.
async fn standing_in_the_way(world: &World, sandbox: &Sandbox) -> Result<Pods> {
    let Some(pod) = world.read_pod(&pod_key(sandbox)).await? else {
        return Ok(Pods::Missing);
    };
    if !is_ours(&pod, sandbox) {
        return Ok(Pods::Foreign);
    }
    delete(world, &pod).await?;
    Ok(Pods::One(Arc::new(pod)))
}

async fn create(world: &World, sandbox: &Sandbox) -> Result<Pods> {
    let key = Key::of(&sandbox.metadata);
    match world.create_pod(&desired(world, sandbox)).await {
        Ok(pod) => {
            world.failing.changed(&key, false);
            let text = format!("Created Pod \"{}\"", key.name);
            world.note(sandbox, Note::normal("SandboxPodCreated", "Creating", text));
            Ok(Pods::One(Arc::new(pod)))
        }
        Err(error) if error.is_already_exists() => take_over(world, sandbox, error).await,
        Err(error) => {
            // Once, however often it is tried: a quota may last for days.
            if error.is_worth_telling() && world.failing.changed(&key, true) {
                let note = Note::warning("SandboxPodCreateFailed", "Creating", error.to_string());
                world.note(sandbox, note);
            }
            Err(error)
        }
    }
}

/// The name is taken: by our own pod that we did not know of, by one that may be adopted, or by somebody else's.
async fn take_over(world: &World, sandbox: &Sandbox, taken: Error) -> Result<Pods> {
    let key = pod_key(sandbox);
    let Some(pod) = world.read_pod(&key).await? else {
        return Err(taken); // gone meanwhile: the next pass makes one
    };
    if is_ours(&pod, sandbox) {
        mark(world, sandbox, &pod, json!({})).await?;
        world.hold_pod(pod.clone());
        return Ok(Pods::One(Arc::new(pod)));
    }
    if !may_adopt(&pod.meta, &names::hash(&key.name)) {
        return Err(Error::NotOwned(format!(
            "pod \"{}\" exists and is not owned by this sandbox",
            key.name
        )));
    }
    let adopt = json!({"metadata": {"ownerReferences": [owner(sandbox)], "uid": pod.meta.uid}});
    mark(world, sandbox, &pod, adopt).await?;
    let adopted = world.held.pods.get(&key);
    Ok(adopted.map_or(Pods::Missing, Pods::One))
}

/// Brings labels and annotations of the pod up to date, with what else is to be patched.
async fn mark(world: &World, sandbox: &Sandbox, pod: &PodView, more: Value) -> Result<()> {
    let marks = metadata::marks(sandbox, world.options.enable_warm_pool_eviction);
    let mut patch = more;
    if let Some(marks) = metadata::patch(pod, &marks) {
        merge(&mut patch, marks);
    }
    if patch == json!({}) {
        return Ok(());
    }
    world.patch_pod(&Key::of(&pod.meta), patch).await
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

fn desired(world: &World, sandbox: &Sandbox) -> Pod {
    let marks = metadata::marks(sandbox, world.options.enable_warm_pool_eviction);
    let mut spec = sandbox.spec.pod_template.spec.clone();
    volumes::mount(sandbox, &mut spec);
    Pod {
        metadata: ObjectMeta {
            name: sandbox.metadata.name.clone(),
            namespace: sandbox.metadata.namespace.clone(),
            labels: Some(marks.labels),
            annotations: (!marks.annotations.is_empty()).then_some(marks.annotations),
            owner_references: Some(vec![owner(sandbox)]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

fn is_ours(pod: &PodView, sandbox: &Sandbox) -> bool {
    controller_of(&pod.meta).is_some_and(|owner| owner.uid == uid(&sandbox.metadata))
}

/// An older controller may have noted another name.
fn pod_key(sandbox: &Sandbox) -> Key {
    let key = Key::of(&sandbox.metadata);
    match annotation(&sandbox.metadata, names::POD_NAME) {
        Some(name) if !name.is_empty() => Key::new(key.namespace, name),
        _ => key,
    }
}
