//! The pod of a sandbox: created in mode Running, deleted in mode Suspended. Only its labels and annotations are
//! updated.

use super::{Pods, metadata, volumes};
use crate::cache::Key;
use crate::caches::PodView;
use crate::context::Context;
use crate::crd::names;
use crate::crd::{OperatingMode, Sandbox};
use crate::error::{Error, Result};
use crate::events::Event;
use crate::object_meta::{annotation, is_controlled_by, may_adopt, owner_reference, uid};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ObjectMeta};
use serde_json::{Value, json};
use std::sync::Arc;

/// Finds the pod, and creates, updates or deletes it. `pods` is set even if this fails.
pub(super) async fn ensure(ctx: &Context, sandbox: &Sandbox, pods: &mut Pods) -> Result<()> {
    *pods = owned(ctx, sandbox);
    match (sandbox.operating_mode(), &*pods) {
        (_, Pods::Many(_)) => Ok(()),
        (OperatingMode::Suspended, Pods::One(pod)) => delete(ctx, pod).await,
        (OperatingMode::Suspended, _) => {
            *pods = Pods::Unknown;
            *pods = delete_unwatched(ctx, sandbox).await?;
            Ok(())
        }
        (OperatingMode::Running, Pods::One(pod)) => {
            *pods = Pods::One(mark(ctx, sandbox, pod, json!({})).await?);
            Ok(())
        }
        (OperatingMode::Running, _) => {
            *pods = Pods::Missing;
            *pods = create(ctx, sandbox).await?;
            Ok(())
        }
    }
}

/// The cached pods that this sandbox controls, by UID.
pub(super) fn owned(ctx: &Context, sandbox: &Sandbox) -> Pods {
    let mut pods = ctx.pods_of(uid(&sandbox.metadata));
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

/// Deletes a pod, unless that was already requested.
pub(super) async fn delete(ctx: &Context, pod: &PodView) -> Result<()> {
    if pod.meta.deletion_timestamp.is_some() {
        return Ok(());
    }
    ctx.delete::<Pod>(&pod.meta, DeleteParams::default()).await
}

/// A pod without our label is not in the cache: reads the pod with the sandbox's name, and deletes it if it is ours.
async fn delete_unwatched(ctx: &Context, sandbox: &Sandbox) -> Result<Pods> {
    let Some(pod) = ctx.read_pod(&pod_key(sandbox)).await? else {
        return Ok(Pods::Missing);
    };
    if !is_ours(&pod, sandbox) {
        return Ok(Pods::Foreign);
    }
    delete(ctx, &pod).await?;
    Ok(Pods::One(Arc::new(pod)))
}

async fn create(ctx: &Context, sandbox: &Sandbox) -> Result<Pods> {
    let key = Key::of(&sandbox.metadata);
    match ctx.create_pod(&desired(ctx, sandbox)).await {
        Ok(pod) => {
            ctx.pod_create_failing.changed(&key, false);
            let text = format!("Created Pod \"{}\"", key.name);
            ctx.record_event(
                sandbox,
                Event::normal("SandboxPodCreated", "Creating", text),
            );
            Ok(Pods::One(pod))
        }
        Err(error) if error.is_already_exists() => adopt_existing(ctx, sandbox, error).await,
        Err(error) => {
            // One event for all retries: a quota may last for days.
            if error.is_reportable() && ctx.pod_create_failing.changed(&key, true) {
                let event = Event::warning("SandboxPodCreateFailed", "Creating", error.to_string());
                ctx.record_event(sandbox, event);
            }
            Err(error)
        }
    }
}

/// A pod with the sandbox's name exists: ours but not in the cache, or adoptable, or of another owner.
async fn adopt_existing(ctx: &Context, sandbox: &Sandbox, taken: Error) -> Result<Pods> {
    let key = pod_key(sandbox);
    let Some(pod) = ctx.read_pod(&key).await? else {
        return Err(taken); // deleted meanwhile: the next reconcile creates one
    };
    let pod = Arc::new(pod);
    if is_ours(&pod, sandbox) {
        let marked = mark(ctx, sandbox, &pod, json!({})).await?;
        return Ok(Pods::One(ctx.cache_pod(marked)));
    }
    if !may_adopt(&pod.meta, &names::hash(&key.name)) {
        return Err(Error::NotOwned(format!(
            "pod \"{}\" exists and is not owned by this sandbox",
            key.name
        )));
    }
    let adopt =
        json!({"metadata": {"ownerReferences": [owner_reference(sandbox)], "uid": pod.meta.uid}});
    Ok(Pods::One(mark(ctx, sandbox, &pod, adopt).await?))
}

/// Patches labels and annotations of the pod that differ, together with `more`. Returns the pod as it is then.
async fn mark(
    ctx: &Context,
    sandbox: &Sandbox,
    pod: &Arc<PodView>,
    more: Value,
) -> Result<Arc<PodView>> {
    let marks = metadata::marks(sandbox, ctx.options.enable_warm_pool_eviction);
    let mut patch = more;
    if let Some(marks) = metadata::patch(pod, &marks) {
        merge(&mut patch, marks);
    }
    if patch == json!({}) {
        return Ok(Arc::clone(pod));
    }
    ctx.patch_pod(&Key::of(&pod.meta), patch).await
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

fn desired(ctx: &Context, sandbox: &Sandbox) -> Pod {
    let marks = metadata::marks(sandbox, ctx.options.enable_warm_pool_eviction);
    let mut spec = sandbox.spec.pod_template.spec.clone();
    volumes::mount(sandbox, &mut spec);
    Pod {
        metadata: ObjectMeta {
            name: sandbox.metadata.name.clone(),
            namespace: sandbox.metadata.namespace.clone(),
            labels: Some(marks.labels),
            annotations: (!marks.annotations.is_empty()).then_some(marks.annotations),
            owner_references: Some(vec![owner_reference(sandbox)]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

fn is_ours(pod: &PodView, sandbox: &Sandbox) -> bool {
    is_controlled_by(&pod.meta, &sandbox.metadata)
}

/// Key of the pod; an annotation of an older controller may give another name than the sandbox's.
fn pod_key(sandbox: &Sandbox) -> Key {
    let key = Key::of(&sandbox.metadata);
    match annotation(&sandbox.metadata, names::POD_NAME) {
        Some(name) if !name.is_empty() => Key::new(key.namespace, name),
        _ => key,
    }
}
