//! What this machine has of what sandboxes need, and how to mend what is wrong: `k8e check-config`.
//!
//! Everything that can be found out without root is. With root the drivers are also tried out, on
//! a directory of their own: a sandbox that was made proves more than any list of features.

mod kernel;
mod limits;
mod programs;
mod trial;

use crate::DriverError;
use k8e_model::RuntimeKind;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What is needed to look.
#[derive(Debug)]
pub struct Subject {
    /// Where a server would keep its data.
    pub data_dir: PathBuf,
    /// The guest's program; empty when there is none to try.
    pub guest: Vec<u8>,
    /// The program that becomes the launcher.
    pub launcher: PathBuf,
}

/// Everything that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether a sandbox was made here. Without root none can be.
    pub usable: bool,
    /// What each part came to.
    pub checks: Vec<Check>,
}

/// One part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What it belongs to.
    pub group: Group,
    /// What it is called.
    pub name: String,
    /// What it came to.
    pub verdict: Verdict,
    /// What is there, in words.
    pub found: String,
    /// What to do; empty when there is nothing to do.
    pub fix: String,
}

/// What a part belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// What the kernel can do and this process may ask of it.
    Kernel,
    /// How much there is.
    Limits,
    /// What can make a sandbox.
    Runtimes,
    /// What `run` finds in the `host` template.
    Languages,
}

/// What a part came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Could not be found out.
    Unknown,
    /// Works, but less well or less strong than it could.
    Weaker,
    /// What needs it does not work.
    Missing,
}

/// Looks at everything. Blocks for a second or so; call it while there is one thread.
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

    /// Anything but fine.
    fn but(self, verdict: Verdict, fix: impl Into<String>) -> Self {
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
    /// As people read it.
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
    /// As people read it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Limits => "limits",
            Self::Runtimes => "runtimes",
            Self::Languages => "languages",
        }
    }
}

/// The nearest directory of a path that exists.
fn existing(path: &Path) -> &Path {
    let mut ancestors = path.ancestors();
    let dir = ancestors.find(|dir| dir.is_dir());
    dir.unwrap_or(Path::new("."))
}

/// An error and its cause, as one line.
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
        let runtime = |name, verdict| Check::ok(Group::Runtimes, name, "x").but(verdict, "y");
        assert!(runtime("gvisor", Verdict::Weaker).is_usable_runtime());
        assert!(runtime("native", Verdict::Ok).is_usable_runtime());
        assert!(!runtime("native", Verdict::Unknown).is_usable_runtime());
        assert!(!runtime("native", Verdict::Missing).is_usable_runtime());
        assert!(!runtime("kata", Verdict::Ok).is_usable_runtime());
        assert!(!Check::ok(Group::Languages, "native", "x").is_usable_runtime());
    }
}
