//! Checks of interpreters in the `host` template, which mounts the host's own programs.

use super::{Check, Group, Verdict};
use k8e_model::Language;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The search path that the guest uses.
const DIRECTORIES: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

pub(super) fn checks() -> Vec<Check> {
    Language::ALL.map(check).into()
}

fn check(language: Language) -> Check {
    let program = language.interpreter()[0];
    let runs = |path: &std::path::PathBuf| {
        let meta = path.metadata();
        meta.is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    let mut paths = DIRECTORIES.iter().map(|dir| Path::new(dir).join(program));
    let ok = |found: String| Check::ok(Group::Languages, language.as_str(), found);
    match paths.find(runs) {
        Some(path) => ok(path.display().to_string()),
        None => ok(format!("no {program}")).with_verdict(Verdict::Missing, language.install_hint()),
    }
}
