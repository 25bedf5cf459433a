//! What the launcher's child does to make a gVisor sandbox: mounts its file system in a separate mount
//! namespace, then has runsc start the sentry on it.
//!
//! Everything runsc needs lies in the stage, a small tmpfs that is moved to `/run` in this
//! namespace. So paths are short, which sockets need, and the same for every sandbox, whatever the
//! data directory is called; and runsc's own files are gone with the namespace.

use super::bind_filter;
use super::bundle::{GUEST, ROOT, SHARED};
use super::control::IMAGE;
use crate::DriverError;
use crate::local::birth::Report;
use crate::local::cgroup::Join;
use crate::local::cgroup::devices::KVM;
use crate::local::cgroup::io::DiskRate;
use crate::local::launcher::pidfd_of;
use crate::local::rootfs::{Owners, Rootfs, attach, clone_mount, make_dir};
use crate::local::sys;
use k8e_egress::{EgressError, tproxy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::mount::MountFlags;
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// Where the stage is while runsc runs.
pub(super) const STAGE: &str = "/run";

/// In the stage: runsc's own files about the sandbox. Its length is unusual, see [`super::bind_filter`].
pub(super) const STATE: &str =
    "runsc-state-in-a-directory-with-a-name-of-a-length-that-sockets-seldom-have";

/// What runsc looks at to find out whether it runs in the host's network namespace.
const NOT_THE_HOST: &str = "/proc/sys/net/core";

/// Deadline of runsc, which takes 0.2 seconds, and longer on a machine under load.
const RUNSC_WAIT: Duration = Duration::from_secs(30);

/// Bytes of runsc's log that go into the error when it fails.
const LOG_BYTES_MAX: u64 = 16 * 1024;
const LOG_LINE_CHARS_MAX: usize = 500;

/// The platform that needs a device.
const KVM_PLATFORM: &str = "kvm";

/// Purpose of the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Task {
    /// A session: serves calls of the host until it is destroyed.
    Serve,
    /// A trial: only whether a process can be forked in it.
    SelfTest,
}

/// Everything about the new sandbox that is plain data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Control groups to join.
    pub(crate) join: Join,
    /// Its root file system.
    pub(crate) rootfs: Rootfs,
    /// Disk I/O limits.
    pub(crate) disk_rate: DiskRate,
    /// The guest's program. A file and not a descriptor: glibc insists that it has a path.
    pub(crate) guest: PathBuf,
    /// The host's directory in which its guest binds.
    pub(crate) shared: PathBuf,
    /// The bundle's configuration.
    pub(crate) config: String,
    /// Path of the runsc executable.
    pub(crate) runsc: PathBuf,
    /// gVisor platform: how the sentry intercepts system calls.
    pub(crate) platform: String,
    /// Whether a gate will serve its network.
    pub(crate) network: bool,
    /// Session or trial.
    pub(crate) task: Task,
    /// Directory of the host for runsc's own files, by which the sandbox is controlled later.
    pub(crate) state: PathBuf,
    /// The checkpoint to continue from.
    pub(crate) image: Option<PathBuf>,
    /// Whether the checkpoint is of another sandbox, with another uid range.
    pub(crate) copied: bool,
}

/// Makes the sandbox; runs in a process of its own.
pub(crate) fn run(
    setup: &Setup,
    userns: BorrowedFd<'_>,
    owners: &Owners,
) -> Result<Report, DriverError> {
    // Before the rest: what is left of a launch that dies is found by its group.
    setup.join.enter()?;
    // runsc waits for its children, which needs SIGCHLD not to be ignored.
    sys::reset_signals();
    rustix::process::setsid().map_err(DriverError::step("start", "a session"))?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let _ = fs::write("/proc/self/oom_score_adj", "0");
    setup.rootfs.mount(userns, owners)?;
    setup
        .join
        .limit_disks(setup.disk_rate, setup.rootfs.disks())?;
    setup.complete_rootfs()?;
    setup.move_stage()?;
    if setup.network {
        network()?;
    }
    setup
        .join
        .devices()?
        .restrict(match setup.platform == KVM_PLATFORM {
            true => &[KVM],
            false => &[],
        })?;
    sys::leave_session_keyring().map_err(DriverError::step("leave", "the session keyring"))?;
    sys::close_on_exec_from(3).map_err(DriverError::step("close", "descriptors"))?;
    bind_filter::install(&format!("{STAGE}/{STATE}"))?;
    let step = || DriverError::step::<io::Error>("run", setup.runsc.display().to_string());
    let mut runsc = setup.command().spawn().map_err(step())?;
    let status = wait(&mut runsc, RUNSC_WAIT).map_err(step())?;
    if !status.success() {
        return Err(step()(io::Error::other(why(status))));
    }
    match setup.task {
        Task::SelfTest => Ok(Report::Works),
        Task::Serve => {
            if setup.network {
                tproxy::connect_veth().map_err(wiring)?;
            }
            let pid = fs::read_to_string("pid").map_err(step())?;
            let pid = pid
                .trim()
                .parse()
                .map_err(io::Error::other)
                .map_err(step())?;
            Ok(Report::Running { pid })
        }
    }
}

// === impl Setup ===

