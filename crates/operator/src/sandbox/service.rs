//! The headless Service of a sandbox: `spec.service` true creates it, false deletes it, unset leaves it as it is.

use super::ServiceState;
use crate::cache::Key;
use crate::caches::Child;
use crate::context::Context;
use crate::crd::Sandbox;
use crate::crd::names::{self, NAME_HASH};
use crate::error::{Error, Result};
use crate::object_meta::{is_controlled_by, may_adopt, owner_reference};
use k8s_openapi::api::core::v1::{ContainerPort, PodSpec, Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{DeleteParams, ObjectMeta};
use serde_json::json;

/// The state of the Service according to the cache.
pub(super) fn state(ctx: &Context, sandbox: &Sandbox) -> ServiceState {
    match (owned(ctx, sandbox), sandbox.spec.service) {
        (Some(_), None | Some(true)) => ServiceState::Exists,
        (None, Some(true)) => ServiceState::Missing,
        (_, Some(false)) | (None, None) => ServiceState::NotWanted,
    }
}

/// Creates or deletes the Service.
pub(super) async fn ensure(ctx: &Context, sandbox: &Sandbox) -> Result<ServiceState> {
    match (sandbox.spec.service, owned(ctx, sandbox)) {
        (Some(false), Some(service)) => delete(ctx, &service).await?,
        (Some(true), None) => make(ctx, sandbox).await?,
        (None, _) | (Some(false), None) | (Some(true), Some(_)) => {}
    }
    Ok(state(ctx, sandbox))
}

/// The cached Service that this sandbox controls.
pub(super) fn owned(ctx: &Context, sandbox: &Sandbox) -> Option<Child> {
    let service = ctx.caches.services.get(&Key::of(&sandbox.metadata))?;
    let ours = is_controlled_by(&service.meta, &sandbox.metadata);
    (ours && service.meta.deletion_timestamp.is_none()).then(|| service.as_ref().clone())
}

/// Deletes the Service and removes it from the cache.
pub(super) async fn delete(ctx: &Context, service: &Child) -> Result<()> {
    ctx.delete::<Service>(&service.meta, DeleteParams::default())
        .await?;
    if let Some(change) = ctx.caches.services.remove(&service.meta) {
        ctx.service_changed(&change);
    }
    Ok(())
}

async fn make(ctx: &Context, sandbox: &Sandbox) -> Result<()> {
    match ctx.create_service(&desired(sandbox)).await {
        Err(error) if error.is_already_exists() => adopt(ctx, sandbox, error).await,
        other => other.map(drop),
    }
}

async fn adopt(ctx: &Context, sandbox: &Sandbox, taken: Error) -> Result<()> {
    let key = Key::of(&sandbox.metadata);
    let hash = names::hash(&key.name);
    let Some(found) = ctx.read::<Service>(&key).await? else {
        return Err(taken);
    };
    let found = Child::from(found);
    let ours = is_controlled_by(&found.meta, &sandbox.metadata);
    if !ours && !may_adopt(&found.meta, &hash) {
        return Err(Error::NotOwned(format!(
            "service \"{}\" exists and is not owned by this sandbox",
            key.name
        )));
    }
    let patch = json!({"metadata": {
        "uid": found.meta.uid,
        "ownerReferences": [owner_reference(sandbox)],
        "labels": {NAME_HASH: hash},
    }});
    ctx.patch_service(&key, patch).await?;
    Ok(())
}

fn desired(sandbox: &Sandbox) -> Service {
    let key = Key::of(&sandbox.metadata);
    let label = [(NAME_HASH.to_owned(), names::hash(&key.name))];
    let ports = ports(&sandbox.spec.pod_template.spec);
    Service {
        metadata: ObjectMeta {
            name: Some(key.name),
            namespace: Some(key.namespace),
            labels: Some(label.clone().into()),
            owner_references: Some(vec![owner_reference(sandbox)]),
            ..ObjectMeta::default()
        },
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".to_owned()),
            selector: Some(label.into()),
            ports: (!ports.is_empty()).then_some(ports),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// The ports of the containers, each port and protocol once.
fn ports(spec: &PodSpec) -> Vec<ServicePort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let containers = spec.containers.iter().chain(sidecars);
    let mut ports: Vec<ServicePort> = Vec::new();
    for port in containers.flat_map(|c| c.ports.iter().flatten()) {
        let mut port = service_port(port);
        if ports.iter().any(|p| p.name == port.name) {
            port.name = Some(plain_name(&port)); // two containers may use the same name
        }
        let known = |p: &ServicePort| p.port == port.port && p.protocol == port.protocol;
        if !ports.iter().any(known) {
            ports.push(port);
        }
    }
    ports
}

fn service_port(port: &ContainerPort) -> ServicePort {
    let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
    let mut service = ServicePort {
        name: port.name.clone().filter(|name| !name.is_empty()),
        port: port.container_port,
        target_port: Some(IntOrString::Int(port.container_port)),
        protocol: Some(protocol),
        ..ServicePort::default()
    };
    if service.name.is_none() {
        service.name = Some(plain_name(&service));
    }
    service
}

fn plain_name(port: &ServicePort) -> String {
    let protocol = port.protocol.as_deref().unwrap_or("TCP");
    format!("p-{}-{}", port.port, protocol.to_lowercase())
}
