//! Record of a live sandbox on disk, from which it is adopted after a crash of the server.

use crate::DriverError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;

const FILE: &str = "record.json";

/// Written to the sandbox's directory once it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// Boot id: a pid of another boot is meaningless.
    pub(crate) boot_id: String,
    /// Pid of the sandbox's first process.
    pub(crate) pid: i32,
    /// Start time in clock ticks since boot: detects a reused pid.
    pub(crate) start_time: u64,
    /// First uid of its range.
    pub(crate) uid_base: u32,
}

// === impl Record ===

impl Record {
    pub(crate) fn of(pid: i32, uid_base: u32) -> Result<Self, DriverError> {
        Ok(Self {
            boot_id: boot_id()?,
            pid,
            start_time: start_time(pid)?,
            uid_base,
        })
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<(), DriverError> {
        let path = dir.join(FILE);
        let step = || DriverError::step::<io::Error>("write", path.display().to_string());
        let text = serde_json::to_vec(self)
            .map_err(io::Error::other)
            .map_err(step())?;
        // Atomic (rename): a half-written record would lose a live sandbox.
        let new = dir.join("record.new");
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(step())
    }

    /// None when there is no readable record: then the sandbox was never up.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join(FILE)).ok()?).ok()
    }

    /// Whether the process is still alive.
    pub(crate) fn is_alive(&self) -> bool {
        boot_id().is_ok_and(|boot| boot == self.boot_id)
            && start_time(self.pid).is_ok_and(|time| time == self.start_time)
    }
}

fn boot_id() -> Result<String, DriverError> {
    let path = "/proc/sys/kernel/random/boot_id";
    fs::read_to_string(path)
        .map(|text| text.trim().to_owned())
        .map_err(DriverError::step("read", path))
}

/// Also an error for a zombie.
fn start_time(pid: i32) -> Result<u64, DriverError> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).map_err(DriverError::step("read", path.as_str()))?;
    // The second field is the name in parentheses and may hold any byte; the third is the state, the
    // 22nd the start time.
    let after_name = text
        .rsplit_once(')')
        .map(|(_, rest)| rest)
        .unwrap_or_default();
    let mut fields = after_name.split_whitespace();
    let alive = fields.next().filter(|state| !matches!(*state, "Z" | "X"));
    let time = alive.and_then(|_| fields.nth(18)?.parse().ok());
    time.ok_or_else(|| DriverError::step("read", path)(io::Error::from(io::ErrorKind::InvalidData)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_knows_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::of(i32::try_from(std::process::id()).unwrap(), 1).unwrap();
        record.write(dir.path()).unwrap();
        let read = Record::read(dir.path()).unwrap();
        assert_eq!(read, record);
        assert!(read.is_alive());
        assert!(
            !Record {
                start_time: record.start_time + 1,
                ..read.clone()
            }
            .is_alive()
        );
        assert!(
            !Record {
                boot_id: "other".to_owned(),
                ..read
            }
            .is_alive()
        );
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(dead.id()).unwrap();
        while start_time(pid).is_ok() {
            std::thread::yield_now();
        }
        assert!(Path::new(&format!("/proc/{pid}/stat")).exists());
        dead.wait().unwrap();
        fs::write(dir.path().join(FILE), "{").unwrap();
        assert_eq!(Record::read(dir.path()), None);
    }
}
