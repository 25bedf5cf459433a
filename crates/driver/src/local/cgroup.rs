//! Control groups, v1 and v2: one group per sandbox, below one group per data directory.
//!
//! ```text
//! v1  <mount of memory|cpu|pids|freezer|devices|blkio>/k8e/<data directory>/<sandbox>
//! v2  <mount>/k8e/<data directory>/<sandbox>
//! ```

pub(crate) mod devices;
pub(crate) mod io;

use crate::DriverError;
use k8e_model::{LimitEvents, Limits, SandboxId};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The kernel's own default; shorter wakes more often, longer makes pauses felt.
const CPU_PERIOD_US: u64 = 100_000;

/// A killed process leaves its group when it is reaped, a moment later.
const REMOVE_TRIES: u32 = 200;
const REMOVE_PAUSE: Duration = Duration::from_millis(5);

/// Processes whose pidfds are held at once, of a group that may have thousands: well below what a
/// process may have open.
const KILLED_AT_ONCE_MAX: usize = 128;

/// The controllers a sandbox needs; all must be there.
const CONTROLLERS: [&str; 3] = [MEMORY, CPU, PIDS];

const MEMORY: &str = "memory";
const CPU: &str = "cpu";
const PIDS: &str = "pids";

/// v1: stops what is in a group. Without it sandboxes cannot be frozen, and that is all. v2 can do
/// that by itself.
const FREEZER: &str = "freezer";

/// v1: which devices can be opened. v2 does that with a program.
const DEVICES: &str = "devices";

/// v1: operations and bytes a second on a disk. On v2 it is `io`.
const BLKIO: &str = "blkio";

/// v1: what sandboxes can do without.
const OPTIONAL: [&str; 3] = [FREEZER, DEVICES, BLKIO];

/// v2: the controller of disks, which sandboxes can do without.
const IO: &str = "io";

/// v1: buffers of TCP and UDP sockets, which do not count as memory there. This part of the memory
/// limit may be in them, in addition to it.
const SOCKET_BUFFERS_PART: u64 = 4;

/// A process stops at once unless it is in the middle of something that the kernel cannot interrupt.
const FREEZE_TRIES: u32 = 400;
const FREEZE_PAUSE: Duration = Duration::from_millis(5);

/// v1: the file that a thread joins a group by.
const TASKS: &str = "tasks";

/// Of a file that counts how often limits were hit.
const EVENTS_BYTES_MAX: usize = 512;

/// Where this machine's control groups are, and ours among them.
#[derive(Clone, Debug)]
pub(crate) struct Cgroups {
    version: Version,
    parents: Dirs,
}

/// v1: a directory for each of CONTROLLERS and for those of OPTIONAL that there are. v2: one, under the
/// name of each controller that it has.
type Dirs = Vec<(&'static str, PathBuf)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// How to get into a group without the kernel's lock over all processes, for which it may wait
/// twenty milliseconds: not through `cgroup.procs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Join {
    /// v1: a single-threaded process writes 0 to `tasks` of each of these.
    Write(Groups),
    /// v2: a process is born in this directory's group.
    Born(PathBuf),
}

/// v1: the directories of one sandbox's group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Groups {
    /// Where memory is limited; one of the first.
    memory: PathBuf,
    /// Joined at once.
    first: Vec<PathBuf>,
    /// Joined when the file system is made, which takes devices that the sandbox must not have.
    devices: Option<PathBuf>,
    /// Where disks are limited; one of the first.
    blkio: Option<PathBuf>,
}

/// One sandbox's group.
#[derive(Debug)]
pub(crate) struct Cgroup {
    version: Version,
    dirs: Dirs,
}

/// Files that count how often limits were hit, kept open by the server: they are read before and
/// after every command. None where the kernel has no such file.
#[derive(Debug)]
pub(crate) struct LimitCounters {
    pub(crate) memory: Option<File>,
    pub(crate) pids: Option<File>,
}

