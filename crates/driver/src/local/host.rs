//! What all drivers of this machine need as root: the `host` template, disk images, and which of the
//! kernel's features are there. Lives in the launcher.

use super::cgroup::io::DiskRate;
use super::disk::Disks;
use super::launcher::request::Start;
use super::rootfs::{self, Disk, Rootfs};
use super::skeleton::{self, Layer};
use super::userns::user_namespace;
use super::{make_private_dir, sandboxes, shm_bytes};
use crate::{DriverError, SandboxSpec};
use k8e_model::{Code, Template};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

/// A user number that no sandbox has, to try out idmapped mounts with.
const TRIAL_UID: u32 = 1 << 30;

/// This machine, as the launcher uses it.
#[derive(Debug)]
pub(crate) struct Host {
    dir: PathBuf,
    disks: Disks,
    layers: Vec<Layer>,
    idmap: bool,
    no_network: Option<String>,
    /// Why what sandboxes write is kept in memory, if it is.
    memory_disks: Option<String>,
    disk_rate: DiskRate,
}

// === impl Host ===

impl Host {
    /// Finds out what the machine can do and prepares the template.
    pub(crate) fn start(start: &Start) -> Result<Self, DriverError> {
        let dir = start.data_dir.clone();
        make_private_dir(&dir.join("stage"))?;
        make_private_dir(&dir.join("templates"))?;
        let layers = skeleton::layers();
        if let Some(layer) = layers.iter().find(|layer| dir.starts_with(&layer.host)) {
            return Err(DriverError::Unusable(format!(
                "the data directory is below {}, which every sandbox can read: choose another --data-dir",
                layer.host.display()
            )));
        }
        let disks = Disks::open(dir.join("templates/disks"))?;
        let memory_disks = if start.memory_disks {
            Some("--memory-disks is set".to_owned())
        } else {
            match disks.try_loop_device() {
                // A full disk says nothing about loop devices.
                Ok(()) => None,
                Err(error) if error.code() == Code::Exhausted => None,
                Err(error) => Some(format!("no loop device can be used ({error})")),
            }
        };
        let userns = user_namespace(TRIAL_UID)?;
        let idmap = rootfs::overlay_takes_idmapped_layers()
            && layers
                .iter()
                .all(|layer| rootfs::can_idmap(userns.as_fd(), &layer.host));
        let no_network = k8e_egress::wire::check().err();
        let host = Self {
            disks,
            layers,
            idmap,
            no_network: no_network.map(|error| error.to_string()),
            memory_disks,
            disk_rate: start.disk_rate,
            dir,
        };
        // Live sandboxes of an earlier server stand on the skeleton: it may change only when there are none.
        if !host.skeleton().exists() || !sandboxes::any_alive(&host.dir) {
            skeleton::build(&host.skeleton())?;
        }
        Ok(host)
    }

    /// What one sandbox may do on disks.
    pub(crate) fn disk_rate(&self) -> DiskRate {
        self.disk_rate
    }

    /// Whether sandboxes can be wired to a gate.
    pub(crate) fn has_network(&self) -> bool {
        self.no_network.is_none()
    }

    /// What sandboxes of any driver lack on this machine, one sentence each.
    pub(crate) fn weaker(&self) -> Vec<String> {
        let mut weaker = Vec::new();
        if !self.idmap {
            weaker.push(
                "the host's /usr cannot be shown with other owners (idmapped mounts): programs cannot be changed or installed over inside; use ext4, xfs or btrfs for it".to_owned(),
            );
        }
        if let Some(why) = &self.memory_disks {
            weaker.push(format!("what sandboxes write is kept in memory and counts against their memory limit: {why}"));
        }
        if let Some(why) = &self.no_network {
            weaker.push(format!(
                "sandboxes can reach nothing, whatever is allowed ({why}): the kernel must have veth and nftables with tproxy; try `modprobe -a veth nf_tables nft_tproxy` and start the server again"
            ));
        }
        weaker
    }

    /// The writable layer of a sandbox whose directory is `dir`.
    pub(crate) fn disk(&self, dir: &Path, bytes: u64) -> Result<Disk, DriverError> {
        if self.memory_disks.is_some() {
            return Ok(Disk::Memory(bytes));
        }
        let image = dir.join("disk.img");
        self.disks.create(&image, bytes)?;
        Ok(Disk::Image(image))
    }

    pub(crate) fn rootfs(&self, spec: &SandboxSpec, disk: Disk, uid_base: u32) -> Rootfs {
        match spec.template {
            Template::Host => Rootfs {
                stage: self.dir.join("stage"),
                skeleton: self.skeleton(),
                layers: self.layers.clone(),
                disk,
                // Half: what is kept in it cannot be freed by ending processes.
                shm_bytes: shm_bytes(&spec.limits),
                uid_base,
                idmap: self.idmap,
            },
        }
    }

    fn skeleton(&self) -> PathBuf {
        self.dir.join("templates/host")
    }
}
