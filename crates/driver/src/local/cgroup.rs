//! Control groups (cgroup v1 and v2): one group per sandbox, below one group per data directory.
//!
//! ```text
//! v1  <mount of memory|cpu|pids|freezer|devices|blkio>/k8e/<data directory>/<sandbox>
//!     <mount of hugetlb>/k8e
//! v2  <mount>/k8e/<data directory>/<sandbox>
//! ```

pub(crate) mod devices;
pub(crate) mod io;

mod freezer;
mod huge_pages;

use crate::DriverError;
use k8e_model::{LimitEvents, Limits, SandboxId};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// CFS period. The kernel's default; shorter wakes more often, longer makes throttling noticeable.
const CPU_PERIOD_US: u64 = 100_000;

/// Attempts to remove a group: a killed process leaves it when it is reaped, a moment later.
const REMOVE_TRIES: u32 = 200;
const REMOVE_PAUSE: Duration = Duration::from_millis(5);

/// Pidfds that are open at once while a group is killed, which may have thousands of processes: well
/// below the limit of open files.
const KILLED_AT_ONCE_MAX: usize = 128;

/// The kernel's own default of `pid_max`.
const PID_MAX_DEFAULT: u64 = 32_768;

/// The controllers that are required.
const CONTROLLERS: [&str; 3] = [MEMORY, CPU, PIDS];

const MEMORY: &str = "memory";
const CPU: &str = "cpu";
const PIDS: &str = "pids";

/// v1: the controller that freezes a group. Without it sandboxes cannot be frozen; all else works. v2 needs
/// no controller for it.
const FREEZER: &str = "freezer";

/// v1: the controller of device access. v2 has an eBPF program for it.
const DEVICES: &str = "devices";

/// v1: the controller of disk I/O. On v2 it is `io`.
const BLKIO: &str = "blkio";

/// v1: the controller that counts CPU time, often mounted together with `cpu`. On v2 that is part of `cpu`.
const CPUACCT: &str = "cpuacct";

/// v1: controllers that are used where they are mounted.
const OPTIONAL: [&str; 4] = [FREEZER, DEVICES, BLKIO, CPUACCT];

/// v2: the controller of disk I/O, which is optional.
const IO: &str = "io";

/// v1: buffers of TCP and UDP sockets do not count as memory there. They may take a quarter of the memory
/// limit, in addition to it.
const SOCKET_BUFFERS_PART: u64 = 4;

/// v1: the file through which a thread joins a group.
const TASKS: &str = "tasks";

/// Bytes read of a file of event counters.
const EVENTS_BYTES_MAX: usize = 512;

/// The cgroup hierarchies of this machine, and the parent groups of k8e in them.
#[derive(Clone, Debug)]
pub(crate) struct Cgroups {
    version: Version,
    parents: Dirs,
    /// v1: the group of all sandboxes with a hugetlb limit of 0, where the kernel has the controller.
    huge_pages: Option<PathBuf>,
}

/// v1: a directory for each of CONTROLLERS and for each mounted one of OPTIONAL. v2: the same directory for
/// each controller that it has.
type Dirs = Vec<(&'static str, PathBuf)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// How the first process joins a group without the kernel's `cgroup_threadgroup_rwsem`, which may take
/// twenty milliseconds: not through `cgroup.procs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Join {
    /// v1: a single-threaded process writes 0 to `tasks` of each of these.
    Write(Groups),
    /// v2: the process is cloned into this group (`CLONE_INTO_CGROUP`).
    CloneInto(PathBuf),
}

/// v1: the directories of one sandbox's group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Groups {
    /// Directory of the memory controller; also in `first`.
    memory: PathBuf,
    /// Joined first.
    first: Vec<PathBuf>,
    /// Joined once the file system is mounted, which needs devices that the sandbox must not have.
    devices: Option<PathBuf>,
    /// Directory of the blkio controller; also in `first`.
    blkio: Option<PathBuf>,
}

