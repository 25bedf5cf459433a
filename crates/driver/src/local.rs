//! Resources that the local drivers share: one launcher, the `host` template, disk images,
//! uid ranges and control groups. [`Machine`] is started once and shared by all of them.
//!
//! Two processes use this module. The server, which is not root, has `Machine` and `sandbox.rs`:
//! descriptors and requests. The [launcher], which is, has all the rest.
//!
//! ```text
//! <data directory>/
//!   stage/                   empty; where launches build, each in a mount namespace of its own
//!   templates/host/          the `host` template's own part
//!   templates/front/         what every sandbox of an image has above the image
//!   templates/disks/         empty file systems, and scratch of mkfs
//!   layers/<sha256>/         an unpacked layer of an image: fs/  layer.json
//!   <driver>/sandboxes/<id>/ disk.img  record.json  and the guest's socket
//!   gvisor/states/<id>/      a saved sandbox: state.json  memory/  disk.img  guest
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
pub(crate) mod layers;
pub(crate) mod oom;
pub(crate) mod record;
pub(crate) mod rootfs;
pub(crate) mod sandbox;
pub(crate) mod sandboxes;
pub(crate) mod share;
pub(crate) mod skeleton;
pub(crate) mod sys;
pub(crate) mod uids;
pub(crate) mod userns;

mod shm;

pub use cgroup::io::DiskRate;
pub use launcher::{LAUNCHER_ARG, launcher_main};

use crate::gvisor::{self, Platform};
use crate::{DriverError, LayerBlob, LayerSize, LayerStore, Restored, Sandbox, SandboxSpec};
use async_trait::async_trait;
use k8e_model::{Digest, Limits, SandboxId};
use kind::Kind;
use launcher::request::{Answer, LIST_IDS_MAX, LIST_LAYERS_MAX, Request, SocketFile, Start};
use launcher::{Class, Launcher, Turns};
use sandbox::LocalSandbox;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::OnceCell;

/// Host name inside; `/etc/hosts` has it too.
pub(crate) const HOSTNAME: &str = "sandbox";

/// RLIMIT_NOFILE of processes inside: enough for any server; far from what exhausts the kernel.
pub(crate) const OPEN_FILES_MAX: u64 = 65_536;

/// Configuration of the local drivers.
#[derive(Debug)]
pub struct Config {
    /// The data directory: all files of the drivers are below.
    pub data_dir: PathBuf,
    /// The guest's program: a static executable.
    pub guest: Vec<u8>,
    /// The program that becomes the launcher when its first argument is [`LAUNCHER_ARG`].
    pub launcher: PathBuf,
    /// The data directory's lock, held together with the launcher.
    pub lock: OwnedFd,
    /// Keep the writable layer in memory (tmpfs) also where there are loop devices.
    pub memory_disks: bool,
    /// Maximum limits that the launcher grants a sandbox, whatever the server requests.
    pub limits_max: Limits,
    /// The group that the server's process will have when it has given up root: it may connect to
    /// guests.
    pub server_gid: u32,
    /// The Unix socket that the server listens on, for [`Machine::remove_socket`].
    pub socket: Option<PathBuf>,
    /// Disk I/O limits of one sandbox.
    pub disk_rate: DiskRate,
    /// The runsc to use for gVisor sandboxes, instead of one that is found.
    pub runsc: Option<PathBuf>,
}

