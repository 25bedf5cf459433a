//! Resources of one driver's sandboxes in the launcher: directories, cgroups, uid ranges, first processes. Made
//! in an order that is recoverable after a crash, and removed without a trace.

use super::cgroup::{Cgroup, Cgroups};
use super::host::Host;
use super::kind::Kind;
use super::launcher::pidfd_of;
use super::record::Record;
use super::rootfs::Disk;
use super::share;
use crate::gvisor::state::{self, Saved};
use crate::{DriverError, SandboxSpec};
use k8e_model::{Limits, SandboxId};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SANDBOXES: &str = "sandboxes";

/// Deadline for a killed process to exit: milliseconds unless it is stuck in the kernel.
const DEATH_WAIT: Duration = Duration::from_secs(30);

/// The sandboxes of one driver.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    dir: PathBuf,
    kind: Kind,
    cgroups: Cgroups,
    server_gid: u32,
}

/// Resources of a new sandbox before its first process.
pub(crate) struct Prepared {
    pub(crate) dir: PathBuf,
    pub(crate) cgroup: Cgroup,
    pub(crate) disk: Disk,
    pub(crate) uid_base: u32,
    /// What root inside is on the disk; `uid_base` unless that is a copy.
    pub(crate) disk_uid_base: u32,
}

/// The first process of a sandbox.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
}

// === impl Sandboxes ===

impl Sandboxes {
    /// Sandboxes of one kind in the data directory. The server may connect to their guests, no more.
    pub(crate) fn open(data_dir: &Path, kind: Kind, server_gid: u32) -> Result<Self, DriverError> {
        let dir = data_dir.join(kind.directory());
        for dir in [dir.clone(), dir.join(SANDBOXES)] {
            fs::create_dir_all(&dir)
                .map_err(DriverError::step("make", dir.display().to_string()))?;
            share::directory(&dir, server_gid)?;
        }
        Ok(Self {
            cgroups: Cgroups::open(&stable_name(&dir))?,
            dir,
            kind,
            server_gid,
        })
    }

    /// The group of the server's process.
    pub(crate) fn server_gid(&self) -> u32 {
        self.server_gid
    }

