//! How the launcher makes a gVisor sandbox, and finds out whether that works here.

use super::bundle;
use super::child::{self, Setup, Task};
use super::runsc::{Platform, Runsc};
use crate::local::birth::{self, Report};
use crate::local::host::Host;
use crate::local::kind::Kind;
use crate::local::launcher::{Failure, pidfd_of};
use crate::local::sandboxes::{Prepared, Sandboxes, Started};
use crate::{DriverError, SandboxSpec};
use k8e_model::{Limits, SandboxId, Template};
use rustix::fs::{Gid, Uid};
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// In the driver's directory: the guest's program.
const GUEST: &str = "guest";

/// In a sandbox's directory: what the guest can write to until it listens.
const SHARED: &str = "shared";

/// The guest listens some milliseconds after the sandbox runs; on a machine under load in a second.
const LISTEN_WAIT: Duration = Duration::from_secs(10);
const LISTEN_PAUSE: Duration = Duration::from_millis(1);

/// Writes the guest's program where runsc finds it. Sandboxes of an earlier server keep the file
/// they have.
pub(crate) fn write_guest(guest: &OwnedFd, dir: &Path) -> io::Result<()> {
    let guest = fs::read(format!("/proc/self/fd/{}", guest.as_raw_fd()))?;
    let (new, path) = (dir.join("guest.new"), dir.join(GUEST));
    if fs::read(&path).is_ok_and(|there| there == guest) {
        return Ok(());
    }
    fs::write(&new, guest)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    fs::rename(new, path)
}

/// A sandbox to find out with whether one can be made.
pub(crate) fn trial() -> SandboxSpec {
    SandboxSpec {
        id: SandboxId::random(),
        template: Template::Host,
        limits: Limits {
            disk_bytes: 64 << 20,
            ..Limits::default()
        },
    }
}

/// Whether the runsc that is installed made a sandbox here before.
pub(crate) fn worked_before(sandboxes: &Sandboxes, platform: Platform) -> bool {
    Runsc::find().is_ok_and(|runsc| runsc.worked_before(sandboxes.dir(), platform))
}

/// A real sandbox whose guest makes a process: some builds of runsc die of that. What worked is
/// remembered.
pub(crate) fn try_out(
    host: &Host,
    sandboxes: &Sandboxes,
    spec: &SandboxSpec,
    prepared: Prepared,
    platform: Platform,
) -> Result<(), DriverError> {
    let runsc = Runsc::find().map_err(DriverError::Unusable)?;
    let uid_base = prepared.uid_base;
    let task = Task::SelfTest;
    let setup = setup(host, sandboxes, spec, prepared, &runsc, platform, task)?;
    match run(&setup, uid_base)? {
        Some(Report::Works) => {
            runsc.remember(sandboxes.dir(), platform);
            Ok(())
        }
        _ => Err(vanished()),
    }
}

/// Has runsc make the sandbox and waits until its guest listens.
pub(crate) fn start(
    host: &Host,
    sandboxes: &Sandboxes,
    spec: &SandboxSpec,
    prepared: Prepared,
    platform: Platform,
) -> Result<Started, DriverError> {
    let runsc = Runsc::find().map_err(DriverError::Unusable)?;
    let (id, uid_base, task) = (&spec.id, prepared.uid_base, Task::Serve);
    let setup = setup(host, sandboxes, spec, prepared, &runsc, platform, task)?;
    let Some(Report::Running { pid }) = run(&setup, uid_base)? else {
        return Err(vanished());
    };
    let sentry = || format!("the kernel of {id}");
    let pidfd = pidfd_of(pid).map_err(DriverError::step("find", sentry()))?;
    // The descriptor is open: whichever process has the number now keeps it. Is it still ours?
    if !sandboxes.group(id).holds(pid) {
        return Err(vanished());
    }
    wait_for_guest(&sandboxes.socket(id), &pidfd)
        .map_err(DriverError::step("wait for the guest of", id.to_string()))?;
    Ok(Started { pid, pidfd })
}

fn setup(
    host: &Host,
    sandboxes: &Sandboxes,
    spec: &SandboxSpec,
    prepared: Prepared,
    runsc: &Runsc,
    platform: Platform,
    task: Task,
) -> Result<Setup, DriverError> {
    debug_assert!(Kind::Gvisor.socket().starts_with(SHARED));
    let shared = prepared.dir.join(SHARED);
    let step = || DriverError::step::<io::Error>("make", shared.display().to_string());
    fs::create_dir(&shared).map_err(step())?;
    // For root inside alone: who connects can run commands as root.
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o700)).map_err(step())?;
    let owner = prepared.uid_base;
    rustix::fs::chown(
        &shared,
        Some(Uid::from_raw(owner)),
        Some(Gid::from_raw(owner)),
    )
    .map_err(DriverError::step("chown", shared.display().to_string()))?;
    Ok(Setup {
        join: prepared.cgroup.join(),
        config: bundle::config(&spec.limits, prepared.uid_base, task),
        rootfs: host.rootfs(spec, prepared.disk, prepared.uid_base),
        disk_rate: host.disk_rate(),
        shared,
        guest: sandboxes.dir().join(GUEST),
        runsc: runsc.path.clone(),
        platform: platform.as_str().to_owned(),
        network: host.has_network(),
        task,
    })
}

fn run(setup: &Setup, uid_base: u32) -> Result<Option<Report>, DriverError> {
    let forked = birth::fork(libc::CLONE_NEWNS, &setup.join, uid_base, |userns| {
        child::run(setup, userns.as_fd())
            .unwrap_or_else(|error| Report::Failed(Failure::from(&error)))
    });
    forked?.wait()
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

fn vanished() -> DriverError {
    DriverError::step("run", "runsc")(io::Error::other("it ended and did not say why"))
}
