//! `cargo xtask codegen`: a program of its own (`xtask/codegen`), so that `cargo xtask run` does not
//! have to build a protobuf compiler first.

use crate::{Outcome, process};

/// Whether to write the generated files or only compare them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Write them.
    Write,
    /// Fail when they differ.
    Check,
}

/// Builds it and runs it.
pub(crate) fn run(mode: Mode) -> Outcome {
    let mut command = process::cargo();
    // The profile of everything else: they share build scripts and macros.
    command.args(["run", "--quiet", "--package", "k8e-codegen"]);
    command.args(["--profile", "ci", "--"]);
    if mode == Mode::Check {
        command.arg("--check");
    }
    process::run(&mut command)
}
