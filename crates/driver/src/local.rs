//! What the drivers of this machine are made of: one launcher, the `host` template, disk images,
//! uid ranges and control groups. [`Machine`] is started once and shared by all of them.
//!
//! Two processes use this module. The server, which is not root, has `Machine` and `sandbox.rs`:
//! descriptors and requests. The [launcher], which is, has all the rest.
//!
//! ```text
//! <data directory>/
//!   stage/                   empty; where launches build, each in a mount namespace of its own
//!   templates/host/          the `host` template's own part
//!   templates/disks/         empty file systems, and scratch of mkfs
//!   <driver>/sandboxes/<id>/ disk.img  record.json  and the guest's socket
//! ```
//!
//! A sandbox's directory is made first and removed last, so whatever else of it exists, its name is there.

pub(crate) mod birth;
pub(crate) mod caps;
pub(crate) mod cgroup;
pub(crate) mod disk;
pub(crate) mod host;
pub(crate) mod kind;
pub(crate) mod launcher;
pub(crate) mod record;
pub(crate) mod rootfs;
pub(crate) mod sandbox;
pub(crate) mod sandboxes;
pub(crate) mod skeleton;
pub(crate) mod sys;
pub(crate) mod uids;
pub(crate) mod userns;

mod share;
mod shm;

pub use cgroup::io::DiskRate;
pub use launcher::{LAUNCHER_ARG, launcher_main};

use crate::gvisor::Platform;
use crate::{DriverError, Sandbox, SandboxSpec};
use k8e_model::{Limits, SandboxId};
use kind::Kind;
use launcher::Launcher;
use launcher::request::{Answer, LIST_IDS_MAX, Request, SocketFile, Start};
use sandbox::LocalSandbox;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    /// The launcher gives no sandbox more than this, whatever it is asked for.
    pub limits_max: Limits,
    /// The group that the server's process will have when it has given up root: it may connect to
    /// guests.
    pub server_gid: u32,
    /// The Unix socket that the server listens on, for [`Machine::remove_socket`].
    pub socket: Option<PathBuf>,
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
}

// === impl Machine ===

impl Machine {
    /// Starts the launcher, as root; afterwards the calling process can give up root. Blocks.
    pub fn start(config: Config) -> Result<Self, DriverError> {
        if !rustix::process::geteuid().is_root() {
            return Err(DriverError::Unusable(
                "sandboxes need root: run k8e server as root".to_owned(),
            ));
        }
        let dir = config.data_dir;
        fs::create_dir_all(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        let dir = dir
            .canonicalize()
            .map_err(DriverError::step("find", dir.display().to_string()))?;
        let guest = guest_program(&config.guest).map_err(DriverError::step("load", "the guest"))?;
        let start = Start {
            data_dir: dir.clone(),
            memory_disks: config.memory_disks,
            disk_rate: config.disk_rate,
            limits_max: config.limits_max,
            server_gid: config.server_gid,
            socket: config
                .socket
                .map(SocketFile::find)
                .transpose()
                .map_err(DriverError::step("find", "the server's socket"))?,
        };
        let launcher = Launcher::start(&config.launcher, &start, &guest, &config.lock)?;
        Ok(Self(Arc::new(Inner { dir, launcher })))
    }

    /// Removes the socket that the server listened on. Blocks.
    pub fn remove_socket(&self) -> Result<(), DriverError> {
        self.ask_now(&Request::RemoveSocket).map(drop)
    }

    /// Whether sandboxes can be wired to a gate.
    pub(crate) fn has_network(&self) -> bool {
        self.0.launcher.ready().has_network
    }

    /// What sandboxes of any driver lack on this machine, one sentence each.
    pub(crate) fn weaker(&self) -> Vec<String> {
        self.0.launcher.ready().weaker.clone()
    }

    pub(crate) fn guest_socket(&self, kind: Kind, id: &SandboxId) -> PathBuf {
        sandboxes::socket(&self.0.dir, kind, id)
    }

    /// Has gVisor tried out, unless what is installed worked before. Blocks.
    pub(crate) fn try_gvisor(&self, platform: Platform) -> Result<(), DriverError> {
        self.ask_now(&Request::TryGvisor { platform }).map(drop)
    }

    /// Makes a sandbox.
    pub(crate) async fn launch(
        &self,
        kind: Kind,
        spec: &SandboxSpec,
        platform: Platform,
    ) -> Result<Box<dyn Sandbox>, DriverError> {
        let (id, spec) = (spec.id.clone(), spec.clone());
        let request = Request::Launch {
            kind,
            spec,
            platform,
        };
        let sandbox = self.sandbox(kind, id, self.ask(request).await?)?;
        sandbox.ok_or(DriverError::LauncherGone)
    }

    /// Finds one of an earlier server again; none when it is dead.
    pub(crate) async fn adopt(
        &self,
        kind: Kind,
        id: &SandboxId,
    ) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        let id = id.clone();
        let request = Request::Adopt {
            kind,
            id: id.clone(),
        };
        self.sandbox(kind, id, self.ask(request).await?)
    }

    /// Removes every trace of those that are not in `keep`.
    pub(crate) async fn sweep(
        &self,
        kind: Kind,
        keep: &HashSet<SandboxId>,
    ) -> Result<Vec<SandboxId>, DriverError> {
        let mut swept = Vec::new();
        let mut failed = None;
        let mut after = None;
        loop {
            let (answer, _) = self.ask(Request::List { kind, after }).await?;
            let Answer::Ids(ids) = answer else {
                return Err(DriverError::LauncherGone);
            };
            let full = ids.len() == LIST_IDS_MAX;
            after = ids.last().cloned();
            for id in ids.into_iter().filter(|id| !keep.contains(id)) {
                let removed = self.ask(Request::Remove {
                    kind,
                    id: id.clone(),
                });
                failed = removed.await.err().or(failed);
                swept.push(id);
            }
            if !full {
                return failed.map_or(Ok(swept), Err);
            }
        }
    }

    fn sandbox(
        &self,
        kind: Kind,
        id: SandboxId,
        (answer, fds): (Answer, Vec<OwnedFd>),
    ) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        let Answer::Sandbox {
            memory_events,
            pids_events,
        } = answer
        else {
            return Ok(None);
        };
        let machine = self.clone();
        let sandbox = LocalSandbox::new(machine, kind, id, memory_events, pids_events, fds)?;
        Ok(Some(Box::new(sandbox)))
    }

    async fn ask(&self, request: Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
        let own = self.clone();
        blocking(move || own.ask_now(&request)).await
    }

    fn ask_now(&self, request: &Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
        self.0.launcher.ask(request)
    }

    fn tell(&self, request: &Request) -> Result<(), DriverError> {
        self.0.launcher.tell(request)
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