/// The group of one sandbox.
#[derive(Debug)]
pub(crate) struct Cgroup {
    version: Version,
    dirs: Dirs,
    /// The same for all sandboxes; see [`Cgroups`].
    huge_pages: Option<PathBuf>,
}

/// Files with counters of limit events, kept open by the server: they are read before and
/// after every command. None where the kernel has no such file.
#[derive(Debug)]
pub(crate) struct LimitCounters {
    pub(crate) memory: Option<File>,
    pub(crate) pids: Option<File>,
}

// === impl LimitCounters ===

impl LimitCounters {
    /// Reads the counters.
    pub(crate) fn read(&self) -> LimitEvents {
        LimitEvents {
            oom_kills: counter(self.memory.as_ref(), "oom_kill"),
            pids_refused: counter(self.pids.as_ref(), "max"),
        }
    }
}

// === impl Join ===

impl Join {
    /// The file that has the group's memory limit.
    pub(crate) fn memory_limit(&self) -> PathBuf {
        match self {
            Self::Write(groups) => groups.memory.join("memory.limit_in_bytes"),
            Self::CloneInto(dir) => dir.join("memory.max"),
        }
    }

    /// Joins the groups, where the process was not cloned into them.
    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        let Self::Write(groups) = self else {
            return Ok(());
        };
        for dir in &groups.first {
            let step = DriverError::step("join", dir.display().to_string());
            fs::write(dir.join(TASKS), "0").map_err(step)?;
        }
        Ok(())
    }
}

// === impl Cgroups ===

impl Cgroups {
    /// Finds the hierarchies and makes our group in each. `name` is unique to the data directory.
    pub(crate) fn open(name: &str) -> Result<Self, DriverError> {
        let (version, roots) = mounted()?;
        let mut parents = Dirs::new();
        for (controller, root) in roots {
            let parent = root.join("k8e").join(name);
            fs::create_dir_all(&parent)
                .map_err(DriverError::step("make", parent.display().to_string()))?;
            if version == Version::V2 {
                for dir in [root.as_path(), &root.join("k8e"), &parent] {
                    put(dir, "cgroup.subtree_control", &format!("+{controller}"))?;
                }
            }
            if controller == PIDS {
                put(&root.join("k8e"), "pids.max", &all_pids_max().to_string())?;
            }
            parents.push((controller, parent));
        }
        let huge_pages = huge_pages::refuse(version)?;
        Ok(Self {
            version,
            parents,
            huge_pages,
        })
    }

    /// The group of one sandbox, whether it exists or not.
    pub(crate) fn group(&self, id: &SandboxId) -> Cgroup {
        Cgroup {
            version: self.version,
            dirs: self
                .parents
                .iter()
                .map(|(controller, parent)| (*controller, parent.join(id.as_str())))
                .collect(),
            huge_pages: self.huge_pages.clone(),
        }
    }

    /// The sandboxes that have a group.
    pub(crate) fn ids(&self) -> Vec<SandboxId> {
        let mut ids: Vec<SandboxId> = Vec::new();
        for (_, parent) in &self.parents {
            let Ok(entries) = fs::read_dir(parent) else {
                continue;
            };
            let dirs = entries
                .flatten()
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            ids.extend(dirs.filter_map(|entry| entry.file_name().to_str()?.parse().ok()));
        }
        ids.sort();
        ids.dedup();
        ids
    }

    /// Whether processes of a group can be frozen.
    pub(crate) fn can_freeze(&self) -> bool {
        self.version == Version::V2 || self.has(FREEZER)
    }

    fn has(&self, wanted: &str) -> bool {
        self.parents.iter().any(|(name, _)| *name == wanted)
    }

    /// Removes the parent group, when no sandbox is left in it.
    pub(crate) fn close(&self) {
        for (_, parent) in &self.parents {
            let _ = fs::remove_dir(parent);
        }
    }
}

