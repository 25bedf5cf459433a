//! The gVisor driver: every sandbox has a kernel of its own, in user space, made by `runsc`.
//!
//! The file system, the disk, the uid range, the control group and the guest are those of the
//! native driver; what stands between the guest and the host's kernel is another.
//!
//! ```text
//! launcher ── fork: mount namespace, control group ── runsc run ─┬─ sentry: the kernel, and PID 1 of the sandbox in it
//!             (gone when the sandbox runs)   (gone too)          └─ gofer: keeps the file system mounted
//! ```
//!
//! No state of runsc's outlives the launch: a sandbox is its sentry, which is found again by its
//! record, and ended by a signal; its mounts end with it.
//!
//! The guest binds its socket itself, in a directory of the host's that is taken away from the
//! sandbox once it listens: nothing inside can then put anything there, or another in its place.

pub(crate) mod child;

mod bundle;
mod runsc;

pub use runsc::Platform;

pub(crate) use runsc::found as runsc_found;

use crate::local::launcher::{Order, Told, pidfd_of};
use crate::local::sandboxes::{Kind, Prepared, Sandboxes, Started};
use crate::{Driver, DriverError, Machine, Probe, Sandbox, SandboxSpec};
use async_trait::async_trait;
use child::{Setup, Task};
use k8e_model::{Limits, RuntimeKind, SandboxId, Template};
use runsc::Runsc;
use rustix::fs::{Gid, Uid};
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// In the driver's directory: the guest's program.
const GUEST: &str = "guest";

/// In a sandbox's directory: what the guest can write to until it listens.
const SHARED: &str = "shared";
const SOCKET: &str = "shared/guest.sock";

const KIND: Kind = Kind {
    name: "gvisor",
    socket: SOCKET,
    around: host_limits,
    has_kernel: true,
};

/// The guest listens some milliseconds after the sandbox runs; on a machine under load in a second.
const LISTEN_WAIT: Duration = Duration::from_secs(10);
const LISTEN_PAUSE: Duration = Duration::from_millis(1);

/// A broken runsc is not tried more often than this: trying is a launch.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(20);

/// What the sentry, the gofer and the stubs that run the sandbox's threads use themselves: 12 MiB
/// idle, more with many processes and open files. It is not the sandbox's to use, but who fills it
/// ends the sandbox, not the machine.
const KERNEL_MEMORY_BYTES: u64 = 96 * 1024 * 1024;

/// The kernel inside counts processes itself. Outside each is a few threads of a stub, and the
/// sentry has its own: this only bounds what a sentry that was taken over could do.
const HOST_PIDS_PER_PID: u32 = 4;
const HOST_PIDS_MORE: u32 = 512;

/// Makes gVisor sandboxes.
pub struct GvisorDriver {
    sandboxes: Arc<Sandboxes>,
    platform: Platform,
    /// What was found out last.
    found: Mutex<Option<Found>>,
}

/// Whether a runsc works.
struct Found {
    runsc: Runsc,
    probe: Probe,
    at: Instant,
}

// === impl GvisorDriver ===

impl GvisorDriver {
    /// Finds runsc and tries it out, unless that was done before. Blocks.
    pub fn start(machine: &Machine, platform: Platform) -> Result<Self, DriverError> {
        let sandboxes = Sandboxes::open(machine, KIND)?;
        let driver = Self {
            sandboxes: Arc::new(sandboxes),
            platform,
            found: Mutex::default(),
        };
        driver.probe();
        Ok(driver)
    }

    /// Has a guest to run and a runsc that runs it, or says what is wrong, as on a full disk.
    fn works(&self, runsc: &Runsc) -> Result<(), String> {
        let (dir, machine) = (self.sandboxes.dir(), &self.sandboxes.machine);
        write_guest(machine, dir)
            .map_err(|error| format!("the guest cannot be copied to {}: {error}", dir.display()))?;
        if runsc.worked_before(dir, self.platform) {
            return Ok(());
        }
        self.try_out(runsc).map_err(|error| runsc.broken(&error))?;
        runsc.remember(dir, self.platform);
        Ok(())
    }

    /// A real sandbox whose guest makes a process: some builds of runsc die of that.
    fn try_out(&self, runsc: &Runsc) -> Result<(), DriverError> {
        let limits = Limits {
            disk_bytes: 64 << 20,
            ..Limits::default()
        };
        let spec = SandboxSpec {
            id: SandboxId::random(),
            template: Template::Host,
            limits,
        };
        let (sandboxes, platform) = (&self.sandboxes, self.platform);
        sandboxes.try_out(&spec, |prepared| {
            let setup = setup(sandboxes, &spec, prepared, runsc, platform, Task::SelfTest)?;
            let order = Order::Gvisor(setup);
            match sandboxes.machine.launcher().fork(&order, None)?.wait()? {
                Some(Told::Works) => Ok(()),
                _ => Err(vanished()),
            }
        })
    }
}

