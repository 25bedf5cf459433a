//! What sandboxes and their server cost in memory, as the host's kernel tells.
//!
//! Everything is read from files of this machine, with the rights of whoever runs the benchmark:
//! the server's own answers would not count what runs beside a sandbox for its sake.

use crate::Globals;
use k8e_model::RuntimeKind;
use serde::Deserialize;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A thousandth more or less does not matter here, but a bar in MB is a bar in MB.
const MB: f64 = 1_000_000.0;

/// The mean over all sandboxes of a runtime.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mean {
    pub(super) sandboxes: usize,
    /// Pages of their processes; those shared by several, in parts.
    pub(super) pss_mb: f64,
    /// What the kernel holds for them; none when it does not tell.
    pub(super) kernel_mb: Option<f64>,
}

/// The server's directory, when it is on this machine.
#[derive(Clone, Debug)]
pub(super) struct DataDir(PathBuf);

/// What a driver writes beside a sandbox.
#[derive(Deserialize)]
struct Record {
    pid: u32,
}

// === impl Mean ===

impl Mean {
    pub(super) fn each_mb(&self) -> f64 {
        self.pss_mb + self.kernel_mb.unwrap_or(0.0)
    }
}

// === impl DataDir ===

impl DataDir {
    /// An error says why nothing can be measured.
    pub(super) fn of_server(globals: &Globals) -> Result<Self, String> {
        let endpoint = globals.endpoint.as_deref().unwrap_or_default();
        let socket = endpoint
            .strip_prefix("unix://")
            .or_else(|| endpoint.strip_prefix("unix:"));
        let dir = match (endpoint, socket) {
            ("", _) => globals.data_dir.clone(),
            (_, Some(socket)) => Path::new(socket)
                .parent()
                .unwrap_or(Path::new("/"))
                .to_owned(),
            (_, None) => return Err("the server is not on this machine".to_owned()),
        };
        Ok(Self(dir))
    }

    /// Resident memory of the server's process.
    pub(super) fn server_mb(&self) -> Result<f64, String> {
        let lock = self.0.join("lock");
        let pid = read(&lock)?;
        let status = PathBuf::from(format!("/proc/{}/status", pid.trim()));
        let rss = kib_of(&read(&status)?, "VmRSS:");
        let rss = rss.ok_or_else(|| format!("{} does not tell", status.display()))?;
        Ok(megabytes(rss * 1024))
    }

    /// All sandboxes of a runtime: those of sessions, and those that wait for one.
    pub(super) fn sandboxes(&self, runtime: RuntimeKind) -> Result<Mean, String> {
        let dir = self.0.join(runtime.as_str()).join("sandboxes");
        let entries = fs::read_dir(&dir).map_err(|e| told("read", &dir, &e))?;
        let groups = MemoryGroups::find()?;
        let (mut sandboxes, mut pss, mut kernel) = (0_usize, 0, Some(0));
        for entry in entries.flatten() {
            // One that is being made, or removed, has none.
            let Ok(record) = fs::read(entry.path().join("record.json")) else {
                continue;
            };
            let Ok(record) = serde_json::from_slice::<Record>(&record) else {
                continue;
            };
            let group = groups.of(record.pid)?;
            pss += pss_bytes(&group)?;
            kernel = kernel
                .zip(kernel_bytes(&group))
                .map(|(sum, more)| sum + more);
            sandboxes += 1;
        }
        if sandboxes == 0 {
            return Err(format!("{} has no live sandbox", dir.display()));
        }
        let count = sandboxes as f64;
        Ok(Mean {
            sandboxes,
            pss_mb: megabytes(pss) / count,
            kernel_mb: kernel.map(|bytes| megabytes(bytes) / count),
        })
    }
}

/// Where the control groups with the memory controller are.
struct MemoryGroups {
    root: PathBuf,
    /// As `/proc/<pid>/cgroup` names the hierarchy.
    controller: &'static str,
}

// === impl MemoryGroups ===

impl MemoryGroups {
    fn find() -> Result<Self, String> {
        let mounts = read(Path::new("/proc/self/mounts"))?;
        Self::find_in(&mounts).ok_or_else(|| "no memory control group is mounted".to_owned())
    }

    /// v1's, when it has memory: then v2's, beside it, has not.
    fn find_in(mounts: &str) -> Option<Self> {
        let mount = |kind: &str, option: &str| {
            let mut lines = mounts
                .lines()
                .map(|line| line.split(' ').collect::<Vec<_>>());
            let is = |fields: &Vec<&str>| {
                fields.len() > 3
                    && fields[2] == kind
                    && (option.is_empty() || fields[3].split(',').any(|have| have == option))
            };
            lines.find(is).map(|fields| PathBuf::from(fields[1]))
        };
        let v1 = mount("cgroup", "memory").map(|root| Self {
            root,
            controller: "memory",
        });
        let v2 = || {
            let root = mount("cgroup2", "")?;
            Some(Self {
                root,
                controller: "",
            })
        };
        v1.or_else(v2)
    }

