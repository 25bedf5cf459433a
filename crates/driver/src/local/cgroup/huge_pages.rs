//! Huge pages (hugetlb), of which sandboxes get none: they come from a pool of the host and are not charged to
//! any memory limit. seccomp refuses them first; this also covers what seccomp cannot see.
//!
//! A limit applies to the whole subtree, so it is set on the parent group of all sandboxes: no group is
//! made or removed per sandbox.

use super::{Version, put};
use crate::DriverError;
use std::fs;
use std::path::{Path, PathBuf};

const CONTROLLER: &str = "hugetlb";

/// Sets the limit of the parent group to 0, where this machine has the controller. v1: returns the
/// group, which is in a separate hierarchy: each sandbox's first process must join it.
pub(super) fn refuse(version: Version) -> Result<Option<PathBuf>, DriverError> {
    let mounts = fs::read_to_string("/proc/self/mounts")
        .map_err(DriverError::step("read", "/proc/self/mounts"))?;
    let Some(root) = find(&mounts, version) else {
        return Ok(None);
    };
    let group = root.join("k8e");
    fs::create_dir_all(&group).map_err(DriverError::step("make", group.display().to_string()))?;
    if version == Version::V2 {
        put(&root, "cgroup.subtree_control", &format!("+{CONTROLLER}"))?;
    }
    limit(&group)?;
    Ok((version == Version::V1).then_some(group))
}

/// Where the controller is mounted in hierarchies of this version.
fn find(mounts: &str, version: Version) -> Option<PathBuf> {
    let kind = match version {
        Version::V1 => "cgroup",
        Version::V2 => "cgroup2",
    };
    let lines = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let mut roots = lines.filter(|fields| fields.len() >= 4 && fields[2] == kind);
    let has = |fields: &Vec<&str>| match version {
        Version::V1 => fields[3].split(',').any(|option| option == CONTROLLER),
        Version::V2 => fs::read_to_string(Path::new(fields[1]).join("cgroup.controllers"))
            .is_ok_and(|offered| offered.split_whitespace().any(|name| name == CONTROLLER)),
    };
    roots.find(has).map(|fields| PathBuf::from(fields[1]))
}

/// One limit file per page size, and one for reservations.
fn limit(group: &Path) -> Result<(), DriverError> {
    let step = || DriverError::step("read", group.display().to_string());
    for entry in fs::read_dir(group).map_err(step())? {
        let name = entry.map_err(step())?.file_name();
        let Some(name) = name.to_str() else {
            continue;
        };
        let is_limit = name.ends_with(".limit_in_bytes") || name.ends_with(".max");
        if name.starts_with("hugetlb.") && is_limit {
            put(group, name, "0")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_is_found_where_it_is() {
        let v1 = "cgroup /c/memory cgroup rw,memory 0 0\ncgroup /c/huge cgroup rw,hugetlb 0 0\n";
        assert_eq!(find(v1, Version::V1), Some(PathBuf::from("/c/huge")));
        assert_eq!(find(v1, Version::V2), None);
        assert_eq!(find("cgroup /c cgroup rw,memory 0 0\n", Version::V1), None);
        let dir = tempfile::tempdir().unwrap();
        let v2 = format!("cgroup2 {} cgroup2 rw 0 0\n", dir.path().display());
        let offer = |text: &str| fs::write(dir.path().join("cgroup.controllers"), text).unwrap();
        offer("cpu memory\n");
        assert_eq!(find(&v2, Version::V2), None);
        offer("cpu hugetlb memory\n");
        assert_eq!(find(&v2, Version::V2), Some(dir.path().to_owned()));
    }

    #[test]
    fn every_size_is_limited_and_nothing_else_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let at = |file: &str| dir.path().join(file);
        let limits = [
            "hugetlb.2MB.limit_in_bytes",
            "hugetlb.1GB.rsvd.limit_in_bytes",
            "hugetlb.2MB.max",
        ];
        let others = ["hugetlb.2MB.usage_in_bytes", "memory.max", "cgroup.procs"];
        for file in limits.iter().chain(&others) {
            fs::write(at(file), "before").unwrap();
        }
        limit(dir.path()).unwrap();
        for file in limits {
            assert_eq!(fs::read_to_string(at(file)).unwrap(), "0", "{file}");
        }
        for file in others {
            assert_eq!(fs::read_to_string(at(file)).unwrap(), "before", "{file}");
        }
    }
}
