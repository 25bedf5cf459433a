//! The sandboxes of one driver: what each has on this machine, made in the order that makes it
//! recoverable, and removed without a trace.

use super::cgroup::{Cgroup, Cgroups};
use super::launcher::pidfd_of;
use super::record::Record;
use super::rootfs::Disk;
use super::sandbox::LocalSandbox;
use super::{Machine, blocking, make_private_dir};
use crate::{DriverError, Sandbox as _, SandboxSpec};
use k8e_model::{Limits, SandboxId};
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SANDBOXES: &str = "sandboxes";

/// The sandboxes of one driver.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    pub(crate) machine: Machine,
    dir: PathBuf,
    pub(crate) cgroups: Cgroups,
    kind: Kind,
}

/// What tells the sandboxes of one driver from another's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// The driver's directory.
    pub(crate) name: &'static str,
    /// Where in a sandbox's directory its guest listens.
    pub(crate) socket: &'static str,
    /// What the control group around a sandbox gets.
    pub(crate) around: fn(&Limits) -> Limits,
    /// Whether each has a kernel of its own, which has its own idea of limits inside.
    pub(crate) has_kernel: bool,
}

/// What a new sandbox has before its first process.
pub(crate) struct Prepared {
    pub(crate) dir: PathBuf,
    pub(crate) cgroup: Cgroup,
    pub(crate) disk: Disk,
    pub(crate) uid_base: u32,
}

/// A sandbox's first process.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
}

// === impl Sandboxes ===

impl Sandboxes {
    /// Those of one kind in the data directory.
    pub(crate) fn open(machine: &Machine, kind: Kind) -> Result<Self, DriverError> {
        let dir = machine.dir().join(kind.name);
        make_private_dir(&dir)?;
        make_private_dir(&dir.join(SANDBOXES))?;
        Ok(Self {
            machine: machine.clone(),
            cgroups: Cgroups::open(&stable_name(&dir))?,
            dir,
            kind,
        })
    }