/// Limit of processes and threads of all sandboxes together: a part of `pid_max` and `threads-max`.
fn all_pids_max() -> u64 {
    let limits = ["pid_max", "threads-max"].map(|name| {
        let limit = fs::read_to_string(Path::new("/proc/sys/kernel").join(name));
        limit
            .ok()
            .and_then(|limit| limit.trim().parse::<u64>().ok())
    });
    let limit = limits.into_iter().flatten().min();
    limit.unwrap_or(PID_MAX_DEFAULT) / 4 * 3
}

/// Version, controllers and mount points, for `k8e check-config`.
pub(crate) fn describe() -> Result<String, DriverError> {
    let (version, roots) = mounted()?;
    let number = match version {
        Version::V1 => 1,
        Version::V2 => 2,
    };
    let controllers: Vec<_> = roots.iter().map(|(name, _)| *name).collect();
    let mut places: Vec<_> = roots
        .iter()
        .map(|(_, root)| root.display().to_string())
        .collect();
    places.dedup();
    Ok(format!(
        "v{number} with {} ({})",
        controllers.join(", "),
        places.join(", ")
    ))
}

fn mounted() -> Result<(Version, Dirs), DriverError> {
    let mounts = fs::read_to_string("/proc/self/mounts")
        .map_err(DriverError::step("read", "/proc/self/mounts"))?;
    find(&mounts).ok_or_else(|| {
        DriverError::Unusable(format!(
            "control groups for {} are not mounted: mount cgroup2 on /sys/fs/cgroup, or the v1 controllers below it",
            CONTROLLERS.join(", ")
        ))
    })
}

/// v2 if it has all controllers, else v1. On hybrid machines v2 is mounted without controllers.
fn find(mounts: &str) -> Option<(Version, Dirs)> {
    let lines = || {
        mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .filter(|fields| fields.len() >= 4)
    };
    for fields in lines().filter(|fields| fields[2] == "cgroup2") {
        let root = PathBuf::from(fields[1]);
        let offered = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        let has = |wanted: &str| offered.split_whitespace().any(|have| have == wanted);
        if CONTROLLERS.into_iter().all(has) {
            let all = CONTROLLERS
                .into_iter()
                .chain([IO].into_iter().filter(|name| has(name)));
            return Some((Version::V2, all.map(|name| (name, root.clone())).collect()));
        }
    }
    let v1 = |controller: &'static str| {
        lines()
            .find(|fields| {
                fields[2] == "cgroup" && fields[3].split(',').any(|option| option == controller)
            })
            .map(|fields| (controller, PathBuf::from(fields[1])))
    };
    let mut roots = CONTROLLERS.map(v1).into_iter().collect::<Option<Dirs>>()?;
    roots.extend(OPTIONAL.into_iter().filter_map(v1));
    Some((Version::V1, roots))
}

// === impl Cgroup ===