impl Setup {
    /// Additions to the root file system that only this driver needs.
    fn complete_rootfs(&self) -> Result<(), DriverError> {
        let inside = |path: &str| Path::new("root").join(path.trim_start_matches('/'));
        let (guest, shared) = (inside(GUEST), inside(SHARED));
        make_dir(guest.parent().unwrap_or(&guest))?;
        fs::write(&guest, "").map_err(DriverError::step("make", guest.display().to_string()))?;
        let program = clone_mount(&self.guest)?;
        sys::set_mount_attributes(program.as_fd(), libc::MOUNT_ATTR_RDONLY, None)
            .map_err(DriverError::step("protect", "the guest"))?;
        attach(&program, &guest)?;
        make_dir(&shared)?;
        attach(&clone_mount(&self.shared)?, &shared)?;
        // runsc puts a tmpfs over an empty /tmp: memory, and not bounded by the disk's size.
        let lock_dir = Path::new("root/tmp/.X11-unix");
        make_dir(lock_dir)?;
        self.rootfs.give(lock_dir)?;
        rustix::fs::chmod(lock_dir, Mode::from_raw_mode(0o1777))
            .map_err(DriverError::step("chmod", lock_dir.display().to_string()))
    }

    fn move_stage(&self) -> Result<(), DriverError> {
        for dir in ["bundle", STATE] {
            make_dir(Path::new(dir))?;
        }
        attach(&clone_mount(&self.state)?, Path::new(STATE))?;
        if let Some(image) = &self.image {
            make_dir(Path::new(IMAGE))?;
            attach(&clone_mount(image)?, Path::new(IMAGE))?;
        }
        fs::write("bundle/config.json", &self.config)
            .map_err(DriverError::step("write", "bundle/config.json"))?;
        // The gofer traverses it as the sandbox's root, which is an unprivileged uid here.
        rustix::fs::chmod(".", Mode::from_raw_mode(0o755))
            .map_err(DriverError::step("chmod", "the stage"))?;
        rustix::mount::mount_move(&self.rootfs.stage, STAGE)
            .map_err(DriverError::step("move the stage to", STAGE))?;
        rustix::process::chdir(STAGE).map_err(DriverError::step("enter", STAGE))
    }

    fn command(&self) -> Command {
        debug_assert!(ROOT.starts_with(STAGE));
        let mut command = Command::new(&self.runsc);
        command
            .arg(format!("--root={STAGE}/{STATE}"))
            .arg(format!("--log={STAGE}/log"))
            .arg(format!("--platform={}", self.platform))
            // netstack on the veth interface of its network namespace; otherwise loopback only.
            .arg(match self.network {
                true => "--network=sandbox",
                false => "--network=none",
            })
            // The launcher manages the cgroup.
            .arg("--ignore-cgroups")
            // The launcher provides the writable overlay, which has a size limit.
            .arg("--overlay2=none")
            // The guest may bind a Unix socket; nothing inside may connect to one of the host's.
            .arg("--host-uds=create");
        if self.copied {
            // The uid mappings of a copy are not those of the checkpoint, which knows only uids inside.
            command.arg("--restore-spec-validation=warning");
        }
        match self.image {
            Some(_) => command
                .arg("restore")
                .arg(format!("--image-path={STAGE}/{IMAGE}")),
            None => command.arg("run"),
        };
        command.arg("--bundle=/run/bundle");
        if self.task != Task::SelfTest {
            command.args(["--detach", "--pid-file=/run/pid"]);
        }
        command
            .arg("sandbox")
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }
}

/// A network namespace with a veth pair for the sentry that is to run in it.
fn network() -> Result<(), DriverError> {
    sys::unshare(UnshareFlags::NEWNET).map_err(DriverError::step("make", "a network namespace"))?;
    // runsc takes a namespace in which it sees this directory's files for the host's, which newer
    // kernels show in every one. It looks in this mount namespace.
    rustix::mount::mount("none", NOT_THE_HOST, "tmpfs", MountFlags::RDONLY, None)
        .map_err(DriverError::step("hide", NOT_THE_HOST))?;
    tproxy::veth().map_err(wiring)
}

fn wiring(error: EgressError) -> DriverError {
    DriverError::step("wire", "the network")(io::Error::other(error))
}

/// Waits until `child` exits, and kills it after a timeout.
pub(super) fn wait(child: &mut Child, limit: Duration) -> io::Result<ExitStatus> {
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    let ended = pidfd_of(pid)?;
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: 0,
    };
    if poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&limit))? == 0 {
        child.kill()?;
        child.wait()?;
        return Err(io::ErrorKind::TimedOut.into());
    }
    child.wait()
}

/// The last line of runsc's log, in the working directory.
pub(super) fn why(status: ExitStatus) -> String {
    let mut log = Vec::new();
    if let Ok(file) = fs::File::open("log") {
        let _ = file.take(LOG_BYTES_MAX).read_to_end(&mut log);
    }
    let log = String::from_utf8_lossy(&log);
    let said: String = log
        .lines()
        .rfind(|line| !line.trim().is_empty())
        .unwrap_or_default()
        // What follows is a stack trace.
        .split("\\n")
        .next()
        .unwrap_or_default()
        .chars()
        .take(LOG_LINE_CHARS_MAX)
        .collect();
    format!("{status} {said}")
}
