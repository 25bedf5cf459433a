//! Feeds the decoders for longer than the tests do: with mutations, or with libFuzzer.

use crate::{Outcome, binaries, process};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Asks for libFuzzer.
const COVERAGE: &str = "--coverage";

/// Has every crate count its edges and tell libFuzzer what it compares; checked arithmetic besides.
/// As cargo-fuzz does it, but for the sanitizers, which need a nightly compiler.
const INSTRUMENTED: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cdebug-assertions=yes -Coverflow-checks=yes";

/// `cargo xtask fuzz`.
pub(crate) fn run(args: &[OsString]) -> Outcome {
    let by_coverage = |arg: &OsString| arg == OsStr::new(COVERAGE);
    let mut command = process::cargo();
    command.args(["run", "--quiet", "--package", "k8e-fuzz"]);
    command.args(["--bin", "k8e-fuzz", "--profile", "ci", "--"]);
    command.args(args.iter().filter(|arg| !by_coverage(arg)));
    if args.iter().any(by_coverage) {
        command.arg(COVERAGE).arg(build_instrumented()?);
    }
    process::run(&mut command)
}

/// Builds the program that libFuzzer is a part of. It has a target directory of its own, so that no
/// other build is disturbed, and names its target: build scripts and macros are not instrumented then.
fn build_instrumented() -> Result<PathBuf, String> {
    const PROGRAM: &str = "k8e-fuzz-coverage";
    let triple = binaries::linux_triple()?;
    let own_dir = binaries::target_dir()?.join("coverage");
    let mut command = process::cargo();
    command
        .args(["build", "--package", "k8e-fuzz", "--bin", PROGRAM])
        .args(["--features", "libfuzzer", "--profile", "ci"])
        .args(["--target", &triple])
        .arg("--target-dir")
        .arg(&own_dir)
        // The encoded form wins over RUSTFLAGS, so one of the person's must not get through.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", INSTRUMENTED);
    process::run(&mut command)?;
    Ok(own_dir.join(triple).join("ci").join(PROGRAM))
}
