//! Launches a sandbox with each driver, sends its guest a hello, and destroys it.

use super::{Check, Group, Subject, Verdict, existing, shown};
use crate::gvisor::runsc_found;
use crate::{
    DiskRate, Driver, DriverError, GvisorDriver, Machine, MachineConfig, NativeDriver, Platform,
    Probe, SandboxSpec,
};
use k8e_model::{Limits, RuntimeKind, SandboxId, Template};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::timeout;

/// A fresh guest answers in a millisecond; on a machine under load in a second.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

const NEEDS_ROOT: &str = "not tried: that needs root; run this command with sudo";

/// A data directory for as long as the trial takes, on the file system of the real one.
struct Scratch(PathBuf);

/// Results without root: the drivers are detected, not tried.
pub(super) fn without_root() -> Vec<Check> {
    let gvisor = match runsc_found(None) {
        Ok(runsc) => ok(RuntimeKind::Gvisor, runsc).with_verdict(Verdict::Unknown, NEEDS_ROOT),
        Err(reason) => missing(RuntimeKind::Gvisor, &reason),
    };
    let native = ok(RuntimeKind::Native, "namespaces on the host's kernel");
    let mut checks = vec![gvisor, native.with_verdict(Verdict::Unknown, NEEDS_ROOT)];
    checks.extend(not_built());
    checks
}

/// Makes a sandbox with each driver.
pub(super) fn run(subject: Subject) -> Vec<Check> {
    let mut checks = match try_all(subject) {
        Ok(checks) => checks,
        // The launcher did not start, so no driver works.
        Err(error) => [RuntimeKind::Gvisor, RuntimeKind::Native]
            .map(|kind| missing(kind, &shown(&error)))
            .into(),
    };
    checks.extend(not_built());
    checks
}

fn try_all(subject: Subject) -> Result<Vec<Check>, DriverError> {
    if subject.guest.is_empty() {
        let reason = "this k8e was built without its guest: build it with `cargo xtask build`";
        return Err(DriverError::Unusable(reason.to_owned()));
    }
    let scratch = Scratch::make(existing(&subject.data_dir))?;
    let lock = scratch.0.join("lock");
    let machine = Machine::start(MachineConfig {
        data_dir: scratch.0.clone(),
        guest: subject.guest,
        launcher: subject.launcher,
        lock: File::create(&lock)
            .map_err(DriverError::step("make", lock.display().to_string()))?
            .into(),
        memory_disks: false,
        limits_max: Limits::default(),
        server_gid: rustix::process::getgid().as_raw(),
        socket: None,
        disk_rate: DiskRate::default(),
        runsc: None,
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(DriverError::step("start", "a runtime"))?;
    let driver = NativeDriver::start(&machine);
    let native = runtime.block_on(try_one(&driver)).map(|()| driver.probe());
    // Trying it out is how it finds out whether it works.
    let driver = GvisorDriver::start(&machine, Platform::default());
    let mut gvisor = driver.probe();
    if let Probe::Usable { weaker } = &mut gvisor
        && let Err(error) = runtime.block_on(driver.try_checkpoint())
    {
        weaker.push(format!(
            "paused sessions stay in memory, because this runsc cannot save them ({}): install a newer one, or name it with --runsc",
            shown(&error)
        ));
    }
    let runsc = runsc_found(None).unwrap_or_default();
    Ok(vec![
        verdict(RuntimeKind::Gvisor, &runsc, Ok(gvisor)),
        verdict(
            RuntimeKind::Native,
            "namespaces on the host's kernel",
            native,
        ),
    ])
}

async fn try_one(driver: &NativeDriver) -> Result<(), DriverError> {
    let spec = SandboxSpec {
        id: SandboxId::random(),
        template: Template::Host,
        layers: Vec::new(),
        limits: Limits {
            disk_bytes: 64 << 20,
            ..Limits::default()
        },
    };
    let sandbox = driver.launch(&spec).await?;
    let answer = timeout(HELLO_WITHIN, sandbox.guest().hello()).await;
    sandbox.destroy().await?;
    let silent = |error: io::Error| DriverError::step("greet", "the guest")(error);
    match answer {
        Ok(answer) => answer.map_err(|error| silent(io::Error::other(error))),
        Err(_) => Err(silent(io::ErrorKind::TimedOut.into())),
    }
}

fn verdict(kind: RuntimeKind, what: &str, tried: Result<Probe, DriverError>) -> Check {
    match tried {
        Ok(Probe::Usable { weaker }) if weaker.is_empty() => {
            ok(kind, format!("{what}: made a sandbox"))
        }
        Ok(Probe::Usable { weaker }) => ok(kind, format!("{what}: made a sandbox"))
            .with_verdict(Verdict::Weaker, weaker.join("; ")),
        Ok(Probe::Broken { reason } | Probe::Unusable { reason }) => missing(kind, &reason),
        Err(error) => missing(kind, &shown(&error)),
    }
}

/// Runtimes that other versions have: listed with the reason why they cannot be used.
fn not_built() -> [Check; 2] {
    [RuntimeKind::Firecracker, RuntimeKind::Kata].map(|kind| {
        ok(kind, "not in this version of k8e")
            .with_verdict(Verdict::Missing, "use gvisor or native")
    })
}

fn ok(kind: RuntimeKind, found: impl Into<String>) -> Check {
    Check::ok(Group::Runtimes, kind.as_str(), found)
}

/// A reason is what is wrong, a colon, and what to do.
fn missing(kind: RuntimeKind, reason: &str) -> Check {
    ok(kind, "does not work").with_verdict(Verdict::Missing, reason)
}

// === impl Scratch ===

impl Scratch {
    fn make(below: &Path) -> Result<Self, DriverError> {
        let dir = below.join(format!(".k8e-check-{}", SandboxId::random()));
        let made = DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(DriverError::step("make", dir.display().to_string()))?;
        Ok(Self(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing of a sandbox is below: what failed to go is named by the error before.
        let _ = fs::remove_dir_all(&self.0);
    }
}