    /// The group of a process.
    fn of(&self, pid: u32) -> Result<PathBuf, String> {
        let file = PathBuf::from(format!("/proc/{pid}/cgroup"));
        let groups = read(&file)?;
        let path = self.path_in(&groups);
        let path = path.ok_or_else(|| format!("{} names no memory group", file.display()))?;
        Ok(self.root.join(path.trim_start_matches('/')))
    }

    fn path_in<'a>(&self, groups: &'a str) -> Option<&'a str> {
        groups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let is = controllers.split(',').any(|have| have == self.controller);
            is.then_some(path)
        })
    }
}

/// Of every process in a group. One that ends meanwhile has none.
fn pss_bytes(group: &Path) -> Result<u64, String> {
    let pids = read(&group.join("cgroup.procs"))?;
    let mut bytes = 0;
    for pid in pids.lines() {
        let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
        match fs::read_to_string(&path) {
            Ok(text) => bytes += kib_of(&text, "Pss:").unwrap_or(0) * 1024,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return Err(format!("{}, which needs root", told("read", &path, &e)));
            }
            Err(_) => {}
        }
    }
    Ok(bytes)
}

fn kernel_bytes(group: &Path) -> Option<u64> {
    let v1 = fs::read_to_string(group.join("memory.kmem.usage_in_bytes"));
    if let Ok(text) = v1 {
        return text.trim().parse().ok();
    }
    let v2 = fs::read_to_string(group.join("memory.stat")).ok()?;
    let kernel = v2.lines().find_map(|line| line.strip_prefix("kernel "));
    kernel?.trim().parse().ok()
}

/// `Pss:      123 kB`
fn kib_of(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().strip_suffix("kB")?.trim().parse().ok()
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| told("read", path, &e))
}

fn told(operation: &str, path: &Path, error: &io::Error) -> String {
    format!("cannot {operation} {}: {error}", path.display())
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / MB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_as_the_kernel_writes_them() {
        let text = "Rss:   2048 kB\nPss:                  1500 kB\nPss_Anon:  9 kB\n";
        assert_eq!(kib_of(text, "Pss:"), Some(1500));
        assert_eq!(kib_of(text, "Swap:"), None);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(kernel_bytes(dir.path()), None);
        fs::write(
            dir.path().join("memory.stat"),
            "anon 5\nkernel 7000\nkernel_stack 3\n",
        )
        .unwrap();
        assert_eq!(kernel_bytes(dir.path()), Some(7000));
        fs::write(dir.path().join("memory.kmem.usage_in_bytes"), "9000\n").unwrap();
        assert_eq!(kernel_bytes(dir.path()), Some(9000));
    }

    #[test]
    fn the_memory_group_of_a_process_is_found() {
        let hybrid = "cgroup2 /c/unified cgroup2 rw 0 0\ncgroup /c/memory cgroup rw,memory 0 0\n";
        let v1 = MemoryGroups::find_in(hybrid).unwrap();
        assert_eq!(v1.root, Path::new("/c/memory"));
        let groups = "4:pids:/p\n3:memory,x:/k8e/a/b\n0::/u\n";
        assert_eq!(v1.path_in(groups), Some("/k8e/a/b"));
        let v2 = MemoryGroups::find_in("cgroup2 /c cgroup2 rw 0 0\n").unwrap();
        assert_eq!(
            (v2.root.as_path(), v2.path_in(groups)),
            (Path::new("/c"), Some("/u"))
        );
        assert!(MemoryGroups::find_in("proc /proc proc rw 0 0\n").is_none());
    }

    #[test]
    fn the_server_is_where_its_socket_is() {
        let globals = |endpoint: Option<&str>| Globals {
            endpoint: endpoint.map(str::to_owned),
            data_dir: "/d".into(),
            apikey: None,
            cert_dir: None,
            ca_cert: None,
            no_autostart: true,
        };
        let dir = |endpoint| DataDir::of_server(&globals(endpoint)).map(|dir| dir.0);
        assert_eq!(dir(None), Ok("/d".into()));
        assert_eq!(dir(Some("")), Ok("/d".into()));
        assert_eq!(dir(Some("unix:///e/k8e.sock")), Ok("/e".into()));
        assert!(dir(Some("10.0.0.1:1")).is_err());
    }
}
