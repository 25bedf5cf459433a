//! Launches a gVisor sandbox in the launcher, and tries out whether runsc works here.

use super::bundle;
use super::child::{self, Setup, Task};
use super::runsc::{Platform, Runsc};
use super::socket;
use super::state::{self, Launched, Memory, Saved};
use crate::local::birth::{self, Report};
use crate::local::host::Host;
use crate::local::launcher::{Failure, pidfd_of};
use crate::local::sandboxes::{Prepared, Sandboxes, Started};
use crate::{DriverError, SandboxSpec};
use k8e_model::{Limits, SandboxId, Template};
use k8e_net::proc_fd;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Name of the guest executable in the driver's directory.
pub(super) const GUEST: &str = "guest";

/// In a sandbox's directory: runsc's own files.
pub(super) const STATE: &str = "runsc";

/// Writes the guest's program where runsc finds it. Sandboxes of an earlier server keep the file
/// they have.
pub(crate) fn write_guest(guest: &OwnedFd, dir: &Path) -> io::Result<()> {
    let guest = fs::read(proc_fd::path(guest))?;
    let (new, path) = (dir.join("guest.new"), dir.join(GUEST));
    if fs::read(&path).is_ok_and(|there| there == guest) {
        return Ok(());
    }
    fs::write(&new, guest)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    fs::rename(new, path)
}

/// Spec of the trial sandbox.
pub(crate) fn trial() -> SandboxSpec {
    SandboxSpec {
        id: SandboxId::random(),
        template: Template::Host,
        layers: Vec::new(),
        limits: Limits {
            disk_bytes: 64 << 20,
            ..Limits::default()
        },
    }
}

/// The runsc of this server.
pub(crate) fn runsc(host: &Host) -> Result<Runsc, DriverError> {
    Runsc::find(host.runsc()).map_err(DriverError::Unusable)
}

/// Whether the installed runsc passed its trial before.
pub(crate) fn worked_before(host: &Host, sandboxes: &Sandboxes, platform: Platform) -> bool {
    runsc(host).is_ok_and(|runsc| runsc.worked_before(sandboxes.dir(), platform))
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
    let runsc = runsc(host)?;
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

/// Has runsc make the sandbox, or continue one from its checkpoint, and waits until its guest listens.
pub(crate) fn start(
    host: &Host,
    sandboxes: &Sandboxes,
    spec: &SandboxSpec,
    prepared: Prepared,
    runsc: &Runsc,
    platform: Platform,
    from: Option<&Memory>,
) -> Result<Started, DriverError> {
    let (id, uid_base) = (&spec.id, prepared.uid_base);
    let dir = prepared.dir.clone();
    let disk_uid_base = Some(prepared.disk_uid_base).filter(|base| *base != uid_base);
    let launched = Launched::new(runsc, platform, spec, disk_uid_base);
    launched.write(&dir)?;
    let lent = socket::make(&dir, uid_base, from.map(|memory| memory.socket))?;
    let mut setup = setup(
        host,
        sandboxes,
        spec,
        prepared,
        runsc,
        platform,
        Task::Serve,
    )?;
    setup.shared = lent.path().to_owned();
    setup.image = from.map(|memory| memory.image.clone());
    setup.copied = from.is_some() && disk_uid_base.is_some();
    let Some(Report::Running { pid }) = run(&setup, uid_base)? else {
        return Err(vanished());
    };
    let sentry = || format!("the kernel of {id}");
    let pidfd = pidfd_of(pid).map_err(DriverError::step("find", sentry()))?;
    // With the pidfd open the pid cannot be reused. Check that it is still the sentry.
    if !sandboxes.group(id).holds(pid) {
        return Err(vanished());
    }
    lent.wait(sandboxes, id, &pidfd)?;
    Ok(Started { pid, pidfd })
}

/// A sandbox that is launched from a state.
pub(crate) struct FromState<'a> {
    /// The state and its id.
    pub(crate) saved: &'a Saved,
    pub(crate) state: &'a SandboxId,
    /// The sandbox: the one that was saved, or a new one.
    pub(crate) id: &'a SandboxId,
    pub(crate) limits: &'a Limits,
    pub(crate) uid_base: u32,
}

/// Makes a sandbox run from a copy of a state; why it has only its files, if so. On failure nothing of it is left but
/// the state.
pub(crate) fn restore(
    host: &Host,
    sandboxes: &Sandboxes,
    from: &FromState<'_>,
) -> Result<(Started, Option<String>), DriverError> {
    let saved = from.saved;
    let spec = state::spec_with(saved, from.id, from.limits);
    let dir = sandboxes.sandbox(&spec.id);
    if let Err(error) = Saved::copy_to(sandboxes, from.state, &dir) {
        let _ = sandboxes.remove_live(&spec.id);
        return Err(error);
    }
    let (memory, lost) = match saved.memory(sandboxes, from.state) {
        Ok(memory) => (Some(memory), None),
        Err(reason) => (None, Some(reason)),
    };
    let platform = saved.launched.platform;
    let started = sandboxes.launch(host, &spec, from.uid_base, |mut prepared| {
        prepared.disk_uid_base = saved.disk_uid_base();
        let runsc = match memory {
            Some(_) => saved.launched.runsc.clone(),
            None => runsc(host)?,
        };
        start(
            host,
            sandboxes,
            &spec,
            prepared,
            &runsc,
            platform,
            memory.as_ref(),
        )
    })?;
    Ok((started, lost))
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
    let make = |name: &str| {
        let dir = prepared.dir.join(name);
        let made = fs::create_dir(&dir);
        made.map_err(DriverError::step("make", dir.display().to_string()))?;
        Ok::<_, DriverError>(dir)
    };
    let state = make(STATE)?;
    // A link of its own: a checkpoint needs the very program, also when the server has a newer one.
    let guest = prepared.dir.join(GUEST);
    if !guest.exists() {
        fs::hard_link(sandboxes.dir().join(GUEST), &guest)
            .map_err(DriverError::step("link", guest.display().to_string()))?;
    }
    Ok(Setup {
        join: prepared.cgroup.join(),
        config: bundle::config(&spec.limits, prepared.uid_base, task),
        rootfs: host.rootfs(
            spec,
            prepared.disk,
            prepared.uid_base,
            prepared.disk_uid_base,
        )?,
        disk_rate: host.disk_rate(),
        shared: state.clone(),
        guest,
        runsc: runsc.path.clone(),
        platform: platform.as_str().to_owned(),
        network: host.has_network(),
        task,
        state,
        image: None,
        copied: false,
    })
}

fn run(setup: &Setup, uid_base: u32) -> Result<Option<Report>, DriverError> {
    let owners = setup.rootfs.owners()?;
    let forked = birth::fork(libc::CLONE_NEWNS, &setup.join, uid_base, |userns| {
        child::run(setup, userns.as_fd(), &owners)
            .unwrap_or_else(|error| Report::Failed(Failure::from(&error)))
    });
    forked?.wait()
}

fn vanished() -> DriverError {
    DriverError::step("run", "runsc")(io::Error::other("it exited without a report"))
}