/// This machine, as the drivers use it. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Machine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    launcher: Launcher,
    /// Limits the requests under way in the launcher.
    turns: Turns,
    /// The runsc that was chosen, instead of one that is found.
    runsc: Option<PathBuf>,
    /// Whether runsc can save sandboxes, once that was tried, or why not.
    can_save: OnceCell<Result<(), String>>,
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
            runsc: config.runsc.clone(),
        };
        let launcher = Launcher::start(&config.launcher, &start, &guest, &config.lock)?;
        let turns = Turns::default();
        Ok(Self(Arc::new(Inner {
            dir,
            launcher,
            turns,
            runsc: config.runsc,
            can_save: OnceCell::new(),
        })))
    }

    /// The runsc that was chosen, if any.
    pub(crate) fn runsc(&self) -> Option<&Path> {
        self.0.runsc.as_deref()
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

    /// Has the launcher try out gVisor, unless the installed build worked before. Blocks.
    pub(crate) fn try_gvisor(&self, platform: Platform) -> Result<(), DriverError> {
        self.ask_now(&Request::TryGvisor { platform }).map(drop)
    }

    /// Whether gVisor sandboxes can be saved here: tried once, by a round trip of another sandbox, because a build of
    /// runsc that cannot save one may damage it. Takes a second the first time.
    pub(crate) async fn check_can_save(&self, platform: Platform) -> Result<(), DriverError> {
        let tried = self.0.can_save.get_or_init(|| async {
            let tried = self.try_checkpoint(platform).await;
            tried.map_err(|error| match std::error::Error::source(&error) {
                Some(source) => format!("this runsc cannot save sessions: {error}: {source}"),
                None => format!("this runsc cannot save sessions: {error}"),
            })
        });
        tried.await.clone().map_err(DriverError::Unusable)
    }

    /// A round trip of a sandbox with a process that holds an unlinked file, which is the first thing that old builds
    /// of runsc cannot save.
    async fn try_checkpoint(&self, platform: Platform) -> Result<(), DriverError> {
        let spec = gvisor::launch::trial();
        let sandbox = self.launch_local(Kind::Gvisor, &spec, platform).await?;
        let tried = async {
            let held = sandbox.guest().hold_unlinked_file().await;
            held.map_err(|error| DriverError::step("call", "the guest")(io::Error::other(error)))?;
            sandbox.save_untried().await?;
            match sandbox.restore().await? {
                Restored::Memory => Ok(()),
                Restored::Files { reason } => Err(DriverError::Unusable(reason)),
            }
        };
        let tried = tried.await;
        sandbox.destroy().await?;
        tried
    }

    /// Makes a sandbox.
    pub(crate) async fn launch(
        &self,
        kind: Kind,
        spec: &SandboxSpec,
        platform: Platform,
    ) -> Result<Box<dyn Sandbox>, DriverError> {
        let launched = self.launch_local(kind, spec, platform).await?;
        Ok(Box::new(launched))
    }

    async fn launch_local(
        &self,
        kind: Kind,
        spec: &SandboxSpec,
        platform: Platform,
    ) -> Result<LocalSandbox, DriverError> {
        let (id, spec, limits) = (spec.id.clone(), spec.clone(), spec.limits);
        let request = Request::Launch {
            kind,
            spec,
            platform,
        };
        let mut sandbox = self.sandbox(kind, id, limits, self.ask(request).await?)?;
        if let Some(sandbox) = &mut sandbox {
            sandbox.set_platform(platform);
        }
        sandbox.ok_or(DriverError::LauncherGone)
    }

    /// Makes a gVisor sandbox that continues from a state.
    pub(crate) async fn launch_from(
        &self,
        spec: &SandboxSpec,
        state: &SandboxId,
        platform: Platform,
    ) -> Result<(Box<dyn Sandbox>, Restored), DriverError> {
        let request = Request::LaunchFrom {
            id: spec.id.clone(),
            limits: spec.limits,
            state: state.clone(),
        };
        let (Answer::Restored(passed, lost), fds) = self.ask(request).await? else {
            return Err(DriverError::LauncherGone);
        };
        let (machine, id) = (self.clone(), spec.id.clone());
        let mut sandbox = LocalSandbox::new(machine, Kind::Gvisor, id, spec.limits, passed, fds)?;
        sandbox.set_platform(platform);
        Ok((Box::new(sandbox), Restored::of(lost)))
    }

    /// Removes a copied state.
    pub(crate) async fn remove_state(&self, state: &SandboxId) -> Result<(), DriverError> {
        let (kind, id) = (Kind::Gvisor, state.clone());
        self.ask(Request::Remove { kind, id }).await.map(drop)
    }

    /// Adopts a sandbox of an earlier server; none when it is dead.
    pub(crate) async fn adopt(
        &self,
        kind: Kind,
        id: &SandboxId,
        limits: &Limits,
    ) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        let id = id.clone();
        let request = Request::Adopt {
            kind,
            id: id.clone(),
        };
        let sandbox = self.sandbox(kind, id.clone(), *limits, self.ask(request).await?)?;
        // A server of an earlier version may have left no reserve for the out-of-memory killer.
        if let Some(sandbox) = sandbox
            .as_ref()
            .filter(|sandbox| kind.has_kernel() && !sandbox.is_saved())
            && let Err(error) = sandbox.set_limits(limits)
        {
            tracing::warn!(sandbox = %id, "cannot set its limits again: {error}");
        }
        Ok(sandbox.map(|sandbox| Box::new(sandbox) as Box<dyn Sandbox>))
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
        limits: Limits,
        (answer, fds): (Answer, Vec<OwnedFd>),
    ) -> Result<Option<LocalSandbox>, DriverError> {
        let machine = self.clone();
        let sandbox = if let Answer::Sandbox(passed) = answer {
            LocalSandbox::new(machine, kind, id, limits, passed, fds)?
        } else if let Answer::Saved = answer {
            LocalSandbox::saved(machine, kind, id, limits)
        } else {
            return Ok(None);
        };
        Ok(Some(sandbox))
    }

    /// Sends the launcher a request when its class has a permit. Once polled, a removal completes also when
    /// the caller is dropped; other requests are sent only if the caller still waits for its permit.
    async fn ask(&self, request: Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
        let own = self.clone();
        if request.class() != Some(Class::Removal) {
            return own.ask_in_turn(request).await;
        }
        let removed = tokio::spawn(own.ask_in_turn(request)).await;
        removed
            .map_err(|error| DriverError::step("finish", "a removal")(io::Error::other(error)))?
    }

    async fn ask_in_turn(self, request: Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
        let turn = match request.class() {
            Some(class) => Some(self.0.turns.wait(class).await),
            None => None,
        };
        blocking(move || {
            let answered = self.ask_now(&request);
            // The permit is kept until the answer: a dropped caller does not stop the launcher.
            drop(turn);
            answered
        })
        .await
    }

    fn ask_now(&self, request: &Request) -> Result<(Answer, Vec<OwnedFd>), DriverError> {
        self.0.launcher.ask(request)
    }

    fn tell(&self, request: &Request) -> Result<(), DriverError> {
        self.0.launcher.tell(request)
    }
}

