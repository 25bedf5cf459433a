//! Features and shared files of this machine, detected by the launcher: the `host` template, disk images, idmapped
//! mounts, loop devices, network.

use super::cgroup::io::DiskRate;
use super::disk::{self, Disks};
use super::launcher::request::Start;
use super::layers::Layers;
use super::rootfs::{self, Disk, ImageRoot, Rootfs, SKELETON};
use super::skeleton::{self, Layer};
use super::userns::user_namespace;
use super::{make_private_dir, sandboxes, shm_bytes};
use crate::{DriverError, SandboxSpec};
use k8e_model::{Code, Template};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

/// A uid that no sandbox has, for the probe of idmapped mounts.
const TRIAL_UID: u32 = 1 << 30;

/// This machine, as the launcher uses it.
#[derive(Debug)]
pub(crate) struct Host {
    dir: PathBuf,
    disks: Disks,
    layers: Vec<Layer>,
    image_layers: Layers,
    idmap: bool,
    no_network: Option<String>,
    /// Why the writable layer is in memory (tmpfs), if it is.
    memory_disks: Option<String>,
    disk_rate: DiskRate,
    /// The runsc that was chosen, instead of one that is found.
    runsc: Option<PathBuf>,
}

// === impl Host ===

impl Host {
    /// Probes the machine's features and prepares the template.
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
        let overlays = layers.iter().map(|layer| layer.name.clone());
        let overlays = overlays.chain([SKELETON.to_owned()]).collect();
        let disks = Disks::open(dir.join("templates/disks"), overlays)?;
        let memory_disks = if start.memory_disks {
            Some("--memory-disks is set".to_owned())
        } else {
            match disks.try_loop_device() {
                // A full disk is no evidence about loop devices.
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
        let image_layers = Layers::open(dir.join("layers"), dir.join("stage"), userns.as_fd())?;
        let no_network = k8e_egress::tproxy::check().err();
        let host = Self {
            disks,
            layers,
            image_layers,
            idmap,
            no_network: no_network.map(|error| error.to_string()),
            memory_disks,
            disk_rate: start.disk_rate,
            runsc: start.runsc.clone(),
            dir,
        };
        // Live sandboxes of an earlier server stand on the skeleton: it may change only when there are none.
        if !host.skeleton().exists() || !host.front().exists() || !sandboxes::any_alive(&host.dir) {
            skeleton::build(&host.skeleton())?;
            skeleton::build_front(&host.front())?;
        }
        Ok(host)
    }

    /// Disk I/O limits of one sandbox.
    pub(crate) fn disk_rate(&self) -> DiskRate {
        self.disk_rate
    }

    /// The runsc that was chosen, if any.
    pub(crate) fn runsc(&self) -> Option<&Path> {
        self.runsc.as_deref()
    }

    /// Whether sandboxes can have a network with an egress gate.
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
        let image = dir.join(disk::FILE);
        // Of a sandbox that is restored.
        if image.exists() {
            return Ok(Disk::Image(image));
        }
        if self.memory_disks.is_some() {
            return Ok(Disk::Memory(bytes));
        }
        self.disks.create(&image, bytes)?;
        Ok(Disk::Image(image))
    }

    pub(crate) fn rootfs(
        &self,
        spec: &SandboxSpec,
        disk: Disk,
        uid_base: u32,
        disk_uid_base: u32,
    ) -> Result<Rootfs, DriverError> {
        let image = match spec.template {
            Template::Host => None,
            Template::Image { .. } => Some(ImageRoot {
                front: self.front(),
                layers: self.image_layers.paths(&spec.layers)?,
            }),
        };
        Ok(Rootfs {
            stage: self.dir.join("stage"),
            skeleton: self.skeleton(),
            layers: self.layers.clone(),
            image,
            disk,
            // Half: what is kept in it cannot be freed by ending processes.
            shm_bytes: shm_bytes(&spec.limits),
            uid_base,
            disk_uid_base,
            idmap: self.idmap,
        })
    }

    /// Whether a disk can be shown with other owners, for the copy of a sandbox; otherwise why not.
    pub(crate) fn check_can_copy(&self) -> Result<(), DriverError> {
        match rootfs::overlay_takes_idmapped_layers() {
            true => Ok(()),
            false => Err(DriverError::Unusable(
                "a copy of a running sandbox needs Linux 5.19 or newer".to_owned(),
            )),
        }
    }

    /// Layers of images.
    pub(crate) fn image_layers(&self) -> &Layers {
        &self.image_layers
    }

    fn front(&self) -> PathBuf {
        self.dir.join("templates/front")
    }

    fn skeleton(&self) -> PathBuf {
        self.dir.join("templates/host")
    }
}