// === impl LimitCounters ===

impl LimitCounters {
    /// How often limits were hit.
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
            Self::Born(dir) => dir.join("memory.max"),
        }
    }

    /// Enters, where a process is not born in it.
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
            parents.push((controller, parent));
        }
        Ok(Self { version, parents })
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

    /// Whether what is in a group can be frozen.
    pub(crate) fn can_freeze(&self) -> bool {
        self.version == Version::V2 || self.has(FREEZER)
    }

    fn has(&self, wanted: &str) -> bool {
        self.parents.iter().any(|(name, _)| *name == wanted)
    }

    /// Removes our own group, when no sandbox is left in it.
    pub(crate) fn close(&self) {
        for (_, parent) in &self.parents {
            let _ = fs::remove_dir(parent);
        }
    }
}

/// Which version, with which controllers, and where.
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

/// v2 when all controllers are there; else v1. On hybrid machines v2 exists without controllers.
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
    /// Makes it with its limits.
    pub(crate) fn create(&self, limits: &Limits) -> Result<(), DriverError> {
        for (_, dir) in &self.dirs {
            match fs::create_dir(dir) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                done => done.map_err(DriverError::step("make", dir.display().to_string()))?,
            }
        }
        self.set_limits(limits)
    }

    /// Also on one that has limits already.
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

    /// Of a controller that every group has.
    fn dir(&self, controller: &str) -> &Path {
        self.optional(controller)
            .expect("groups are made only where all of CONTROLLERS are")
    }

    /// Of a controller that may not be there.
    fn optional(&self, controller: &str) -> Option<&Path> {
        let mut dirs = self.dirs.iter();
        let (_, dir) = dirs.find(|(name, _)| *name == controller)?;
        Some(dir)
    }

    /// How a sandbox's first process gets into it.
    pub(crate) fn join(&self) -> Join {
        match self.version {
            Version::V1 => {
                let first = self.dirs.iter().filter(|(name, _)| *name != DEVICES);
                let owned = |name| self.optional(name).map(Path::to_owned);
                Join::Write(Groups {
                    memory: self.dir(MEMORY).to_owned(),
                    first: first.map(|(_, dir)| dir.clone()).collect(),
                    devices: owned(DEVICES),
                    blkio: owned(BLKIO),
                })
            }
            Version::V2 => Join::Born(self.dir(MEMORY).to_owned()),
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

    /// Stops every process in it where it is, and waits until all of them stand still. Blocks.
    pub(crate) fn freeze(&self) -> Result<(), DriverError> {
        let Some(dir) = self.freezer() else {
            return Err(DriverError::Unusable(
                "pausing needs the freezer of control groups: mount it (`mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer`) and start the server again".to_owned(),
            ));
        };
        for _ in 0..FREEZE_TRIES {
            // Written again each time: v1 looks at processes that came meanwhile only then.
            self.put_frozen(dir, true)?;
            if self.is_frozen(dir) {
                return Ok(());
            }
            std::thread::sleep(FREEZE_PAUSE);
        }
        self.put_frozen(dir, false)?;
        Err(DriverError::step("freeze", dir.display().to_string())(
            Error::from(ErrorKind::TimedOut),
        ))
    }

    /// Undoes [`Cgroup::freeze`]; no error when it is not frozen, or gone.
    pub(crate) fn thaw(&self) -> Result<(), DriverError> {
        match self.freezer() {
            Some(dir) if dir.exists() => self.put_frozen(dir, false),
            _ => Ok(()),
        }
    }

    fn freezer(&self) -> Option<&Path> {
        match self.version {
            Version::V1 => self.optional(FREEZER),
            Version::V2 => self.optional(MEMORY),
        }
    }

    fn put_frozen(&self, dir: &Path, frozen: bool) -> Result<(), DriverError> {
        match (self.version, frozen) {
            (Version::V1, true) => put(dir, "freezer.state", "FROZEN"),
            (Version::V1, false) => put(dir, "freezer.state", "THAWED"),
            (Version::V2, true) => put(dir, "cgroup.freeze", "1"),
            (Version::V2, false) => put(dir, "cgroup.freeze", "0"),
        }
    }

    /// Whether every process in it stands still.
    fn is_frozen(&self, dir: &Path) -> bool {
        let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
        match self.version {
            Version::V1 => read("freezer.state").trim() == "FROZEN",
            Version::V2 => read("cgroup.events").lines().any(|line| line == "frozen 1"),
        }
    }

    /// Kills every process in it. Needed only for what died half-made: a sandbox's processes die with its first.
    pub(crate) fn kill(&self) {
        for (_, dir) in &self.dirs {
            // v1 has no such file.
            if fs::write(dir.join("cgroup.kill"), "1").is_err() {
                kill_members(|| members(dir));
            }
        }
        // v1: who is frozen dies when that is over.
        let _ = self.thaw();
    }

    /// Removes it once it is empty; kills what is still in it.
    ///
    /// v1: the kernel keeps what it counts for a removed group for as long as there are pages that the group was
    /// the first to read: those of the host's programs, about one group in six. They are not emptied
    /// here (`memory.force_empty`): the next sandbox would have to read all of that from the disk
    /// again. They go when memory is needed.
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

/// Kills the processes that `list` lists. By the time of the signal a process id may be another's, so
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
    // 0 is a process of another namespace.
    let pids = pids.filter(|pid| *pid > 0);
    pids.filter_map(Pid::from_raw).collect()
}

/// v1: memory, and memory with swap, which must never be the smaller of the two: going up it is first.
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

/// v1: what sockets may hold, in addition to memory. From the first time that it is set, new sockets
/// are counted. Absent on kernels that do not count them.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn group(version: Version, dir: &Path, controllers: &[&'static str]) -> Cgroup {
        let dirs = controllers.iter().map(|name| (*name, dir.to_owned()));
        Cgroup {
            version,
            dirs: dirs.collect(),
        }
    }

    #[test]
    fn v1_is_found_on_a_hybrid_machine() {
        let mounts = "cgroup /c/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup /c/memory cgroup rw,memory 0 0\n\
                      cgroup /c/pids cgroup rw,pids 0 0\ncgroup /c/freezer cgroup rw,freezer 0 0\ncgroup2 /c/unified-nowhere cgroup2 rw 0 0\n";
        let (version, roots) = find(mounts).unwrap();
        assert_eq!(version, Version::V1);
        let at = |name: &'static str| (name, Path::new("/c").join(name));
        assert_eq!(roots, [MEMORY, CPU, PIDS, FREEZER].map(at));
        // The freezer is good to have, no more.
        let without = mounts.replace("freezer", "devices");
        assert_eq!(
            find(&without).unwrap().1,
            [MEMORY, CPU, PIDS, DEVICES].map(at)
        );
    }

    #[test]
    fn v2_is_found_when_it_has_the_controllers() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(
            dir.path().join("cgroup.controllers"),
            "cpuset cpu io memory pids\n",
        )
        .unwrap();
        let mounts = format!("cgroup2 {} cgroup2 rw 0 0\n", dir.path().display());
        let all = [MEMORY, CPU, PIDS, IO].map(|name| (name, dir.path().to_owned()));
        assert_eq!(find(&mounts), Some((Version::V2, all.to_vec())));
    }

    #[test]
    fn without_controllers_there_is_nothing() {
        assert_eq!(
            find("cgroup2 /nowhere cgroup2 rw 0 0\nproc /proc proc rw 0 0\n"),
            None
        );
    }

    #[test]
    fn counters_are_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n").unwrap();
        assert_eq!(counter(Some(file.as_file()), "oom_kill"), 7);
        assert_eq!(counter(None, "max"), 0);
    }

    #[test]
    fn only_who_is_listed_while_it_is_held_is_killed() {
        use std::os::unix::process::ExitStatusExt as _;
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let pid = Pid::from_child(&child);
        // Not in the group any more when it is looked at again: the id is somebody else's by now.
        let mut looks = [vec![pid], vec![]].into_iter();
        kill_members(|| looks.next().unwrap());
        assert!(child.try_wait().unwrap().is_none());
        let dir = tempfile::tempdir().unwrap();
        let procs = format!("{}\n0\n-1\nx\n", pid.as_raw_nonzero());
        fs::write(dir.path().join("cgroup.procs"), procs).unwrap();
        assert_eq!(members(dir.path()), [pid]);
        kill_members(|| members(dir.path()));
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        assert_eq!(members(&dir.path().join("gone")), []);
    }

    #[test]
    fn either_version_freezes() {
        let dir = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
        let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        let v2 = group(Version::V2, dir.path(), &CONTROLLERS);
        put("cgroup.events", "populated 1\nfrozen 1\n");
        v2.freeze().unwrap();
        assert_eq!(read("cgroup.freeze"), "1");
        v2.thaw().unwrap();
        assert_eq!(read("cgroup.freeze"), "0");
        // One that does not come to rest is left running, and that is told.
        put("cgroup.events", "populated 1\nfrozen 0\n");
        v2.freeze().unwrap_err();
        assert_eq!(read("cgroup.freeze"), "0");

        let v1 = group(Version::V1, dir.path(), &[MEMORY, CPU, PIDS, FREEZER]);
        // A file that keeps what is written to it is one whose processes stop at once.
        v1.freeze().unwrap();
        assert_eq!(read("freezer.state"), "FROZEN");
        v1.thaw().unwrap();
        assert_eq!(read("freezer.state"), "THAWED");
        let without = group(Version::V1, dir.path(), &CONTROLLERS);
        assert!(
            without
                .freeze()
                .unwrap_err()
                .to_string()
                .contains("mount it")
        );
        without.thaw().unwrap();
    }

    #[test]
    fn limits_are_written_for_either_version() {
        let dir = tempfile::tempdir().unwrap();
        let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        let limits = Limits {
            memory_bytes: 64 << 20,
            cpu_millis: 1500,
            pids: 99,
            disk_bytes: 0,
        };
        fs::write(dir.path().join("memory.swap.max"), "max").unwrap();
        let v2 = group(Version::V2, dir.path(), &CONTROLLERS);
        v2.create(&limits).unwrap();
        assert_eq!(
            (read("memory.max"), read("memory.swap.max")),
            ("67108864".to_owned(), "0".to_owned())
        );
        assert_eq!(
            (read("cpu.max"), read("pids.max")),
            ("150000 100000".to_owned(), "99".to_owned())
        );
        assert_eq!(v2.join(), Join::Born(dir.path().to_owned()));
        fs::write(
            dir.path().join("memory.events"),
            "oom 3\noom_kill 2\noom_group_kill 0\n",
        )
        .unwrap();
        fs::write(dir.path().join("pids.events"), "max 5\n").unwrap();
        assert_eq!(
            v2.counters().read(),
            LimitEvents {
                oom_kills: 2,
                pids_refused: 5
            }
        );

        let v1 = group(Version::V1, dir.path(), &CONTROLLERS);
        fs::write(dir.path().join("memory.kmem.tcp.limit_in_bytes"), "max").unwrap();
        v1.create(&limits).unwrap();
        assert_eq!(read("memory.limit_in_bytes"), "67108864");
        assert_eq!(read("memory.kmem.tcp.limit_in_bytes"), "16777216");
        assert_eq!(
            (read("cpu.cfs_quota_us"), read("cpu.cfs_period_us")),
            ("150000".to_owned(), "100000".to_owned())
        );
    }
}
