//! Control groups, v1 and v2: one group per sandbox, below one group per data directory.
//!
//! ```text
//! v1  <mount of memory|cpu|pids|freezer>/k8e/<data directory>/<sandbox>
//! v2  <mount>/k8e/<data directory>/<sandbox>
//! ```

use crate::DriverError;
use k8e_model::{LimitEvents, Limits, SandboxId};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
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
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

/// v1: stops what is in a group. Without it sandboxes cannot be frozen, and that is all. v2 can do
/// that by itself.
const FREEZER: &str = "freezer";

/// A process stops at once unless it is in the middle of something that the kernel cannot interrupt.
const FREEZE_TRIES: u32 = 400;
const FREEZE_PAUSE: Duration = Duration::from_millis(5);

/// Of a file that counts how often limits were hit.
const EVENTS_BYTES_MAX: usize = 512;

/// Where this machine's control groups are, and ours among them.
#[derive(Clone, Debug)]
pub(crate) struct Cgroups {
    version: Version,
    /// v1: one for each controller, in the order of CONTROLLERS, and the freezer if there is one. v2: one.
    parents: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// How to get into a group without the kernel's lock over all processes, for which it may wait
/// twenty milliseconds: not through `cgroup.procs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Join {
    /// v1: a single-threaded process writes 0 to each of these.
    Write(Vec<PathBuf>),
    /// v2: a process is born in this directory's group.
    Born(PathBuf),
}

/// One sandbox's group.
#[derive(Debug)]
pub(crate) struct Cgroup {
    version: Version,
    dirs: Vec<PathBuf>,
    /// Files that count how often limits were hit, kept open: they are read before and after every
    /// command. None once it is clear that they are not there.
    events: OnceLock<[Option<File>; 2]>,
}

// === impl Join ===

impl Join {
    /// Enters, where a process is not born in it.
    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        let Self::Write(files) = self else {
            return Ok(());
        };
        for file in files {
            fs::write(file, "0").map_err(DriverError::step("join", file.display().to_string()))?;
        }
        Ok(())
    }
}

// === impl Cgroups ===

impl Cgroups {
    /// Finds the hierarchies and makes our group in each. `name` is unique to the data directory.
    pub(crate) fn open(name: &str) -> Result<Self, DriverError> {
        let (version, roots) = mounted()?;
        let parents: Vec<PathBuf> = roots
            .iter()
            .map(|root| root.join("k8e").join(name))
            .collect();
        for (root, parent) in roots.iter().zip(&parents) {
            fs::create_dir_all(parent)
                .map_err(DriverError::step("make", parent.display().to_string()))?;
            if version == Version::V2 {
                for dir in [root.as_path(), &root.join("k8e"), parent] {
                    put(dir, "cgroup.subtree_control", "+memory +cpu +pids")?;
                }
            }
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
                .map(|parent| parent.join(id.as_str()))
                .collect(),
            events: OnceLock::new(),
        }
    }