impl Cgroup {
    /// Makes the group and sets its limits.
    pub(crate) fn create(&self, limits: &Limits) -> Result<(), DriverError> {
        for (_, dir) in &self.dirs {
            match fs::create_dir(dir) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                done => done.map_err(DriverError::step("make", dir.display().to_string()))?,
            }
        }
        self.set_limits(limits)
    }

    /// Sets limits, also on a group that has some.
    pub(crate) fn set_limits(&self, limits: &Limits) -> Result<(), DriverError> {
        let quota = (u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000).to_string();
        let memory = limits.memory_bytes.to_string();
        let (memory_dir, cpu, pids) = (self.dir(MEMORY), self.dir(CPU), self.dir(PIDS));
        match self.version {
            Version::V1 => {
                put_memory(memory_dir, &memory)?;
                put_socket_buffers(memory_dir, limits.memory_bytes / SOCKET_BUFFERS_PART)?;
                put(cpu, "cpu.cfs_period_us", &CPU_PERIOD_US.to_string())?;
                put(cpu, "cpu.cfs_quota_us", &quota)?;
            }
            Version::V2 => {
                put(memory_dir, "memory.max", &memory)?;
                if memory_dir.join("memory.swap.max").exists() {
                    put(memory_dir, "memory.swap.max", "0")?;
                }
                put(cpu, "cpu.max", &format!("{quota} {CPU_PERIOD_US}"))?;
            }
        }
        put(pids, "pids.max", &limits.pids.to_string())
    }

    /// v2: `memory.high`, above which the kernel throttles allocations and reclaims; v1 has no such limit.
    pub(crate) fn set_memory_high(&self, bytes: u64) -> Result<(), DriverError> {
        match self.version {
            Version::V1 => Ok(()),
            Version::V2 => put(self.dir(MEMORY), "memory.high", &bytes.to_string()),
        }
    }

    /// Files with the memory usage of the group: the total, and its parts.
    pub(crate) fn memory_use(&self) -> Option<(File, File)> {
        let total = match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        let open = |file: &str| File::open(self.dir(MEMORY).join(file)).ok();
        Some((open(total)?, open("memory.stat")?))
    }

    /// The file with the CPU time of the group; none where it is not counted.
    pub(crate) fn cpu_time(&self) -> Option<File> {
        let (dir, file) = match self.version {
            Version::V1 => (self.optional(CPUACCT)?, "cpuacct.usage"),
            Version::V2 => (self.dir(CPU), "cpu.stat"),
        };
        File::open(dir.join(file)).ok()
    }

    /// Directory of a required controller.
    fn dir(&self, controller: &str) -> &Path {
        self.optional(controller)
            .expect("groups are made only where all of CONTROLLERS are")
    }

    /// Directory of an optional controller.
    fn optional(&self, controller: &str) -> Option<&Path> {
        let mut dirs = self.dirs.iter();
        let (_, dir) = dirs.find(|(name, _)| *name == controller)?;
        Some(dir)
    }

    /// How a sandbox's first process joins it.
    pub(crate) fn join(&self) -> Join {
        match self.version {
            Version::V1 => {
                let first = self.dirs.iter().filter(|(name, _)| *name != DEVICES);
                let owned = |name| self.optional(name).map(Path::to_owned);
                Join::Write(Groups {
                    memory: self.dir(MEMORY).to_owned(),
                    first: first
                        .map(|(_, dir)| dir)
                        .chain(&self.huge_pages)
                        .cloned()
                        .collect(),
                    devices: owned(DEVICES),
                    blkio: owned(BLKIO),
                })
            }
            Version::V2 => Join::CloneInto(self.dir(MEMORY).to_owned()),
        }
    }

    /// Whether a process is in it.
    pub(crate) fn holds(&self, pid: i32) -> bool {
        Pid::from_raw(pid).is_some_and(|pid| members(self.dir(MEMORY)).contains(&pid))
    }

    /// The files of [`LimitCounters`].
    pub(crate) fn counters(&self) -> LimitCounters {
        let memory = match self.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        LimitCounters {
            memory: File::open(self.dir(MEMORY).join(memory)).ok(),
            pids: File::open(self.dir(PIDS).join("pids.events")).ok(),
        }
    }

    /// Kills every process in it. Only for launches that died halfway: a sandbox's processes die with its PID 1.
    pub(crate) fn kill(&self) {
        for (_, dir) in &self.dirs {
            // v1 has no such file.
            if fs::write(dir.join("cgroup.kill"), "1").is_err() {
                kill_members(|| members(dir));
            }
        }
        // v1: a frozen process dies when it is thawed.
        let _ = self.thaw();
    }

    /// Removes it once it is empty; kills what is still in it.
    ///
    /// v1: the kernel keeps a removed memory group for as long as there are pages of the host's files that the
    /// group was the first to read: 152 of 200 groups in one measurement. They are not emptied here
    /// (`memory.force_empty`): that takes up to tens of milliseconds, and the next sandbox would read the
    /// host's programs from the disk again. They go when memory is needed.
    pub(crate) fn remove(&self) -> Result<(), DriverError> {
        for (_, dir) in &self.dirs {
            let mut tries = 0;
            loop {
                match fs::remove_dir(dir) {
                    Ok(()) => break,
                    Err(error) if error.kind() == ErrorKind::NotFound => break,
                    Err(_) if tries < REMOVE_TRIES => {
                        self.kill();
                        tries += 1;
                        std::thread::sleep(REMOVE_PAUSE);
                    }
                    Err(error) => {
                        return Err(DriverError::step("remove", dir.display().to_string())(
                            error,
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Kills the processes that `list` lists. A process id may be reused before the signal, so
/// the signal goes to a pidfd, and only when the process is listed while that is held: the pidfd is
/// then of the listed process, or of one that has ended.
fn kill_members(mut list: impl FnMut() -> Vec<Pid>) {
    let listed = list();
    for pids in listed.chunks(KILLED_AT_ONCE_MAX) {
        let open = |pid: &Pid| Some((*pid, pidfd_open(*pid, PidfdFlags::empty()).ok()?));
        let held: Vec<_> = pids.iter().filter_map(open).collect();
        let still = list();
        for (_, pidfd) in held.iter().filter(|(pid, _)| still.contains(pid)) {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

/// The processes in the group at `dir`.
fn members(dir: &Path) -> Vec<Pid> {
    let pids = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let pids = pids.lines().filter_map(|line| line.parse::<i32>().ok());
    // 0 is a process outside of this pid namespace.
    let pids = pids.filter(|pid| *pid > 0);
    pids.filter_map(Pid::from_raw).collect()
}

/// v1: memory, and memory with swap, which must never be the smaller: when raising, it is set first.
fn put_memory(dir: &Path, memory: &str) -> Result<(), DriverError> {
    const MEMORY: &str = "memory.limit_in_bytes";
    const WITH_SWAP: &str = "memory.memsw.limit_in_bytes";
    // Absent on kernels that do not account swap.
    if !dir.join(WITH_SWAP).exists() {
        return put(dir, MEMORY, memory);
    }
    if put(dir, MEMORY, memory).is_ok() {
        return put(dir, WITH_SWAP, memory);
    }
    put(dir, WITH_SWAP, memory)?;
    put(dir, MEMORY, memory)
}

/// v1: limit of TCP buffers, in addition to memory. The kernel accounts sockets that are made after it is
/// first set. Absent on kernels that do not account them.
fn put_socket_buffers(dir: &Path, bytes: u64) -> Result<(), DriverError> {
    const SOCKET_BUFFERS: &str = "memory.kmem.tcp.limit_in_bytes";
    if !dir.join(SOCKET_BUFFERS).exists() {
        return Ok(());
    }
    put(dir, SOCKET_BUFFERS, &bytes.to_string())
}

fn put(dir: &Path, file: &str, value: &str) -> Result<(), DriverError> {
    let path = dir.join(file);
    fs::write(&path, value).map_err(|source| DriverError::Step {
        operation: "write",
        object: format!("{value} to {}", path.display()),
        source,
    })
}

fn counter(file: Option<&File>, key: &str) -> u64 {
    let mut text = [0; EVENTS_BYTES_MAX];
    let read = file.and_then(|file| file.read_at(&mut text, 0).ok());
    let text = std::str::from_utf8(&text[..read.unwrap_or(0)]).unwrap_or_default();
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    value
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}

/// CPU time from a file of [`Cgroup::cpu_time`]: v1 nanoseconds, v2 a line with microseconds.
pub(crate) fn cpu_time(file: &File) -> Option<Duration> {
    let mut text = [0; EVENTS_BYTES_MAX];
    let read = file.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..read]).ok()?;
    let micros = text
        .lines()
        .find_map(|line| line.strip_prefix("usage_usec "));
    match micros {
        Some(micros) => micros.trim().parse().ok().map(Duration::from_micros),
        None => text.trim().parse().ok().map(Duration::from_nanos),
    }
}

#[cfg(test)]
mod tests;