#[async_trait]
impl LayerStore for Machine {
    async fn unpack(&self, blob: LayerBlob) -> Result<LayerSize, DriverError> {
        let own = self.clone();
        let turn = self.0.turns.wait(Class::Layer).await;
        blocking(move || {
            // Not before the launcher has answered.
            let _turn = turn;
            let request = Request::UnpackLayer {
                diff_id: blob.diff_id,
                compression: blob.compression,
                bytes_max: blob.bytes_max,
            };
            let answer = own.0.launcher.ask_with(&request, &blob.file)?;
            let Answer::Layer(Some(size)) = answer else {
                return Err(DriverError::LauncherGone);
            };
            Ok(size)
        })
        .await
    }

    async fn find(&self, diff_id: &Digest) -> Result<Option<LayerSize>, DriverError> {
        let diff_id = diff_id.clone();
        match self.ask(Request::FindLayer { diff_id }).await? {
            (Answer::Layer(size), _) => Ok(size),
            _ => Err(DriverError::LauncherGone),
        }
    }

    async fn list(&self) -> Result<Vec<Digest>, DriverError> {
        let mut all: Vec<Digest> = Vec::new();
        loop {
            let after = all.last().cloned();
            let (answer, _) = self.ask(Request::ListLayers { after }).await?;
            let Answer::Layers(layers) = answer else {
                return Err(DriverError::LauncherGone);
            };
            let full = layers.len() == LIST_LAYERS_MAX;
            all.extend(layers);
            if !full {
                return Ok(all);
            }
        }
    }

    async fn remove(&self, diff_id: &Digest) -> Result<(), DriverError> {
        let diff_id = diff_id.clone();
        self.ask(Request::RemoveLayer { diff_id }).await.map(drop)
    }
}

/// Of `/dev/shm`: half of the memory, because what is kept there cannot be freed by ending processes.
pub(crate) fn shm_bytes(limits: &Limits) -> u64 {
    limits.memory_bytes / 2
}

/// A directory with mode 0700.
pub(crate) fn make_private_dir(path: &Path) -> Result<(), DriverError> {
    fs::create_dir_all(path).map_err(DriverError::step("make", path.display().to_string()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
        .map_err(DriverError::step("protect", path.display().to_string()))
}

/// Runs blocking work on tokio's blocking threads.
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
    Ok(fs::File::open(k8e_net::proc_fd::path(&file))?.into())
}
