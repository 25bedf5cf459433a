//! What the drivers of this machine are made of: one launcher, the `host` template, disk images,
//! uid ranges and control groups. [`Machine`] is started once and shared by all of them.
//!
//! ```text
//! <data directory>/
//!   stage/                   empty; where launches build, each in a mount namespace of its own
//!   templates/host/          the `host` template's own part
//!   templates/disks/         scratch of mkfs
//!   <driver>/sandboxes/<id>/ disk.img  record.json  and the guest's socket
//! ```
//!
//! A sandbox's directory is made first and removed last, so whatever else of it exists, its name is there.

pub(crate) mod caps;
pub(crate) mod cgroup;
pub(crate) mod disk;
pub(crate) mod launcher;
pub(crate) mod record;
pub(crate) mod rootfs;
pub(crate) mod sandbox;
pub(crate) mod sandboxes;
pub(crate) mod shm;
pub(crate) mod skeleton;
pub(crate) mod sys;
pub(crate) mod uids;
pub(crate) mod userns;

pub use cgroup::io::DiskRate;
pub use launcher::{LAUNCHER_ARG, launcher_main};

use crate::{DriverError, SandboxSpec};
use disk::Disks;
use k8e_model::{Code, Limits, Template};
use launcher::Launcher;
use rootfs::{Disk, Rootfs};
use skeleton::Layer;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uids::Uids;

/// What `hostname` says; `/etc/hosts` knows it too.
pub(crate) const HOSTNAME: &str = "sandbox";

/// Open files of one process: enough for any server; far from what exhausts the kernel.
pub(crate) const OPEN_FILES_MAX: u64 = 65_536;

/// What the drivers need to start.
#[derive(Debug)]
pub struct Config {
    /// Everything the drivers keep goes below.
    pub data_dir: PathBuf,
    /// The guest's program: a static executable.
    pub guest: Vec<u8>,
    /// The program that becomes the launcher when its first argument is [`LAUNCHER_ARG`].
    pub launcher: PathBuf,
    /// The data directory's lock, held together with the launcher.
    pub lock: OwnedFd,
    /// Keep what sandboxes write in memory, also where there are loop devices.
    pub memory_disks: bool,
    /// What one sandbox may do on disks.
    pub disk_rate: DiskRate,
}

/// This machine, as the drivers use it. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Machine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    launcher: Launcher,
    disks: Disks,
    uids: Uids,
    layers: Vec<Layer>,
    idmap: bool,
    no_network: Option<String>,
    /// Why what sandboxes write is kept in memory, if it is.
    memory_disks: Option<String>,
    disk_rate: DiskRate,
}

// === impl Machine ===

impl Machine {
    /// Starts the launcher and prepares the template. Blocks; call it before there are other threads or off them.
    pub fn start(config: Config) -> Result<Self, DriverError> {
        if !rustix::process::geteuid().is_root() {
            return Err(DriverError::Unusable(
                "sandboxes need root: run k8e server as root".to_owned(),
            ));
        }
        let dir = config.data_dir;
        make_private_dir(&dir.join("stage"))?;
        make_private_dir(&dir.join("templates"))?;
        let dir = dir
            .canonicalize()
            .map_err(DriverError::step("find", dir.display().to_string()))?;
        let layers = skeleton::layers();
        if let Some(layer) = layers.iter().find(|layer| dir.starts_with(&layer.host)) {
            return Err(DriverError::Unusable(format!(
                "the data directory is below {}, which every sandbox can read: choose another --data-dir",
                layer.host.display()
            )));
        }
        let guest = guest_program(&config.guest).map_err(DriverError::step("load", "the guest"))?;
        let (launcher, ready) = Launcher::start(&config.launcher, guest, config.lock)?;
        let disks = Disks::open(dir.join("templates/disks"))?;
        let memory_disks = if config.memory_disks {
            Some("--memory-disks is set".to_owned())
        } else {
            match disks.try_loop_device() {
                // A full disk says nothing about loop devices.
                Ok(()) => None,
                Err(error) if error.code() == Code::Exhausted => None,
                Err(error) => Some(format!("no loop device can be used ({error})")),
            }
        };
        let machine = Self(Arc::new(Inner {
            disks,
            uids: Uids::default(),
            layers,
            idmap: ready.idmap,
            no_network: ready.no_network,
            memory_disks,
            disk_rate: config.disk_rate,
            dir,
            launcher,
        }));
        // Live sandboxes of an earlier server stand on the skeleton: it may change only when there are none.
        if !machine.skeleton().exists() || !sandboxes::any_alive(&machine.0.dir) {
            skeleton::build(&machine.skeleton())?;
        }
        Ok(machine)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.0.dir
    }

