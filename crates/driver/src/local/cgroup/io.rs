//! Disk I/O limits (cgroup v1 blkio, v2 io): IOPS and bytes per second.
//!
//! Limits are set per group and block device: the loop device of its image, and the disks below that and
//! below the host's programs. Reads and writes are counted apart.
//!
//! v1 charges a group with the I/O of its own processes: reads, direct and synchronous writes. Writeback by
//! the kernel is charged to no group there. v2 charges all of it.

use super::{BLKIO, Cgroups, IO, Join, Version, put};
use crate::DriverError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Limits of one sandbox on one disk; the same for reads and for writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRate {
    /// I/O operations per second.
    pub operations: u64,
    /// Bytes per second.
    pub bytes: u64,
}

/// Device number (major, minor) of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DiskNumber {
    major: u32,
    minor: u32,
}

// === impl DiskRate ===

impl Default for DiskRate {
    /// The default: more than ordinary programs need, and what a server's disk can do for several sandboxes.
    fn default() -> Self {
        Self {
            operations: 10_000,
            bytes: 512 << 20,
        }
    }
}

// === impl DiskNumber ===

impl DiskNumber {
    /// The disk of the file system of `path`; none when that has no block device (tmpfs, btrfs,
    /// overlay, NFS).
    pub(crate) fn below(path: &Path) -> Option<Self> {
        let device = fs::metadata(path).ok()?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let sys = format!("/sys/dev/block/{major}:{minor}");
        // Of a partition: limits are set on the whole disk.
        let name = match fs::exists(format!("{sys}/partition")) {
            Ok(true) => format!("{sys}/../dev"),
            _ => format!("{sys}/dev"),
        };
        let number = fs::read_to_string(name).ok()?;
        let (major, minor) = number.trim().split_once(':')?;
        Some(Self {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }
}

impl std::fmt::Display for DiskNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

// === impl Join ===

impl Join {
    /// Limits the group on these disks, where the controller is available.
    pub(crate) fn limit_disks(
        &self,
        rate: DiskRate,
        disks: impl IntoIterator<Item = DiskNumber>,
    ) -> Result<(), DriverError> {
        let DiskRate { operations, bytes } = rate;
        for disk in disks {
            match self {
                Self::Write(groups) => {
                    let Some(dir) = &groups.blkio else {
                        return Ok(());
                    };
                    for (file, value) in [
                        ("blkio.throttle.read_bps_device", bytes),
                        ("blkio.throttle.write_bps_device", bytes),
                        ("blkio.throttle.read_iops_device", operations),
                        ("blkio.throttle.write_iops_device", operations),
                    ] {
                        if dir.join(file).exists() {
                            put(dir, file, &format!("{disk} {value}"))?;
                        }
                    }
                }
                Self::CloneInto(dir) => {
                    if dir.join("io.max").exists() {
                        let limits = format!(
                            "{disk} rbps={bytes} wbps={bytes} riops={operations} wiops={operations}"
                        );
                        put(dir, "io.max", &limits)?;
                    }
                }
            }
        }
        Ok(())
    }
}

// === impl Cgroups ===

impl Cgroups {
    /// Which disk I/O limits are not enforced here, as a sentence.
    pub(crate) fn weaker_disks(&self) -> Option<String> {
        match self.version {
            Version::V1 if !self.has(BLKIO) => Some(
                "sandboxes can use all of a disk's speed: there is no blkio of control groups; `mount -t cgroup -o blkio cgroup /sys/fs/cgroup/blkio` and start the server again".to_owned(),
            ),
            Version::V1 => Some(
                "control groups of version 1 limit what sandboxes read and write themselves, not what the kernel writes back for them later: boot with `systemd.unified_cgroup_hierarchy=1`".to_owned(),
            ),
            Version::V2 if !self.has(IO) => Some(
                "sandboxes can use all of a disk's speed: the control groups have no io controller; the kernel needs CONFIG_BLK_DEV_THROTTLING".to_owned(),
            ),
            Version::V2 => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Groups;
    use super::*;
    use std::path::PathBuf;

    const RATE: DiskRate = DiskRate {
        operations: 100,
        bytes: 1 << 20,
    };
    const DISK: DiskNumber = DiskNumber { major: 7, minor: 3 };

    #[test]
    fn limits_are_written_in_the_format_of_each_version() {
        let dir = tempfile::tempdir().unwrap();
        let at = |file: &str| dir.path().join(file);
        let v2 = Join::CloneInto(dir.path().to_owned());
        v2.limit_disks(RATE, [DISK]).unwrap();
        assert!(!at("io.max").exists(), "no controller, no file");
        fs::write(at("io.max"), "").unwrap();
        v2.limit_disks(RATE, [DISK]).unwrap();
        let limits = "7:3 rbps=1048576 wbps=1048576 riops=100 wiops=100";
        assert_eq!(fs::read_to_string(at("io.max")).unwrap(), limits);

        let v1 = |blkio: Option<PathBuf>| {
            Join::Write(Groups {
                memory: PathBuf::new(),
                first: Vec::new(),
                devices: None,
                blkio,
            })
        };
        v1(None).limit_disks(RATE, [DISK]).unwrap();
        fs::write(at("blkio.throttle.read_iops_device"), "").unwrap();
        let v1 = v1(Some(dir.path().to_owned()));
        v1.limit_disks(RATE, [DISK]).unwrap();
        let limit = fs::read_to_string(at("blkio.throttle.read_iops_device")).unwrap();
        assert_eq!(limit, "7:3 100");
    }

    #[test]
    fn what_is_on_no_disk_has_no_number() {
        assert_eq!(DiskNumber::below(Path::new("/proc")), None);
        assert_eq!(DiskNumber::below(Path::new("/nowhere")), None);
    }
}
