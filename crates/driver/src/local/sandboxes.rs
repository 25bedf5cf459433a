//! The sandboxes of one driver, as the launcher has them: what each has on this machine, made in the
//! order that makes it recoverable, and removed without a trace.

use super::cgroup::{Cgroup, Cgroups};
use super::host::Host;
use super::kind::Kind;
use super::launcher::pidfd_of;
use super::record::Record;
use super::rootfs::Disk;
use super::share;
use crate::{DriverError, SandboxSpec};
use k8e_model::SandboxId;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SANDBOXES: &str = "sandboxes";

/// A killed process is gone in milliseconds unless the kernel itself is stuck.
const DEATH_WAIT: Duration = Duration::from_secs(30);

/// The sandboxes of one driver.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    dir: PathBuf,
    kind: Kind,
    cgroups: Cgroups,
    server_gid: u32,
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
    /// Those of one kind in the data directory. The server may connect to their guests, no more.
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

    /// Where the driver keeps what is not a sandbox.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a sandbox keeps what is on disk.
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

    /// What control groups cannot do here, one sentence each.
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

    /// Makes the directory that says that this id is taken; an error when it is.
    pub(crate) fn reserve(&self, id: &SandboxId) -> Result<PathBuf, DriverError> {
        let dir = self.sandbox(id);
        fs::create_dir(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        Ok(dir)
    }

    /// Makes a sandbox whose id is [reserved](Self::reserve); `start` makes its first process. On
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
        launched.map_err(|launch| with_cleanup(launch, self.remove(&spec.id)))
    }

    /// Does `work` with everything a new sandbox has, and removes it again.
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
        Ok(Prepared {
            dir,
            cgroup,
            disk,
            uid_base,
        })
    }

    /// Also for a sandbox of an earlier server, which may have been root or another user.
    pub(crate) fn let_server_connect(&self, id: &SandboxId) -> Result<(), DriverError> {
        let (dir, socket) = (self.sandbox(id), self.socket(id));
        share::directory(&dir, self.server_gid)?;
        if let Some(parent) = socket.parent().filter(|parent| *parent != dir) {
            share::directory(parent, self.server_gid)?;
        }
        share::socket(&socket, self.server_gid)
    }

    /// The first process of a live sandbox, by its record; none when it is dead or was never up.
    pub(crate) fn find(&self, id: &SandboxId) -> Result<Option<(Record, OwnedFd)>, DriverError> {
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
        Ok(record.is_alive().then_some((record, init)))
    }

    /// Kills it, waits for its end, and removes every trace; what is already gone is no error. The
    /// directory goes last.
    pub(crate) fn remove(&self, id: &SandboxId) -> Result<(), DriverError> {
        let cgroup = self.group(id);
        if let Some((_, init)) = self.find(id)? {
            // With PID 1 the kernel ends every process of its namespace, and with them the mounts.
            match rustix::process::pidfd_send_signal(&init, Signal::KILL) {
                Err(rustix::io::Errno::SRCH) => {}
                done => done.map_err(DriverError::step("kill", id.to_string()))?,
            }
            // A process that is frozen in a control group of v1 dies when that is over.
            cgroup.thaw()?;
            wait_for_end(&init)
                .map_err(DriverError::step("wait for the end of", id.to_string()))?;
        }
        cgroup.remove()?;
        let dir = self.sandbox(id);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done.map_err(DriverError::step("remove", dir.display().to_string())),
        }
    }

    /// Those of which anything is left, in order, behind `after`.
    pub(crate) fn ids(
        &self,
        after: Option<&SandboxId>,
        max: usize,
    ) -> Result<Vec<SandboxId>, DriverError> {
        let dir = self.dir.join(SANDBOXES);
        let mut found: BTreeSet<SandboxId> = self.cgroups.ids().into_iter().collect();
        found.extend(ids(&dir).map_err(DriverError::step("read", dir.display().to_string()))?);
        let behind = |id: &SandboxId| after.is_none_or(|after| id > after);
        Ok(found.into_iter().filter(behind).take(max).collect())
    }

    /// The uid ranges of those that live, with their directories.
    pub(crate) fn uid_ranges(&self) -> Vec<(u32, PathBuf)> {
        let ids = ids(&self.dir.join(SANDBOXES)).unwrap_or_default();
        let dirs = ids.iter().map(|id| self.sandbox(id));
        dirs.filter_map(|dir| Some((Record::read(&dir)?.uid_base, dir)))
            .collect()
    }

    /// Removes our own control group, when no sandbox is left in it.
    pub(crate) fn close(&self) {
        self.cgroups.close();
    }
}

/// Whether a sandbox of any driver lives on this data directory.
pub(super) fn any_alive(data_dir: &Path) -> bool {
    Kind::ALL.iter().any(|kind| {
        let dir = data_dir.join(kind.directory()).join(SANDBOXES);
        let ids = ids(&dir).unwrap_or_default();
        ids.iter()
            .any(|id| Record::read(&dir.join(id.as_str())).is_some_and(|record| record.is_alive()))
    })
}

/// Where the guest of a sandbox listens.
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