    pub(crate) fn launcher(&self) -> &Launcher {
        &self.0.launcher
    }

    pub(crate) fn uids(&self) -> &Uids {
        &self.0.uids
    }

    /// What one sandbox may do on disks.
    pub(crate) fn disk_rate(&self) -> DiskRate {
        self.0.disk_rate
    }

    /// Whether sandboxes can be wired to a gate.
    pub(crate) fn has_network(&self) -> bool {
        self.0.no_network.is_none()
    }

    /// What sandboxes of any driver lack on this machine, one sentence each.
    pub(crate) fn weaker(&self) -> Vec<String> {
        let mut weaker = Vec::new();
        if !self.0.idmap {
            weaker.push(
                "the host's /usr cannot be shown with other owners (idmapped mounts): programs cannot be changed or installed over inside; use ext4, xfs or btrfs for it".to_owned(),
            );
        }
        if let Some(why) = &self.0.memory_disks {
            weaker.push(format!("what sandboxes write is kept in memory and counts against their memory limit: {why}"));
        }
        if let Some(why) = &self.0.no_network {
            weaker.push(format!(
                "sandboxes can reach nothing, whatever is allowed ({why}): the kernel must have veth and nftables with tproxy; try `modprobe -a veth nf_tables nft_tproxy` and start the server again"
            ));
        }
        weaker
    }

    /// The writable layer of a sandbox whose directory is `dir`.
    pub(crate) fn disk(&self, dir: &Path, bytes: u64) -> Result<Disk, DriverError> {
        if self.0.memory_disks.is_some() {
            return Ok(Disk::Memory(bytes));
        }
        let image = dir.join("disk.img");
        self.0.disks.create(&image, bytes)?;
        Ok(Disk::Image(image))
    }

    pub(crate) fn rootfs(&self, spec: &SandboxSpec, disk: Disk, uid_base: u32) -> Rootfs {
        match spec.template {
            Template::Host => Rootfs {
                stage: self.0.dir.join("stage"),
                skeleton: self.skeleton(),
                layers: self.0.layers.clone(),
                disk,
                // Half: what is kept in it cannot be freed by ending processes.
                shm_bytes: shm_bytes(&spec.limits),
                uid_base,
                idmap: self.0.idmap,
            },
        }
    }

    fn skeleton(&self) -> PathBuf {
        self.0.dir.join("templates/host")
    }
}

/// Of `/dev/shm`: half of the memory, because what is kept there cannot be freed by ending processes.
pub(crate) fn shm_bytes(limits: &Limits) -> u64 {
    limits.memory_bytes / 2
}

/// A directory for nobody but us.
pub(crate) fn make_private_dir(path: &Path) -> Result<(), DriverError> {
    fs::create_dir_all(path).map_err(DriverError::step("make", path.display().to_string()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
        .map_err(DriverError::step("protect", path.display().to_string()))
}

/// Runs what blocks off the runtime's own threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
) -> Result<T, DriverError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(DriverError::step("finish", "a blocking step")(
            io::Error::other(error),
        )),
    }
}

/// The guest in memory that can be executed but not read: what executes it cannot be traced or
/// dumped by root inside, because the kernel takes an unreadable program as the host's own.
fn guest_program(bytes: &[u8]) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, Mode, SealFlags};
    use std::io::Write as _;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know the flag and need none.
    let exec = rustix::fs::memfd_create("k8e-guest", flags | MemfdFlags::EXEC);
    let fd = exec.or_else(|_| rustix::fs::memfd_create("k8e-guest", flags))?;
    let mut file = fs::File::from(fd);
    file.write_all(bytes)?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(0o711))?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    // Executing needs a descriptor that is not open for writing.
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(fs::File::open(path)?.into())
}