    /// The sandboxes that have a group.
    pub(crate) fn ids(&self) -> Vec<SandboxId> {
        let mut ids: Vec<SandboxId> = Vec::new();
        for parent in &self.parents {
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
        self.version == Version::V2 || self.parents.len() > CONTROLLERS.len()
    }

    /// Removes our own group, when no sandbox is left in it.
    pub(crate) fn close(&self) {
        for parent in &self.parents {
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
    let controllers = CONTROLLERS.join(", ");
    let roots: Vec<_> = roots
        .iter()
        .map(|root| root.display().to_string())
        .collect();
    Ok(format!(
        "v{number} with {controllers} ({})",
        roots.join(", ")
    ))
}

fn mounted() -> Result<(Version, Vec<PathBuf>), DriverError> {
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
fn find(mounts: &str) -> Option<(Version, Vec<PathBuf>)> {
    let lines = || {
        mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .filter(|fields| fields.len() >= 4)
    };
    for fields in lines().filter(|fields| fields[2] == "cgroup2") {
        let root = PathBuf::from(fields[1]);
        let offered = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        if CONTROLLERS
            .iter()
            .all(|wanted| offered.split_whitespace().any(|have| have == *wanted))
        {
            return Some((Version::V2, vec![root]));
        }
    }
    let v1 = |controller: &str| {
        lines()
            .find(|fields| {
                fields[2] == "cgroup" && fields[3].split(',').any(|option| option == controller)
            })
            .map(|fields| PathBuf::from(fields[1]))
    };
    let mut roots = CONTROLLERS
        .iter()
        .map(|controller| v1(controller))
        .collect::<Option<Vec<_>>>()?;
    roots.extend(v1(FREEZER));
    Some((Version::V1, roots))
}

// === impl Cgroup ===

impl Cgroup {
    /// Makes it with its limits.
    pub(crate) fn create(&self, limits: &Limits) -> Result<(), DriverError> {
        for dir in &self.dirs {
            match fs::create_dir(dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                done => done.map_err(DriverError::step("make", dir.display().to_string()))?,
            }
        }
        self.set_limits(limits)
    }

    /// Also on one that has limits already.
    pub(crate) fn set_limits(&self, limits: &Limits) -> Result<(), DriverError> {
        let quota = (u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000).to_string();
        let memory = limits.memory_bytes.to_string();
        match (self.version, self.dirs.as_slice()) {
            (Version::V1, [memory_dir, cpu, pids, ..]) => {
                put_memory(memory_dir, &memory)?;
                put(cpu, "cpu.cfs_period_us", &CPU_PERIOD_US.to_string())?;
                put(cpu, "cpu.cfs_quota_us", &quota)?;
                put(pids, "pids.max", &limits.pids.to_string())
            }
            (_, dirs) => {
                let dir = &dirs[0];
                put(dir, "memory.max", &memory)?;
                if dir.join("memory.swap.max").exists() {
                    put(dir, "memory.swap.max", "0")?;
                }
                put(dir, "cpu.max", &format!("{quota} {CPU_PERIOD_US}"))?;
                put(dir, "pids.max", &limits.pids.to_string())
            }
        }
    }

    /// How a sandbox's first process gets into it.
    pub(crate) fn join(&self) -> Join {
        match self.version {
            Version::V1 => Join::Write(self.dirs.iter().map(|dir| dir.join("tasks")).collect()),
            Version::V2 => Join::Born(self.dirs[0].clone()),
        }
    }

    /// Whether a process is in it.
    pub(crate) fn holds(&self, pid: i32) -> bool {
        Pid::from_raw(pid).is_some_and(|pid| members(&self.dirs[0]).contains(&pid))
    }

    /// How often limits were hit.
    pub(crate) fn limit_events(&self) -> LimitEvents {
        let [memory, pids] = self.events.get_or_init(|| {
            let (memory, pids) = match (self.version, self.dirs.as_slice()) {
                (Version::V1, [memory, _, pids, ..]) => {
                    (memory.join("memory.oom_control"), pids.join("pids.events"))
                }
                (_, dirs) => (dirs[0].join("memory.events"), dirs[0].join("pids.events")),
            };
            [memory, pids].map(|path| File::open(path).ok())
        });
        LimitEvents {
            oom_kills: counter(memory.as_ref(), "oom_kill"),
            pids_refused: counter(pids.as_ref(), "max"),
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
            io::Error::from(io::ErrorKind::TimedOut),
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
        let dir = match self.version {
            Version::V1 => self.dirs.get(CONTROLLERS.len()),
            Version::V2 => self.dirs.first(),
        };
        dir.map(PathBuf::as_path)
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
        for dir in &self.dirs {
            // v1 has no such file.
            if fs::write(dir.join("cgroup.kill"), "1").is_err() {
                kill_members(|| members(dir));
            }
        }
        // v1: who is frozen dies when that is over.
        let _ = self.thaw();
    }

    /// Removes it once it is empty; kills what is still in it.
    pub(crate) fn remove(&self) -> Result<(), DriverError> {
        for dir in &self.dirs {
            let mut tries = 0;
            loop {
                match fs::remove_dir(dir) {
                    Ok(()) => break,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
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

    #[test]
    fn v1_is_found_on_a_hybrid_machine() {
        let mounts = "cgroup /c/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup /c/memory cgroup rw,memory 0 0\n\
                      cgroup /c/pids cgroup rw,pids 0 0\ncgroup /c/freezer cgroup rw,freezer 0 0\ncgroup2 /c/unified-nowhere cgroup2 rw 0 0\n";
        let (version, roots) = find(mounts).unwrap();
        assert_eq!(version, Version::V1);
        let all = ["/c/memory", "/c/cpu", "/c/pids", "/c/freezer"].map(PathBuf::from);
        assert_eq!(roots, all);
        // The freezer is good to have, no more.
        let without = mounts.replace("freezer", "devices");
        assert_eq!(find(&without).unwrap().1, all[..3]);
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
        assert_eq!(
            find(&mounts),
            Some((Version::V2, vec![dir.path().to_owned()]))
        );
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
        let group = |version, dirs: usize| Cgroup {
            version,
            dirs: vec![dir.path().to_owned(); dirs],
            events: OnceLock::new(),
        };
        let v2 = group(Version::V2, 1);
        put("cgroup.events", "populated 1\nfrozen 1\n");
        v2.freeze().unwrap();
        assert_eq!(read("cgroup.freeze"), "1");
        v2.thaw().unwrap();
        assert_eq!(read("cgroup.freeze"), "0");
        // One that does not come to rest is left running, and that is told.
        put("cgroup.events", "populated 1\nfrozen 0\n");
        v2.freeze().unwrap_err();
        assert_eq!(read("cgroup.freeze"), "0");

        let v1 = group(Version::V1, 4);
        // A file that keeps what is written to it is one whose processes stop at once.
        v1.freeze().unwrap();
        assert_eq!(read("freezer.state"), "FROZEN");
        v1.thaw().unwrap();
        assert_eq!(read("freezer.state"), "THAWED");
        let without = group(Version::V1, 3);
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
        let v2 = Cgroup {
            version: Version::V2,
            dirs: vec![dir.path().to_owned()],
            events: OnceLock::new(),
        };
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
            v2.limit_events(),
            LimitEvents {
                oom_kills: 2,
                pids_refused: 5
            }
        );

        let v1 = Cgroup {
            version: Version::V1,
            dirs: vec![dir.path().to_owned(); 3],
            events: OnceLock::new(),
        };
        v1.create(&limits).unwrap();
        assert_eq!(read("memory.limit_in_bytes"), "67108864");
        assert_eq!(
            (read("cpu.cfs_quota_us"), read("cpu.cfs_period_us")),
            ("150000".to_owned(), "100000".to_owned())
        );
    }
}
