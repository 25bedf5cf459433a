//! What the launcher's child does to make a gVisor sandbox: mounts its file system in a mount
//! namespace of its own, then has runsc start a kernel on it.
//!
//! Everything runsc needs lies in the stage, a small tmpfs that is moved to `/run` in this
//! namespace. So paths are short, which sockets need, and the same for every sandbox, whatever the
//! data directory is called; and runsc's own files are gone with the namespace.

use super::bundle::{GUEST, ROOT, SHARED};
use crate::DriverError;
use crate::local::birth::Report;
use crate::local::cgroup::Join;
use crate::local::cgroup::devices::KVM;
use crate::local::cgroup::io::DiskRate;
use crate::local::launcher::pidfd_of;
use crate::local::rootfs::{Rootfs, attach, clone_mount, make_dir};
use crate::local::sys;
use k8e_egress::{EgressError, wire};
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
const STAGE: &str = "/run";

/// What runsc looks at to find out whether it runs in the host's network namespace.
const NOT_THE_HOST: &str = "/proc/sys/net/core";

/// runsc takes a fifth of a second; on a machine under load some.
const RUNSC_WAIT: Duration = Duration::from_secs(30);

/// What is told of runsc's log when it fails.
const LOG_BYTES_MAX: u64 = 16 * 1024;
const LOG_LINE_CHARS_MAX: usize = 500;

/// The platform that needs a device.
const KVM_PLATFORM: &str = "kvm";

/// What the sandbox is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Task {
    /// Calls of the host, until it is ended.
    Serve,
    /// To find out whether a process can be made in it.
    SelfTest,
}

/// Everything about the new sandbox that is plain data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// How it gets into its control groups.
    pub(crate) join: Join,
    /// Its file system.
    pub(crate) rootfs: Rootfs,
    /// What it may do on disks.
    pub(crate) disk_rate: DiskRate,
    /// The guest's program. A file and not a descriptor: glibc insists that it has a path.
    pub(crate) guest: PathBuf,
    /// The host's directory in which its guest binds.
    pub(crate) shared: PathBuf,
    /// The bundle's configuration.
    pub(crate) config: String,
    /// The program.
    pub(crate) runsc: PathBuf,
    /// How the kernel inside gets hold of system calls.
    pub(crate) platform: String,
    /// Whether there will be a gate.
    pub(crate) network: bool,
    /// What for.
    pub(crate) task: Task,
}

/// Makes the sandbox; runs in a process of its own.
pub(crate) fn run(setup: &Setup, userns: BorrowedFd<'_>) -> Result<Report, DriverError> {
    // Before the rest: what is left of a launch that dies is found by its group.
    setup.join.enter()?;
    // runsc waits for its children, which nobody can who ignores them.
    sys::reset_signals();
    rustix::process::setsid().map_err(DriverError::step("start", "a session"))?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let _ = fs::write("/proc/self/oom_score_adj", "0");
    setup.rootfs.mount(userns)?;
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
    let step = || DriverError::step::<io::Error>("run", setup.runsc.display().to_string());
    let mut runsc = setup.command().spawn().map_err(step())?;
    let status = wait(&mut runsc).map_err(step())?;
    if !status.success() {
        return Err(step()(io::Error::other(why(status))));
    }
    match setup.task {
        Task::SelfTest => Ok(Report::Works),
        Task::Serve => {
            if setup.network {
                wire::connect_card().map_err(wiring)?;
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
    /// What only this driver's sandboxes have.
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
        for dir in ["bundle", "state"] {
            make_dir(Path::new(dir))?;
        }
        fs::write("bundle/config.json", &self.config)
            .map_err(DriverError::step("write", "bundle/config.json"))?;
        // The gofer walks through it as root of the sandbox, which is nobody here.
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
            .args(["--root=/run/state", "--log=/run/log"])
            .arg(format!("--platform={}", self.platform))
            // A stack of its own, on the card that it finds in its namespace; else loopback only.
            .arg(match self.network {
                true => "--network=sandbox",
                false => "--network=none",
            })
            // The group around it is ours.
            .arg("--ignore-cgroups")
            // So is the writable layer, which has a size.
            .arg("--overlay2=none")
            // The guest may bind a socket; nothing inside may connect to one of the host's.
            .arg("--host-uds=create")
            .args(["run", "--bundle=/run/bundle"]);
        if self.task == Task::Serve {
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

/// A namespace with a card for the kernel that is to run in it.
fn network() -> Result<(), DriverError> {
    sys::unshare(UnshareFlags::NEWNET).map_err(DriverError::step("make", "a network namespace"))?;
    // runsc takes a namespace in which it sees this directory's files for the host's, which newer
    // kernels show in every one. It looks in this mount namespace.
    rustix::mount::mount("none", NOT_THE_HOST, "tmpfs", MountFlags::RDONLY, None)
        .map_err(DriverError::step("hide", NOT_THE_HOST))?;
    wire::card().map_err(wiring)
}

fn wiring(error: EgressError) -> DriverError {
    DriverError::step("wire", "the network")(io::Error::other(error))
}

/// Waits for the end of `child`, and ends it when that takes too long.
fn wait(child: &mut Child) -> io::Result<ExitStatus> {
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    let ended = pidfd_of(pid)?;
    let limit = Timespec {
        tv_sec: i64::try_from(RUNSC_WAIT.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: 0,
    };
    if poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&limit))? == 0 {
        child.kill()?;
        child.wait()?;
        return Err(io::ErrorKind::TimedOut.into());
    }
    child.wait()
}

/// The last thing runsc had to say.
fn why(status: ExitStatus) -> String {
    let mut log = Vec::new();
    if let Ok(file) = fs::File::open("log") {
        let _ = file.take(LOG_BYTES_MAX).read_to_end(&mut log);
    }
    let log = String::from_utf8_lossy(&log);
    let said: String = log
        .lines()
        .rfind(|line| !line.trim().is_empty())
        .unwrap_or_default()
        .chars()
        .take(LOG_LINE_CHARS_MAX)
        .collect();
    format!("{status} {said}")
}
