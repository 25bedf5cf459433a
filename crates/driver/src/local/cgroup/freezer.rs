//! The cgroup freezer: freezes and thaws all processes of a group.

use super::{Cgroup, FREEZER, MEMORY, Version, put};
use crate::DriverError;
use std::fs;
use std::io::{Error, ErrorKind};
use std::path::Path;
use std::time::Duration;

/// Deadline of a freeze. A process stops at once unless it is in an uninterruptible system call.
const FREEZE_TRIES: u32 = 400;
const FREEZE_PAUSE: Duration = Duration::from_millis(5);

// === impl Cgroup ===

impl Cgroup {
    /// Freezes every process in it, and waits until all are frozen. Blocks.
    pub(crate) fn freeze(&self) -> Result<(), DriverError> {
        let Some(dir) = self.freezer() else {
            return Err(DriverError::Unusable(
                "pausing needs the freezer of control groups: mount it (`mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer`) and start the server again".to_owned(),
            ));
        };
        for _ in 0..FREEZE_TRIES {
            // Written in every round: v1 freezes processes that were forked meanwhile only then.
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
        let Some(dir) = self.freezer() else {
            return Ok(());
        };
        match self.put_frozen(dir, false) {
            Err(DriverError::Step { source, .. }) if is_gone(&source) => Ok(()),
            done => done,
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

    /// Whether the group is frozen: not one of its processes runs.
    pub(crate) fn stands_still(&self) -> bool {
        self.freezer().is_some_and(|dir| self.is_frozen(dir))
    }

    /// Whether the kernel reports every process as frozen.
    fn is_frozen(&self, dir: &Path) -> bool {
        let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
        match self.version {
            Version::V1 => read("freezer.state").trim() == "FROZEN",
            Version::V2 => read("cgroup.events").lines().any(|line| line == "frozen 1"),
        }
    }
}

/// The error of a group's file when the group was removed.
fn is_gone(error: &Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

#[cfg(test)]
mod tests {
    use super::super::tests::group;
    use super::super::{CONTROLLERS, CPU, PIDS};
    use super::*;

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
        // A group that does not become frozen is thawed, and the error is returned.
        put("cgroup.events", "populated 1\nfrozen 0\n");
        v2.freeze().unwrap_err();
        assert_eq!(read("cgroup.freeze"), "0");

        let v1 = group(Version::V1, dir.path(), &[MEMORY, CPU, PIDS, FREEZER]);
        // A file that keeps what is written to it stands for processes that freeze at once.
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
}