#[async_trait]
impl Driver for GvisorDriver {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Gvisor
    }

    /// Quick unless runsc was installed or replaced since it was last tried, or was broken then.
    fn probe(&self) -> Probe {
        let runsc = match Runsc::find() {
            Ok(runsc) => runsc,
            Err(reason) => return Probe::Unusable { reason },
        };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = &*found
            && found.holds_for(&runsc)
        {
            return found.probe.clone();
        }
        let probe = match self.works(&runsc) {
            Ok(()) => Probe::Usable {
                weaker: self.sandboxes.weaker(),
            },
            Err(reason) => Probe::Broken { reason },
        };
        *found = Some(Found {
            runsc,
            probe: probe.clone(),
            at: Instant::now(),
        });
        probe
    }

    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError> {
        let runsc = Runsc::find().map_err(DriverError::Unusable)?;
        let (sandboxes, platform) = (Arc::clone(&self.sandboxes), self.platform);
        let start = move |spec: &SandboxSpec, prepared: Prepared| {
            let setup = setup(&sandboxes, spec, prepared, &runsc, platform, Task::Serve)?;
            start(&sandboxes, &spec.id, setup)
        };
        let sandbox = self.sandboxes.launch(spec, start).await?;
        Ok(Box::new(sandbox))
    }

    /// A disk is made with its sandbox; processes are counted by the kernel inside, which takes no
    /// orders once it runs.
    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool {
        (from.disk_bytes, from.pids) == (to.disk_bytes, to.pids)
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        let sandbox = self.sandboxes.adopt(id)?;
        Ok(sandbox.map(|sandbox| Box::new(sandbox) as Box<dyn Sandbox>))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        self.sandboxes.sweep(keep).await
    }
}

// === impl Found ===

impl Found {
    fn holds_for(&self, runsc: &Runsc) -> bool {
        let broken = matches!(self.probe, Probe::Broken { .. });
        self.runsc == *runsc && (!broken || self.at.elapsed() < TRY_AGAIN_AFTER)
    }
}

/// Sandboxes of an earlier server keep the file they have.
fn write_guest(machine: &Machine, dir: &Path) -> io::Result<()> {
    let guest = fs::read(format!(
        "/proc/self/fd/{}",
        machine.launcher().guest().as_raw_fd()
    ))?;
    let (new, path) = (dir.join("guest.new"), dir.join(GUEST));
    if fs::read(&path).is_ok_and(|there| there == guest) {
        return Ok(());
    }
    fs::write(&new, guest)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    fs::rename(new, path)
}

/// Limits of the control group around the sandbox and its kernel.
fn host_limits(limits: &Limits) -> Limits {
    Limits {
        memory_bytes: limits.memory_bytes.saturating_add(KERNEL_MEMORY_BYTES),
        pids: limits
            .pids
            .saturating_mul(HOST_PIDS_PER_PID)
            .saturating_add(HOST_PIDS_MORE),
        ..*limits
    }
}

fn setup(
    sandboxes: &Sandboxes,
    spec: &SandboxSpec,
    prepared: Prepared,
    runsc: &Runsc,
    platform: Platform,
    task: Task,
) -> Result<Setup, DriverError> {
    let shared = prepared.dir.join(SHARED);
    let step = || DriverError::step::<io::Error>("make", shared.display().to_string());
    fs::create_dir(&shared).map_err(step())?;
    // For root inside alone: who connects can run commands as root.
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o700)).map_err(step())?;
    give(&shared, prepared.uid_base)?;
    Ok(Setup {
        join: prepared.cgroup.join(),
        config: bundle::config(&spec.limits, prepared.uid_base, task),
        rootfs: sandboxes
            .machine
            .rootfs(spec, prepared.disk, prepared.uid_base),
        shared,
        guest: sandboxes.dir().join(GUEST),
        runsc: runsc.path.clone(),
        platform: platform.as_str().to_owned(),
        network: sandboxes.machine.has_network(),
        task,
    })
}

fn start(sandboxes: &Sandboxes, id: &SandboxId, setup: Setup) -> Result<Started, DriverError> {
    let order = Order::Gvisor(setup);
    let Some(Told::Running { pid }) = sandboxes.machine.launcher().fork(&order, None)?.wait()?
    else {
        return Err(vanished());
    };
    let sentry = || format!("the kernel of {id}");
    let pidfd = pidfd_of(pid).map_err(DriverError::step("find", sentry()))?;
    // The descriptor is open: whoever has the number now keeps it. Is it still ours?
    if !sandboxes.cgroups.group(id).holds(pid) {
        return Err(vanished());
    }
    let socket = sandboxes.socket(id);
    wait_for_guest(&socket, &pidfd)
        .map_err(DriverError::step("wait for the guest of", id.to_string()))?;
    let shared = socket.parent().unwrap_or(&socket);
    give(&socket, 0)?;
    give(shared, 0)?;
    Ok(Started { pid, pidfd })
}

/// Until the guest listens, or its kernel is gone.
fn wait_for_guest(socket: &Path, sentry: &OwnedFd) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let deadline = Instant::now() + LISTEN_WAIT;
    let pause = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(LISTEN_PAUSE.subsec_nanos()),
    };
    loop {
        match crate::guest::is_listening(socket) {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => {}
        }
        let mut ended = [PollFd::new(sentry, PollFlags::IN)];
        if poll(&mut ended, Some(&pause))? > 0 {
            return Err(io::Error::other("its kernel ended"));
        }
    }
}

fn give(path: &Path, owner: u32) -> Result<(), DriverError> {
    rustix::fs::chownat(
        rustix::fs::CWD,
        path,
        Some(Uid::from_raw(owner)),
        Some(Gid::from_raw(owner)),
        rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
    )
    .map_err(DriverError::step("chown", path.display().to_string()))
}

fn vanished() -> DriverError {
    DriverError::step("run", "runsc")(io::Error::other("it ended and did not say why"))
}
