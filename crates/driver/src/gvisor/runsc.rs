//! The `runsc` executable: its path, its build, and whether a trial with it worked.

use crate::DriverError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Search path, in this order: one that was installed for k8e only, then local installations.
const DIRECTORIES: [&str; 6] = [
    "/usr/local/lib/k8e",
    "/usr/lib/k8e",
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
];

const INSTALL: &str = "install it (Debian 12: apt-get install -t bookworm-backports runsc; elsewhere: see gVisor's installation guide)";

/// Limits on `runsc --version`, which prints a line or two in some milliseconds.
const VERSION_WITHIN: Duration = Duration::from_secs(3);
const VERSION_PAUSE: Duration = Duration::from_millis(5);
const VERSION_BYTES_MAX: u64 = 256;

/// In the driver's directory: the record of the build that worked.
const MEMORY: &str = "runsc.json";

/// gVisor platform: how the sentry intercepts the system calls of its programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Platform {
    /// seccomp traps. Works on every machine.
    #[default]
    Systrap,
    /// Hardware virtualisation: quicker system calls, where there is a real `/dev/kvm`.
    Kvm,
    /// ptrace: slow, works on old kernels too.
    Ptrace,
}

/// An installed build: its path and what identifies the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Runsc {
    pub(super) path: PathBuf,
    modified_ns: i128,
    bytes: u64,
}

/// Record of the build and platform that worked.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Worked {
    runsc: Runsc,
    platform: Platform,
    kernel: String,
}

// === impl Platform ===

impl Platform {
    /// The name in runsc's `--platform`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Systrap => "systrap",
            Self::Kvm => "kvm",
            Self::Ptrace => "ptrace",
        }
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Systrap, Self::Kvm, Self::Ptrace]
            .into_iter()
            .find(|platform| platform.as_str() == text)
            .ok_or_else(|| format!("{text:?} is no platform of gVisor: use systrap, kvm or ptrace"))
    }
}

// === impl Runsc ===

impl Runsc {
    /// The chosen runsc, else the installed one, or an error that names how to install it.
    pub(super) fn find(chosen: Option<&Path>) -> Result<Self, String> {
        match chosen {
            Some(path) => {
                Self::at(path).ok_or_else(|| format!("--runsc: {} is no program", path.display()))
            }
            None => Self::find_in(&DIRECTORIES.map(Path::new)),
        }
    }

    fn find_in(directories: &[&Path]) -> Result<Self, String> {
        let paths = directories.iter().map(|dir| dir.join("runsc"));
        for path in paths {
            if let Some(found) = Self::at(&path) {
                return Ok(found);
            }
        }
        Err(format!("runsc is not installed: {INSTALL}"))
    }

    /// The executable at `path`, if there is one.
    pub(super) fn at(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        let executable = meta.is_file() && meta.mode() & 0o111 != 0;
        executable.then(|| Self {
            path: path.to_owned(),
            modified_ns: i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
            bytes: meta.len(),
        })
    }

    /// Whether this very build passed a trial here.
    pub(super) fn worked_before(&self, dir: &Path, platform: Platform) -> bool {
        let worked = fs::read(dir.join(MEMORY))
            .ok()
            .and_then(|text| serde_json::from_slice::<Worked>(&text).ok());
        worked.is_some_and(|worked| worked == self.worked(platform))
    }

    /// Records that it works. Without the record the next start runs another trial.
    pub(super) fn remember(&self, dir: &Path, platform: Platform) {
        if let Ok(text) = serde_json::to_vec(&self.worked(platform)) {
            let _ = fs::write(dir.join(MEMORY), text);
        }
    }

    /// The error message when its trial failed.
    pub(super) fn broken(&self, error: &DriverError) -> String {
        let cause = std::error::Error::source(error)
            .map(|source| format!(": {source}"))
            .unwrap_or_default();
        format!(
            "{} cannot make a sandbox here ({error}{cause}): another build of runsc may; {INSTALL}",
            self.path.display()
        )
    }

    fn worked(&self, platform: Platform) -> Worked {
        let uname = rustix::system::uname();
        Worked {
            runsc: self.clone(),
            platform,
            kernel: uname.release().to_string_lossy().into_owned(),
        }
    }
}

/// The installed runsc and its version, or how to install it.
pub(crate) fn found(chosen: Option<&Path>) -> Result<String, String> {
    let runsc = Runsc::find(chosen)?;
    let path = runsc.path.display();
    Ok(match version(&runsc.path) {
        Some(version) => format!("{path} ({version})"),
        None => format!("{path} (unknown version)"),
    })
}

/// The first line of `runsc --version`, with a timeout: the file may be any program of that name.
fn version(path: &Path) -> Option<String> {
    let mut child = Command::new(path)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let deadline = Instant::now() + VERSION_WITHIN;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(VERSION_PAUSE),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    };
    let mut text = Vec::new();
    let mut said = child.stdout.take()?.take(VERSION_BYTES_MAX);
    said.read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line: String = text
        .lines()
        .next()?
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    (status.success() && !line.is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_replaced_program_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let (bin, memory) = (dir.path().join("bin"), dir.path().join("memory"));
        fs::create_dir(&bin).unwrap();
        fs::create_dir(&memory).unwrap();
        let missing = Runsc::find_in(&[&bin]).unwrap_err();
        assert!(missing.contains("apt-get install"), "{missing}");
        let program = bin.join("runsc");
        fs::write(&program, "1").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let first = Runsc::find_in(&[&bin]).unwrap();
        assert!(!first.worked_before(&memory, Platform::Systrap));
        first.remember(&memory, Platform::Systrap);
        assert!(first.worked_before(&memory, Platform::Systrap));
        assert!(!first.worked_before(&memory, Platform::Kvm));
        fs::write(&program, "22").unwrap();
        let second = Runsc::find_in(&[&bin]).unwrap();
        assert!(!second.worked_before(&memory, Platform::Systrap));
    }

    #[test]
    fn platforms_are_called_as_runsc_calls_them() {
        assert_eq!("kvm".parse(), Ok(Platform::Kvm));
        assert!("qemu".parse::<Platform>().is_err());
    }
}
