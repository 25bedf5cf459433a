//! Preflight checks of this machine for `k8e check-config`: kernel features, limits, runtimes, and how to fix
//! what is missing.
//!
//! Most checks need no root. With root each driver also launches a sandbox, in a temporary data directory: a
//! sandbox that was made proves more than any list of features.

mod kernel;
mod limits;
mod programs;
mod trial;

use crate::DriverError;
use k8e_model::RuntimeKind;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Input of the checks.
#[derive(Debug)]
pub struct Subject {
    /// Data directory that a server would use.
    pub data_dir: PathBuf,
    /// The guest executable; empty when this build has none, then no sandbox is launched.
    pub guest: Vec<u8>,
    /// Path of the executable that runs as the launcher.
    pub launcher: PathBuf,
}

/// Result of all checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether a driver launched a sandbox. Always false without root.
    pub usable: bool,
    /// The checks, in the order in which they are shown.
    pub checks: Vec<Check>,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Heading under which it is shown.
    pub group: Group,
    /// Short name of the feature, such as `idmapped mounts`.
    pub name: String,
    /// Outcome.
    pub verdict: Verdict,
    /// What was found on this machine, one line.
    pub found: String,
    /// How to fix it, one line; empty when nothing has to be done.
    pub fix: String,
}

/// Heading of a group of checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Kernel features, and whether this process may use them.
    Kernel,
    /// Kernel limits, memory and disk.
    Limits,
    /// Drivers that can launch a sandbox.
    Runtimes,
    /// Interpreters that sandboxes find in the `host` template.
    Languages,
}

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Available.
    Ok,
    /// Could not be determined.
    Unknown,
    /// Works, but with weaker isolation or less capacity than possible.
    Weaker,
    /// Not available; what depends on it does not work.
    Missing,
}

/// Runs all checks. Blocks for about a second; must be called while the process is single-threaded.
pub fn run(subject: Subject) -> Report {
    let mut checks = kernel::checks();
    checks.extend(limits::checks(&subject.data_dir));
    let tried = if rustix::process::geteuid().is_root() {
        trial::run(subject)
    } else {
        trial::without_root()
    };
    let usable = tried.iter().any(Check::is_usable_runtime);
    checks.extend(tried);
    checks.extend(programs::checks());
    Report { usable, checks }
}

// === impl Check ===

impl Check {
    fn ok(group: Group, name: &str, found: impl Into<String>) -> Self {
        Self {
            group,
            name: name.to_owned(),
            verdict: Verdict::Ok,
            found: found.into(),
            fix: String::new(),
        }
    }

    /// The same check with another verdict and how to fix it.
    fn with_verdict(self, verdict: Verdict, fix: impl Into<String>) -> Self {
        Self {
            verdict,
            fix: fix.into(),
            ..self
        }
    }

    fn is_usable_runtime(&self) -> bool {
        let kinds = [RuntimeKind::Native, RuntimeKind::Gvisor];
        self.group == Group::Runtimes
            && kinds.iter().any(|kind| kind.as_str() == self.name)
            && matches!(self.verdict, Verdict::Ok | Verdict::Weaker)
    }
}

// === impl Verdict ===

impl Verdict {
    /// The name in output and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Weaker => "weaker",
            Self::Missing => "missing",
        }
    }
}

// === impl Group ===

impl Group {
    /// The name in output and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Limits => "limits",
            Self::Runtimes => "runtimes",
            Self::Languages => "languages",
        }
    }
}

/// The nearest ancestor of a path that exists.
fn existing(path: &Path) -> &Path {
    let mut ancestors = path.ancestors();
    let dir = ancestors.find(|dir| dir.is_dir());
    dir.unwrap_or(Path::new("."))
}

/// An error and its source as one line.
fn shown(error: &DriverError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_to_come_is_judged_by_where_it_will_be() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(existing(&dir.path().join("a/b")), dir.path());
        assert_eq!(existing(dir.path()), dir.path());
    }

    #[test]
    fn only_what_can_make_a_sandbox_counts() {
        let runtime =
            |name, verdict| Check::ok(Group::Runtimes, name, "x").with_verdict(verdict, "y");
        assert!(runtime("gvisor", Verdict::Weaker).is_usable_runtime());
        assert!(runtime("native", Verdict::Ok).is_usable_runtime());
        assert!(!runtime("native", Verdict::Unknown).is_usable_runtime());
        assert!(!runtime("native", Verdict::Missing).is_usable_runtime());
        assert!(!runtime("kata", Verdict::Ok).is_usable_runtime());
        assert!(!Check::ok(Group::Languages, "native", "x").is_usable_runtime());
    }
}
