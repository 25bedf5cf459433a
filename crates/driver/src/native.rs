//! The native driver: Linux namespaces, a user namespace, seccomp, Landlock and control groups.
//!
//! ```text
//! <data directory>/native/
//!   stage/               empty; where launches build, each in a mount namespace of its own
//!   templates/host/      the `host` template's own part
//!   templates/disks/     scratch of mkfs
//!   sandboxes/<id>/      disk.img  guest.sock  record.json
//! ```
//!
//! A sandbox's directory is made first and removed last, so whatever else of it exists, its name is there.

mod caps;
mod cgroup;
mod child;
mod confine;
mod disk;
mod launcher;
mod record;
mod rootfs;
mod sandbox;
mod seccomp;
mod skeleton;
mod sys;
mod uids;

pub use launcher::{LAUNCHER_ARG, launcher_main};

use crate::{Driver, DriverError, Probe, Sandbox, SandboxSpec};
use async_trait::async_trait;
use cgroup::Cgroups;
use child::Setup;
use disk::Disks;
use k8e_model::{Code, Limits, RuntimeKind, SandboxId, Template};
use launcher::{Forked, Launcher};
use record::Record;
use rootfs::{Disk, Rootfs};
use sandbox::NativeSandbox;
use skeleton::Layer;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uids::Uids;

/// What the driver needs to start.
#[derive(Debug)]
pub struct Config {
    /// Everything the driver keeps goes below.
    pub data_dir: PathBuf,
    /// The guest's program: a static executable.
    pub guest: Vec<u8>,
    /// The program that becomes the launcher when its first argument is [`LAUNCHER_ARG`].
    pub launcher: PathBuf,
    /// The data directory's lock, held together with the launcher.
    pub lock: OwnedFd,
    /// Keep what sandboxes write in memory, also where there are loop devices.
    pub memory_disks: bool,
}

/// Makes native sandboxes.
pub struct NativeDriver {
    shared: Arc<Shared>,
}

struct Shared {
    dir: PathBuf,
    launcher: Launcher,
    cgroups: Cgroups,
    disks: Disks,
    uids: Uids,
    layers: Vec<Layer>,
    idmap: bool,
    /// Why what sandboxes write is kept in memory, if it is.
    memory_disks: Option<String>,
}

// === impl NativeDriver ===

impl NativeDriver {
    /// Starts the launcher and prepares the template. Blocks; call it before there are other threads or off them.
    pub fn start(config: Config) -> Result<Self, DriverError> {
        if !rustix::process::geteuid().is_root() {
            return Err(DriverError::Unusable(
                "the native runtime needs root: run k8e server as root".to_owned(),
            ));
        }
        let dir = config.data_dir.join("native");
        for sub in ["stage", "templates", "sandboxes"] {
            let path = dir.join(sub);
            fs::create_dir_all(&path)
                .map_err(DriverError::step("make", path.display().to_string()))?;
        }
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))
            .map_err(DriverError::step("protect", dir.display().to_string()))?;
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
        let shared = Shared {
            cgroups: Cgroups::open(&stable_name(&dir))?,
            disks,
            uids: Uids::default(),
            layers,
            idmap: ready.idmap,
            memory_disks,
            dir,
            launcher,
        };
        // Live sandboxes of an earlier server stand on the skeleton: it may change only when there are none.
        if !shared.skeleton().exists() || !shared.any_alive() {
            skeleton::build(&shared.skeleton())?;
        }
        Ok(Self {
            shared: Arc::new(shared),
        })
    }
}

#[async_trait]
impl Driver for NativeDriver {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Native
    }

    fn probe(&self) -> Probe {
        let mut weaker: Vec<String> = confine::landlock_missing().into_iter().collect();
        if !self.shared.idmap {
            weaker.push(
                "the host's /usr cannot be shown with other owners (idmapped mounts): programs cannot be changed or installed over inside; use ext4, xfs or btrfs for it".to_owned(),
            );
        }
        if let Some(why) = &self.shared.memory_disks {
            weaker.push(format!("what sandboxes write is kept in memory and counts against their memory limit: {why}"));
        }
        Probe::Usable { weaker }
    }

    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError> {
        let (shared, spec, id) = (Arc::clone(&self.shared), spec.clone(), spec.id.clone());
        let (forked, uid_base) = blocking(move || shared.launch(&spec)).await?;
        let sandbox =
            NativeSandbox::new(Arc::clone(&self.shared), id.clone(), uid_base, forked.pidfd);
        let launch = match sandbox {
            Ok(sandbox) => return Ok(Box::new(sandbox)),
            Err(launch) => launch,
        };
        let shared = Arc::clone(&self.shared);
        Err(
            match blocking(move || shared.remove(&id, Some(uid_base))).await {
                Ok(()) => launch,
                Err(cleanup) => DriverError::Launch {
                    launch: Box::new(launch),
                    cleanup: Box::new(cleanup),
                },
            },
        )
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        let Some(record) = Record::read(&self.shared.sandbox(id)) else {
            return Ok(None);
        };
        // The descriptor first: once it is open, the pid cannot become another process's.
        let init = match launcher::pidfd_of(record.pid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            init => init.map_err(DriverError::step(
                "find",
                format!("the first process of {id}"),
            ))?,
        };
        if !record.is_alive() {
            return Ok(None);
        }
        self.shared.uids.keep(record.uid_base);
        let sandbox =
            NativeSandbox::new(Arc::clone(&self.shared), id.clone(), record.uid_base, init)?;
        Ok(Some(Box::new(sandbox)))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        let (shared, keep) = (Arc::clone(&self.shared), keep.clone());
        blocking(move || shared.sweep(&keep)).await
    }
}

