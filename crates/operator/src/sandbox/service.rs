//! The headless Service of a sandbox: made on request, deleted on request, otherwise left as it is.

use super::{ServiceState, owner};
use crate::cache::Key;
use crate::crd::Sandbox;
use crate::crd::names::{self, NAME_HASH};
use crate::error::{Error, Result};
use crate::held::{Child, controller_of, may_adopt, uid};
use crate::world::World;
use k8s_openapi::api::core::v1::{ContainerPort, PodSpec, Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{DeleteParams, ObjectMeta};
use serde_json::json;

/// What is known without asking.
pub(super) fn state(world: &World, sandbox: &Sandbox) -> ServiceState {
    match (owned(world, sandbox), sandbox.spec.service) {
        (Some(_), None | Some(true)) => ServiceState::Exists,
        (None, Some(true)) => ServiceState::Missing,
        (_, Some(false)) | (None, None) => ServiceState::NotWanted,
    }
}

/// Makes or deletes the Service.
pub(super) async fn ensure(world: &World, sandbox: &Sandbox) -> Result<ServiceState> {
    match (sandbox.spec.service, owned(world, sandbox)) {
        (Some(false), Some(service)) => delete(world, &service).await?,
        (Some(true), None) => make(world, sandbox).await?,
        (None, _) | (Some(false), None) | (Some(true), Some(_)) => {}
    }
    Ok(state(world, sandbox))
}

/// The Service of this very sandbox.
pub(super) fn owned(world: &World, sandbox: &Sandbox) -> Option<Child> {
    let service = world.held.services.get(&Key::of(&sandbox.metadata))?;
    let ours = controller_of(&service.meta).is_some_and(|o| o.uid == uid(&sandbox.metadata));
    (ours && service.meta.deletion_timestamp.is_none()).then(|| service.as_ref().clone())
}

/// Deletes a Service of ours.
pub(super) async fn delete(world: &World, service: &Child) -> Result<()> {
    world
        .delete::<Service>(&service.meta, DeleteParams::default())
        .await?;
    if let Some(change) = world.held.services.remove(&service.meta) {
        world.service_changed(&change);
    }
    Ok(())
}

async fn make(world: &World, sandbox: &Sandbox) -> Result<()> {
    match world.create_service(&desired(sandbox)).await {
        Err(error) if error.is_already_exists() => adopt(world, sandbox, error).await,
        other => other,
    }
}

async fn adopt(world: &World, sandbox: &Sandbox, taken: Error) -> Result<()> {
    let key = Key::of(&sandbox.metadata);
    let hash = names::hash(&key.name);
    let Some(found) = world.read::<Service>(&key).await? else {
        return Err(taken);
    };
    let found = Child::from(found);
    let ours = controller_of(&found.meta).is_some_and(|o| o.uid == uid(&sandbox.metadata));
    if !ours && !may_adopt(&found.meta, &hash) {
        return Err(Error::NotOwned(format!(
            "service \"{}\" exists and is not owned by this sandbox",
            key.name
        )));
    }
    let patch = json!({"metadata": {
        "uid": found.meta.uid,
        "ownerReferences": [owner(sandbox)],
        "labels": {NAME_HASH: hash},
    }});
    let adopted = world.patch::<Service>(&key, patch).await?;
    if let Some(change) = world.held.services.put(adopted.into()) {
        world.service_changed(&change);
    }
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
            owner_references: Some(vec![owner(sandbox)]),
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

/// The ports that the containers name, each port and protocol once.
fn ports(spec: &PodSpec) -> Vec<ServicePort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let containers = spec.containers.iter().chain(sidecars);
    let mut ports: Vec<ServicePort> = Vec::new();
    for port in containers.flat_map(|c| c.ports.iter().flatten()) {
        let mut port = service_port(port);
        if ports.iter().any(|p| p.name == port.name) {
            port.name = Some(plain_name(&port)); // two containers may use one name
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
