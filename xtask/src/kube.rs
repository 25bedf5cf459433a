//! `cargo xtask kube`: a program of its own (`tests/kube`), so that nobody who does not use it has
//! to build what it needs.

use crate::{Outcome, process};
use std::ffi::OsString;
use std::path::Path;

/// Builds it and runs it where the person is: the directory they name is meant from there.
pub(crate) fn run(args: &[OsString], called_from: &Path) -> Outcome {
    let root = std::env::current_dir().map_err(|e| format!("current directory: {e}"))?;
    let mut command = process::cargo();
    command
        .args(["run", "--quiet", "--package", "k8e-kube-dev"])
        .args(["--profile", "ci", "--manifest-path"])
        .arg(root.join("Cargo.toml"))
        .arg("--")
        .args(args)
        .current_dir(called_from);
    process::run(&mut command)
}

/// The programs of a cluster, from wherever they come, before the tests need them.
pub(crate) fn binaries() -> Outcome {
    let root = std::env::current_dir().map_err(|e| format!("current directory: {e}"))?;
    let args = ["bin", "--profile", "node", "--helm"].map(OsString::from);
    run(&args, &root)
}