impl Drop for NativeDriver {
    fn drop(&mut self) {
        self.shared.cgroups.close();
    }
}

// === impl Shared ===

impl Shared {
    fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.dir.join("sandboxes").join(id.as_str())
    }

    fn socket(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join("guest.sock")
    }

    fn skeleton(&self) -> PathBuf {
        self.dir.join("templates/host")
    }

    /// Everything a sandbox needs, in the order that makes it recoverable. On failure all of it goes again.
    fn launch(&self, spec: &SandboxSpec) -> Result<(Forked, u32), DriverError> {
        let base = self.uids.take().ok_or_else(|| {
            DriverError::Exhausted(
                "all uid ranges for sandboxes are in use: wait for sessions to end".to_owned(),
            )
        })?;
        self.launch_with(spec, base)
            .map(|forked| (forked, base))
            .map_err(|launch| match self.remove(&spec.id, Some(base)) {
                Ok(()) => launch,
                Err(cleanup) => DriverError::Launch {
                    launch: Box::new(launch),
                    cleanup: Box::new(cleanup),
                },
            })
    }

    fn launch_with(&self, spec: &SandboxSpec, base: u32) -> Result<Forked, DriverError> {
        let dir = self.sandbox(&spec.id);
        fs::create_dir(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        let disk = if self.memory_disks.is_some() {
            Disk::Memory(spec.limits.disk_bytes)
        } else {
            let image = dir.join("disk.img");
            self.disks.create(&image, spec.limits.disk_bytes)?;
            Disk::Image(image)
        };
        let cgroup = self.cgroups.group(&spec.id);
        cgroup.create(&spec.limits)?;
        let listener =
            listen(&dir).map_err(DriverError::step("listen in", dir.display().to_string()))?;
        let setup = Setup {
            join: cgroup.join(),
            rootfs: self.rootfs(spec, disk, base),
        };
        let mut forked = self.launcher.fork(&setup, &listener)?;
        forked.wait()?;
        Record::of(forked.pid, base)?.write(&dir)?;
        Ok(forked)
    }

    fn rootfs(&self, spec: &SandboxSpec, disk: Disk, uid_base: u32) -> Rootfs {
        match spec.template {
            Template::Host => Rootfs {
                stage: self.dir.join("stage"),
                skeleton: self.skeleton(),
                layers: self.layers.clone(),
                disk,
                shm_bytes: shm_bytes(&spec.limits),
                uid_base,
                idmap: self.idmap,
            },
        }
    }

    /// Removes every trace; what is already gone is no error. The directory goes last.
    fn remove(&self, id: &SandboxId, uid_base: Option<u32>) -> Result<(), DriverError> {
        self.cgroups.group(id).remove()?;
        let dir = self.sandbox(id);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(DriverError::step("remove", dir.display().to_string()))?,
        }
        if let Some(base) = uid_base {
            self.uids.free(base);
        }
        Ok(())
    }

    fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        let mut found: HashSet<SandboxId> = self.cgroups.ids().into_iter().collect();
        found.extend(self.ids()?);
        let mut swept: Vec<SandboxId> = found.into_iter().filter(|id| !keep.contains(id)).collect();
        swept.sort();
        for id in &swept {
            // Its processes are all in its control group.
            self.cgroups.group(id).kill();
        }
        let mut failed = None;
        for id in &swept {
            let record = Record::read(&self.sandbox(id));
            if let Err(error) = self.remove(id, None) {
                // Its numbers are not for others while something of it is left.
                record.inspect(|record| self.uids.keep(record.uid_base));
                failed = Some(error);
            }
        }
        failed.map_or(Ok(swept), Err)
    }

    fn ids(&self) -> Result<Vec<SandboxId>, DriverError> {
        let dir = self.dir.join("sandboxes");
        let entries =
            fs::read_dir(&dir).map_err(DriverError::step("read", dir.display().to_string()))?;
        Ok(entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect())
    }

    fn any_alive(&self) -> bool {
        let ids = self.ids().unwrap_or_default();
        ids.iter()
            .any(|id| Record::read(&self.sandbox(id)).is_some_and(|record| record.is_alive()))
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

/// Half of the memory: what is kept in shared memory cannot be freed by ending processes.
fn shm_bytes(limits: &Limits) -> u64 {
    limits.memory_bytes / 2
}

/// Listens in the sandbox's directory, whatever the length of its path.
fn listen(dir: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    use std::os::fd::AsRawFd as _;
    let fd = rustix::fs::open(dir, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let listener = UnixListener::bind(format!(
        "/proc/self/fd/{}/guest.sock",
        fd.as_fd().as_raw_fd()
    ))?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}

/// The same for a data directory on every start, unlike anything hashed by std (FNV-1a).
fn stable_name(dir: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    let hash = dir
        .as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("{hash:016x}")
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
) -> Result<T, DriverError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(DriverError::step("finish", "a blocking step")(
            io::Error::other(error),
        )),
    }
}
