//! The program `runsc`: where it is, which build it is, and whether it was found to work.

use crate::DriverError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Where it is looked for, in this order: what people install themselves comes first.
const DIRECTORIES: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];

const INSTALL: &str = "install it (Debian 12: apt-get install -t bookworm-backports runsc; elsewhere: see gVisor's installation guide)";

/// What it may take and say: it prints a line or two in some milliseconds.
const VERSION_WITHIN: Duration = Duration::from_secs(3);
const VERSION_PAUSE: Duration = Duration::from_millis(5);
const VERSION_BYTES_MAX: u64 = 256;

/// In the driver's directory: what worked.
const MEMORY: &str = "runsc.json";

/// How the kernel inside gets hold of the system calls of its programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Platform {
    /// seccomp traps. Works everywhere.
    #[default]
    Systrap,
    /// Hardware virtualisation: quicker system calls, where there is a real `/dev/kvm`.
    Kvm,
    /// ptrace: slow.
    Ptrace,
}

/// One build of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Runsc {
    pub(super) path: PathBuf,
    modified_ns: i128,
    bytes: u64,
}

/// What it worked with.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Worked {
    runsc: Runsc,
    platform: Platform,
    kernel: String,
}

// === impl Platform ===

impl Platform {
    /// As runsc calls it.
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
    /// The one that is installed, or what to do.
    pub(super) fn find() -> Result<Self, String> {
        Self::find_in(&DIRECTORIES.map(Path::new))
    }

    fn find_in(directories: &[&Path]) -> Result<Self, String> {
        let paths = directories.iter().map(|dir| dir.join("runsc"));
        for path in paths {
            if let Ok(meta) = fs::metadata(&path)
                && meta.is_file()
                && meta.mode() & 0o111 != 0
            {
                return Ok(Self {
                    path,
                    modified_ns: i128::from(meta.mtime()) * 1_000_000_000
                        + i128::from(meta.mtime_nsec()),
                    bytes: meta.len(),
                });
            }
        }
        Err(format!("runsc is not installed: {INSTALL}"))
    }

    /// Whether this very build was found to work here.
    pub(super) fn worked_before(&self, dir: &Path, platform: Platform) -> bool {
        let worked = fs::read(dir.join(MEMORY))
            .ok()
            .and_then(|text| serde_json::from_slice::<Worked>(&text).ok());
        worked.is_some_and(|worked| worked == self.worked(platform))
    }

    /// It works. Forgetting that costs the next start a trial, no more.
    pub(super) fn remember(&self, dir: &Path, platform: Platform) {
        if let Ok(text) = serde_json::to_vec(&self.worked(platform)) {
            let _ = fs::write(dir.join(MEMORY), text);
        }
    }

    /// What to say when it does not.
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

/// Which is installed and what it says of itself, or what to do.
pub(crate) fn found() -> Result<String, String> {
    let runsc = Runsc::find()?;
    let path = runsc.path.display();
    Ok(match version(&runsc.path) {
        Some(version) => format!("{path} ({version})"),
        None => format!("{path} (it does not say its version)"),
    })
}

/// Its first line. Not waited for long: it may be anything that has the name.
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
