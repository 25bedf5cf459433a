//! What a cluster with a real node has outside of its directory: a bridge with two networks, and a
//! control group. Both have one name, which is claimed by making the bridge: the kernel gives it
//! to one of those who try.

use crate::service::{clean_command, output};
use crate::{Error, error, ports};
use std::path::{Path, PathBuf};

/// Pods are in `10.213.<number>.0/24`, services in `10.214.<number>.0/24`.
const PODS: &str = "10.213";
const SERVICES: &str = "10.214";

/// Tries before giving up: with this many, it is not chance.
const TRIES_MAX: usize = 100;

/// Where control groups are.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The networks and the control group of one cluster.
#[derive(Debug)]
pub(in super::super) struct Network {
    number: u8,
}

// === impl Network ===

impl Network {
    /// Claims a name and the networks that belong to it.
    pub(in super::super) fn make(dir: &Path) -> Result<Self, Error> {
        let taken = ip(&["-4", "-oneline", "address"])? + &ip(&["-4", "route", "show"])?;
        for _ in 0..TRIES_MAX {
            let network = Self {
                number: ports::random().to_le_bytes()[0],
            };
            let number = network.number;
            let used = [PODS, SERVICES].map(|net| taken.contains(&format!("{net}.{number}.")));
            let name = network.name();
            if used.contains(&true) || ip(&["link", "add", &name, "type", "bridge"]).is_err() {
                continue;
            }
            // What removes the cluster reads these.
            for file in ["links", "cgroup"] {
                let path = dir.join(file);
                std::fs::write(&path, format!("{name}\n")).map_err(error::file("write", &path))?;
            }
            let pods = format!("{}/24", network.gateway());
            let apiserver = format!("{}/32", network.apiserver_address());
            ip(&["address", "add", &pods, "dev", &name])?;
            ip(&["address", "add", &apiserver, "dev", &name])?;
            ip(&["link", "set", &name, "up"])?;
            return Ok(network);
        }
        Err(Error::NothingFree("network"))
    }

    /// The name of the bridge and of the control group.
    pub(super) fn name(&self) -> String {
        format!("k8ekube{}", self.number)
    }

    /// This machine, as pods see it.
    pub(super) fn gateway(&self) -> String {
        format!("{PODS}.{}.1", self.number)
    }

    /// The first address of the services' network, which is Kubernetes' own.
    pub(in super::super) fn apiserver_address(&self) -> String {
        format!("{SERVICES}.{}.1", self.number)
    }

    /// The network of services.
    pub(in super::super) fn services(&self) -> String {
        format!("{SERVICES}.{}.0/24", self.number)
    }

    /// How pods are attached. The bridge has its address already: were it the plugin's to set, it
    /// would also turn this machine into a router.
    pub(super) fn cni(&self, dir: &Path) -> String {
        let bridge = self.name();
        let subnet = format!("{PODS}.{}.0/24", self.number);
        let ipam = serde_json::json!({
            "type": "host-local",
            "dataDir": dir.join("addresses"),
            "ranges": [[{ "subnet": subnet, "gateway": self.gateway() }]],
            "routes": [{ "dst": "0.0.0.0/0" }],
        });
        serde_json::json!({
            "cniVersion": "0.4.0",
            "name": bridge,
            "plugins": [{ "type": "bridge", "bridge": bridge, "ipam": ipam }],
        })
        .to_string()
    }

    /// Makes the group that all pods are under, for every controller there is.
    pub(super) fn make_cgroup(&self) -> Result<(), Error> {
        let root = Path::new(CGROUPS);
        if root.join("cgroup.controllers").exists() {
            delegate(root);
            let group = make_group(root, &self.name())?;
            delegate(&group);
            return Ok(());
        }
        let entries = std::fs::read_dir(root).map_err(error::file("read", root))?;
        for entry in entries.flatten() {
            let hierarchy = entry.path();
            let is_real = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if !is_real || !hierarchy.join("cgroup.procs").exists() {
                continue;
            }
            let group = make_group(&hierarchy, &self.name())?;
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(value) = std::fs::read(hierarchy.join(file)) {
                    let path = group.join(file);
                    std::fs::write(&path, value).map_err(error::file("write", &path))?;
                }
            }
        }
        Ok(())
    }
}

fn make_group(parent: &Path, name: &str) -> Result<PathBuf, Error> {
    let group = parent.join(name);
    std::fs::create_dir_all(&group).map_err(error::file("make", &group))?;
    Ok(group)
}

/// Lets the groups below have every controller that this one has. One that cannot be given is
/// missed by the kubelet, with a better message than ours.
fn delegate(group: &Path) {
    let controllers = std::fs::read_to_string(group.join("cgroup.controllers"));
    for controller in controllers.unwrap_or_default().split_whitespace() {
        let _kubelet_says = std::fs::write(
            group.join("cgroup.subtree_control"),
            format!("+{controller}"),
        );
    }
}

fn ip(args: &[&str]) -> Result<String, Error> {
    let mut command = clean_command(Path::new("ip"), Path::new("/sbin"), Path::new("/"));
    output(command.args(args))
}