    /// Where the driver keeps what is not a sandbox.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.dir.join(SANDBOXES).join(id.as_str())
    }

    pub(crate) fn socket(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join(self.kind.socket)
    }

    /// What the control group around a sandbox gets.
    pub(super) fn around(&self, limits: &Limits) -> Limits {
        (self.kind.around)(limits)
    }

    /// What they lack on this machine, one sentence each.
    pub(crate) fn weaker(&self) -> Vec<String> {
        let mut weaker = self.machine.weaker();
        if !self.cgroups.can_freeze() {
            weaker.push(
                "sessions cannot be paused: there is no freezer of control groups; `mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer` and start the server again".to_owned(),
            );
        }
        weaker.extend(self.cgroups.weaker_disks());
        weaker
    }

    /// Whether each has a kernel of its own.
    pub(super) fn has_kernel(&self) -> bool {
        self.kind.has_kernel
    }

    /// Makes one; `start` makes its first process.
    pub(crate) async fn launch<F>(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        start: F,
    ) -> Result<LocalSandbox, DriverError>
    where
        F: FnOnce(&SandboxSpec, Prepared) -> Result<Started, DriverError> + Send + 'static,
    {
        let (own, spec, id) = (Arc::clone(self), spec.clone(), spec.id.clone());
        let (started, base) = blocking(move || own.launch_now(&spec, start)).await?;
        let launch = match LocalSandbox::new(Arc::clone(self), id.clone(), base, started.pidfd) {
            Ok(sandbox) => return Ok(sandbox),
            Err(launch) => launch,
        };
        let own = Arc::clone(self);
        Err(with_cleanup(
            launch,
            blocking(move || own.remove(&id, Some(base))).await,
        ))
    }

    /// Does `work` with everything a new sandbox has, and removes it again.
    pub(crate) fn try_out<T>(
        &self,
        spec: &SandboxSpec,
        work: impl FnOnce(Prepared) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let base = self.take_uids()?;
        let done = self.prepare(spec, base).and_then(work);
        let cleanup = self.remove(&spec.id, Some(base));
        match done {
            Ok(done) => cleanup.map(|()| done),
            Err(error) => Err(with_cleanup(error, cleanup)),
        }
    }

    /// On failure nothing is left.
    fn launch_now(
        &self,
        spec: &SandboxSpec,
        start: impl FnOnce(&SandboxSpec, Prepared) -> Result<Started, DriverError>,
    ) -> Result<(Started, u32), DriverError> {
        let base = self.take_uids()?;
        let launched = self
            .prepare(spec, base)
            .and_then(|prepared| start(spec, prepared))
            .and_then(|started| {
                Record::of(started.pid, base)?.write(&self.sandbox(&spec.id))?;
                Ok((started, base))
            });
        launched.map_err(|launch| with_cleanup(launch, self.remove(&spec.id, Some(base))))
    }

    fn take_uids(&self) -> Result<u32, DriverError> {
        self.machine.uids().take().ok_or_else(|| {
            DriverError::Exhausted(
                "all uid ranges for sandboxes are in use: wait for sessions to end".to_owned(),
            )
        })
    }

    fn prepare(&self, spec: &SandboxSpec, uid_base: u32) -> Result<Prepared, DriverError> {
        let dir = self.sandbox(&spec.id);
        fs::create_dir(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        let disk = self.machine.disk(&dir, spec.limits.disk_bytes)?;
        let cgroup = self.cgroups.group(&spec.id);
        cgroup.create(&self.around(&spec.limits))?;
        Ok(Prepared {
            dir,
            cgroup,
            disk,
            uid_base,
        })
    }

    /// Finds one of an earlier server again; none when it is dead.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        id: &SandboxId,
    ) -> Result<Option<LocalSandbox>, DriverError> {
        let Some(record) = Record::read(&self.sandbox(id)) else {
            return Ok(None);
        };
        // The descriptor first: once it is open, the pid cannot become another process's.
        let init = match pidfd_of(record.pid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            init => init.map_err(DriverError::step(
                "find",
                format!("the first process of {id}"),
            ))?,
        };
        if !record.is_alive() {
            return Ok(None);
        }
        self.machine.uids().keep(record.uid_base);
        let sandbox = LocalSandbox::new(Arc::clone(self), id.clone(), record.uid_base, init)?;
        // The server before us may have left it paused.
        sandbox.resume();
        Ok(Some(sandbox))
    }

    /// Removes every trace; what is already gone is no error. The directory goes last.
    pub(crate) fn remove(&self, id: &SandboxId, uid_base: Option<u32>) -> Result<(), DriverError> {
        self.cgroups.group(id).remove()?;
        let dir = self.sandbox(id);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(DriverError::step("remove", dir.display().to_string()))?,
        }
        if let Some(base) = uid_base {
            self.machine.uids().free(base);
        }
        Ok(())
    }

    /// Removes every trace of those that are not in `keep`.
    pub(crate) async fn sweep(
        self: &Arc<Self>,
        keep: &HashSet<SandboxId>,
    ) -> Result<Vec<SandboxId>, DriverError> {
        let (own, keep) = (Arc::clone(self), keep.clone());
        blocking(move || own.sweep_now(&keep)).await
    }

    fn sweep_now(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        let mut found: HashSet<SandboxId> = self.cgroups.ids().into_iter().collect();
        let dir = self.dir.join(SANDBOXES);
        found.extend(ids(&dir).map_err(DriverError::step("read", dir.display().to_string()))?);
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
                record.inspect(|record| self.machine.uids().keep(record.uid_base));
                failed = Some(error);
            }
        }
        failed.map_or(Ok(swept), Err)
    }
}

impl Drop for Sandboxes {
    fn drop(&mut self) {
        self.cgroups.close();
    }
}

/// Whether a sandbox of any driver lives on this data directory.
pub(super) fn any_alive(data_dir: &Path) -> bool {
    let drivers = fs::read_dir(data_dir).into_iter().flatten().flatten();
    drivers
        .map(|driver| driver.path().join(SANDBOXES))
        .any(|dir| {
            let ids = ids(&dir).unwrap_or_default();
            ids.iter().any(|id| {
                Record::read(&dir.join(id.as_str())).is_some_and(|record| record.is_alive())
            })
        })
}

fn ids(dir: &Path) -> io::Result<Vec<SandboxId>> {
    let entries = fs::read_dir(dir)?.flatten();
    Ok(entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}

fn with_cleanup(launch: DriverError, cleanup: Result<(), DriverError>) -> DriverError {
    match cleanup {
        Ok(()) => launch,
        Err(cleanup) => DriverError::Launch {
            launch: Box::new(launch),
            cleanup: Box::new(cleanup),
        },
    }
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
