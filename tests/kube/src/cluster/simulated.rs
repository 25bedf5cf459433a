//! Nodes that are not there. KWOK plays their kubelets by `deploy/dev/kube/kwok/stages.yaml`: pods
//! become Ready, with an address, and go when they are deleted. It also makes the volume that a
//! claim asks for, on clusters with a real node too.

use super::READY_MAX;
use super::site::{Site, kubeconfig_path};
use crate::Error;
use crate::service::{self, Service};
use std::fmt::Write as _;

const STAGES: &str = include_str!("../../../../deploy/dev/kube/kwok/stages.yaml");

/// In [`STAGES`], stands for the directory of volumes.
const VOLUMES: &str = "VOLUMES_DIR";

/// The default class of volumes, and the runtimes that pods may ask for. The names are the same
/// with a real node and without, so that a manifest is good for both.
const CLASSES: &str = "apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: runc}
handler: runc
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: gvisor}
handler: runsc
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: standard
  annotations: {storageclass.kubernetes.io/is-default-class: \"true\"}
provisioner: k8e.test/volumes
reclaimPolicy: Delete
volumeBindingMode: Immediate
";

/// How many pods a simulated node takes: one node is enough for any of our tests.
const PODS_MAX: u32 = 20_000;

/// Starts KWOK, and waits until its nodes are Ready.
pub(super) fn start(site: &Site, nodes: u32, services: &mut Vec<Service>) -> Result<(), Error> {
    let volumes = site.dir.join("volumes").display().to_string();
    let config = site.write("kwok.yaml", &STAGES.replace(VOLUMES, &volumes))?;
    let mut command = site.command("kwok");
    command
        .arg("--kubeconfig")
        .arg(kubeconfig_path(&site.dir))
        .arg("--config")
        .arg(config)
        .arg("--manage-nodes-with-label-selector=type=kwok")
        .args(["--node-lease-duration-seconds", "40"])
        .args(["--node-ip", "127.0.0.1"])
        // Nobody can reach these; they only have to differ.
        .args(["--cidr", "10.128.0.0/12"]);
    services.push(Service::start("kwok", &site.dir, &mut command)?);
    site.apply("nodes.yaml", &manifest(nodes))?;
    if nodes == 0 {
        return Ok(());
    }
    service::wait_for("the simulated nodes", READY_MAX, || {
        services.iter_mut().try_for_each(Service::check)?;
        let mut command = site.kubectl();
        command.args(["wait", "node", "--selector=type=kwok"]);
        command.args(["--for=condition=Ready", "--timeout=5s"]);
        Ok(service::output(&mut command).map_err(|e| e.to_string()))
    })
    .map(drop)
}

fn manifest(nodes: u32) -> String {
    let mut text = CLASSES.to_owned();
    for number in 0..nodes {
        let name = format!("simulated-{number}");
        let _infallible = write!(
            text,
            "---
apiVersion: v1
kind: Node
metadata:
  name: {name}
  labels:
    type: kwok
    kubernetes.io/hostname: {name}
    kubernetes.io/os: linux
    kubernetes.io/arch: amd64
status:
  allocatable: {{cpu: 10k, memory: 100Ti, pods: {PODS_MAX}}}
  capacity: {{cpu: 10k, memory: 100Ti, pods: {PODS_MAX}}}
"
        );
    }
    text
}