    /// Directory for the driver's other files.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Directory of a sandbox's files.
    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.dir.join(SANDBOXES).join(id.as_str())
    }

    pub(crate) fn socket(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join(self.kind.socket())
    }

    /// The control group of a sandbox, whether it exists or not.
    pub(crate) fn group(&self, id: &SandboxId) -> Cgroup {
        self.cgroups.group(id)
    }

    /// Features that control groups lack here, one sentence each.
    pub(crate) fn weaker(&self) -> Vec<String> {
        let mut weaker = Vec::new();
        if !self.cgroups.can_freeze() {
            weaker.push(
                "sessions cannot be paused: there is no freezer of control groups; `mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer` and start the server again".to_owned(),
            );
        }
        weaker.extend(self.cgroups.weaker_disks());
        weaker
    }

    /// Makes the directory that reserves this id; an error when it exists.
    pub(crate) fn reserve(&self, id: &SandboxId) -> Result<PathBuf, DriverError> {
        let dir = self.sandbox(id);
        fs::create_dir(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        Ok(dir)
    }

    /// Makes a sandbox whose id is [reserved](Self::reserve); `start` forks its first process. On
    /// failure nothing is left.
    pub(crate) fn launch(
        &self,
        host: &Host,
        spec: &SandboxSpec,
        uid_base: u32,
        start: impl FnOnce(Prepared) -> Result<Started, DriverError>,
    ) -> Result<Started, DriverError> {
        let launched = self
            .prepare(host, spec, uid_base)
            .and_then(start)
            .and_then(|started| {
                Record::of(started.pid, uid_base)?.write(&self.sandbox(&spec.id))?;
                self.let_server_connect(&spec.id)?;
                Ok(started)
            });
        // The state that it may have been launched from stays.
        launched.map_err(|launch| with_cleanup(launch, self.remove_live(&spec.id)))
    }

    /// Runs `work` with the resources of a new sandbox, and removes them again.
    pub(crate) fn try_out<T>(
        &self,
        host: &Host,
        spec: &SandboxSpec,
        uid_base: u32,
        work: impl FnOnce(Prepared) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let done = self.prepare(host, spec, uid_base).and_then(work);
        let cleanup = self.remove(&spec.id);
        match done {
            Ok(done) => cleanup.map(|()| done),
            Err(error) => Err(with_cleanup(error, cleanup)),
        }
    }

    fn prepare(
        &self,
        host: &Host,
        spec: &SandboxSpec,
        uid_base: u32,
    ) -> Result<Prepared, DriverError> {
        let dir = self.sandbox(&spec.id);
        let disk = host.disk(&dir, spec.limits.disk_bytes)?;
        let cgroup = self.group(&spec.id);
        cgroup.create(&self.kind.host_limits(&spec.limits))?;
        self.set_memory_high(&cgroup, &spec.limits)?;
        Ok(Prepared {
            dir,
            cgroup,
            disk,
            uid_base,
            disk_uid_base: uid_base,
        })
    }

    /// Sets new limits of a sandbox's group.
    pub(crate) fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<(), DriverError> {
        let group = self.group(id);
        group.set_limits(&self.kind.host_limits(limits))?;
        self.set_memory_high(&group, limits)
    }

    fn set_memory_high(&self, group: &Cgroup, limits: &Limits) -> Result<(), DriverError> {
        match self.kind.memory_high(limits) {
            Some(high) => group.set_memory_high(high),
            None => Ok(()),
        }
    }

    /// Also for a sandbox of an earlier server, which may have run as root or as another user.
    pub(crate) fn let_server_connect(&self, id: &SandboxId) -> Result<(), DriverError> {
        let (dir, socket) = (self.sandbox(id), self.socket(id));
        share::directory(&dir, self.server_gid)?;
        // Where servers of earlier versions had the socket of a gVisor sandbox.
        let earlier = dir.join("shared/guest.sock");
        if !socket.exists() && earlier.exists() {
            fs::hard_link(&earlier, &socket)
                .map_err(DriverError::step("link", socket.display().to_string()))?;
        }
        share::socket(&socket, self.server_gid)
    }

    /// The first process of a live sandbox, from its record; none when it is dead or was never up.
    pub(crate) fn find(&self, id: &SandboxId) -> Result<Option<(Record, OwnedFd)>, DriverError> {
        let Some(record) = Record::read(&self.sandbox(id)) else {
            return Ok(None);
        };
        // The pidfd first: once it is open, the pid cannot be reused.
        let init = match pidfd_of(record.pid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            init => init.map_err(DriverError::step(
                "find",
                format!("the first process of {id}"),
            ))?,
        };
        Ok(record.is_alive().then_some((record, init)))
    }

    /// Kills it, waits until it has exited, and removes every trace; what is already gone is no error. The
    /// directory goes last.
    pub(crate) fn remove(&self, id: &SandboxId) -> Result<(), DriverError> {
        if self.kind.has_kernel() {
            state::forget(self, id)?;
        }
        self.remove_live(id)
    }

    /// The same for a sandbox whose saved state is to stay.
    pub(crate) fn remove_live(&self, id: &SandboxId) -> Result<(), DriverError> {
        self.end_processes(id)?;
        let dir = self.sandbox(id);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done.map_err(DriverError::step("remove", dir.display().to_string())),
        }
    }

    /// Kills it and waits until it has exited, with everything in its control group.
    pub(crate) fn end_processes(&self, id: &SandboxId) -> Result<(), DriverError> {
        let cgroup = self.group(id);
        if let Some((_, init)) = self.find(id)? {
            // When PID 1 exits the kernel kills every process of its pid namespace, and the mounts go with them.
            match rustix::process::pidfd_send_signal(&init, Signal::KILL) {
                Err(rustix::io::Errno::SRCH) => {}
                done => done.map_err(DriverError::step("kill", id.to_string()))?,
            }
            // A process that is frozen by cgroup v1 dies when it is thawed.
            cgroup.thaw()?;
            wait_for_end(&init)
                .map_err(DriverError::step("wait for the end of", id.to_string()))?;
        }
        cgroup.remove()
    }

    /// Ids of sandboxes of which any resource is left, in order, after `after`.
    pub(crate) fn ids(
        &self,
        after: Option<&SandboxId>,
        max: usize,
    ) -> Result<Vec<SandboxId>, DriverError> {
        let dir = self.dir.join(SANDBOXES);
        let mut found: BTreeSet<SandboxId> = self.cgroups.ids().into_iter().collect();
        found.extend(ids(&dir).map_err(DriverError::step("read", dir.display().to_string()))?);
        found.extend(state::ids(&self.dir));
        let behind = |id: &SandboxId| after.is_none_or(|after| id > after);
        Ok(found.into_iter().filter(behind).take(max).collect())
    }

    /// The uid ranges of live and of saved sandboxes, with their directories.
    pub(crate) fn uid_ranges(&self) -> Vec<(u32, PathBuf)> {
        let ids = ids(&self.dir.join(SANDBOXES)).unwrap_or_default();
        let dirs = ids.iter().map(|id| self.sandbox(id));
        let alive = dirs.filter_map(|dir| Some((Record::read(&dir)?.uid_base, dir)));
        let states = state::ids(&self.dir);
        let saved = states.iter().filter_map(|id| {
            let saved = Saved::read(self, id)?;
            Some((saved.uid_base, state::state_dir(self, id)))
        });
        alive.chain(saved).collect()
    }

    /// Removes the parent control group, when no sandbox is left in it.
    pub(crate) fn close(&self) {
        self.cgroups.close();
    }
}

/// Whether a sandbox of any driver lives on this data directory, or is saved there.
pub(super) fn any_alive(data_dir: &Path) -> bool {
    Kind::ALL.iter().any(|kind| {
        let driver = data_dir.join(kind.directory());
        let dir = driver.join(SANDBOXES);
        let ids = ids(&dir).unwrap_or_default();
        !state::ids(&driver).is_empty()
            || ids.iter().any(|id| {
                Record::read(&dir.join(id.as_str())).is_some_and(|record| record.is_alive())
            })
    })
}

/// Path of a guest's socket.
pub(super) fn socket(data_dir: &Path, kind: Kind, id: &SandboxId) -> PathBuf {
    let dir = data_dir.join(kind.directory()).join(SANDBOXES);
    dir.join(id.as_str()).join(kind.socket())
}

fn ids(dir: &Path) -> io::Result<Vec<SandboxId>> {
    let entries = fs::read_dir(dir)?.flatten();
    Ok(entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}

fn wait_for_end(process: &OwnedFd) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec {
        tv_sec: i64::try_from(DEATH_WAIT.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: 0,
    };
    match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit))? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
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

/// Hash of the data directory, stable across starts and versions, unlike std's (FNV-1a).
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
