//! `cargo xtask <task>`: everything a contributor or CI does, in one place.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a build tool talks to its terminal"
)]

mod binaries;
mod ci;
mod codegen;
mod cross_check;
mod fuzz;
mod kube;
mod process;
mod release;
mod setup;
mod tidy;

use binaries::Flavor;
use codegen::Mode;
use std::ffi::OsString;
use std::process::ExitCode;

/// What a task returns: a message for the person who ran it.
type Outcome = Result<(), String>;

const USAGE: &str = "usage: cargo xtask <task>

  build [--release]    build the static guest and the k8e binary that carries it
  release [--out DIR] [--key PEM]
                       the files of a release in target/release.d: binaries, install.sh, unit, sums, signature
  runtime              build the static runtime for images of Kubernetes sandboxes, print its path
  run <args…>          build, then run `k8e <args…>`
  test [args…]         build, then `cargo test` with these arguments (e.g. `-p k8e-e2e escape`)
  fuzz [target] [--coverage] [--seconds N] [--seed N] [--input FILE]
                       feed the decoders with mutations of fuzz/corpus, 10 seconds each;
                       --coverage: by libFuzzer, guided by coverage (needs a C++ compiler)
  kube up|down|bin     a real Kubernetes of plain processes (`cargo xtask kube --help`)
  setup                install what the tests need: system packages, tsx, cargo-deny
  check                format, tidy, codegen --check, clippy and unit tests: needs no root, installs nothing
  ci                   everything that must be green before a commit lands; needs root
  cross-check          type-check the client for Windows and macOS
  tidy                 the house rules that rustc and clippy cannot check
  codegen [--check]    generate crates/{api,runtime,wire}/src/gen from proto/
";

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match dispatch(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(args: &[OsString]) -> Outcome {
    let called_from = std::env::current_dir().map_err(|e| format!("current directory: {e}"))?;
    // Tasks name files from the root of the repository, wherever they are called.
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    std::env::set_current_dir(root).map_err(|e| format!("{root}: {e}"))?;

    // An argument that is not UTF-8 can only be one of `run`'s, which are passed on as they are.
    let words: Vec<&str> = args
        .iter()
        .map(|arg| arg.to_str().unwrap_or_default())
        .collect();
    match words.as_slice() {
        ["build"] => binaries::build(Flavor::Try).map(drop),
        ["build", "--release"] => binaries::build(Flavor::Dist).map(drop),
        ["release", options @ ..] => release::run(options, &called_from),
        ["runtime"] => {
            println!("{}", binaries::build_runtime()?.display());
            Ok(())
        }
        ["run", ..] => binaries::run(&args[1..], &called_from),
        ["test", ..] => ci::test_some(&args[1..]),
        ["fuzz", ..] => fuzz::run(&args[1..]),
        ["kube", ..] => kube::run(&args[1..], &called_from),
        ["setup"] => setup::run(),
        ["check"] => ci::check(),
        ["ci"] => ci::run(),
        ["cross-check"] => cross_check::run(),
        ["tidy"] => tidy::run(),
        ["codegen"] => codegen::run(Mode::Write),
        ["codegen", "--check"] => codegen::run(Mode::Check),
        _ => Err(USAGE.to_owned()),
    }
}
