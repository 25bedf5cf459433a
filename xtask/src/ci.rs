//! Everything that must be green before a commit lands, in the order that fails soonest.
//! `.ci/run` and a contributor run the same thing.

mod commits;
mod report;
mod test_runner;

use crate::binaries::{self, Binaries, Flavor};
use crate::codegen::{self, Mode};
use crate::{Outcome, kube, process, setup, tidy};
use report::Report;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// Set to 1 by a person without root, who wants what can run without it.
const SKIP_ROOT_TESTS: &str = "K8E_SKIP_ROOT_TESTS";

/// The packages whose tests make real sandboxes, or a real node.
const ROOT_TEST_PACKAGES: &[&str] = &["k8e-e2e", "k8e-driver", "k8e-kube-dev"];

/// Tests elsewhere that need root, by what their paths contain: a real node, other users, files of
/// root's, network namespaces.
const ROOT_TESTS: &[&str] = &[
    "on_a_real_node",
    "as_root",
    "netns::tests",
    "ceilings::tests",
    "buffer_limits::tests",
];

/// How long the advisory database may take to arrive: a shallow clone takes seconds.
const ADVISORIES_FETCH_SECONDS_MAX: &str = "60";

/// Runs every step and stops at the first that fails.
pub(crate) fn run() -> Outcome {
    Report::of(|report| {
        let with_root_tests = root_tests(report)?;

        if with_root_tests {
            report.step("setup", setup::run)?;
        }
        without_building(report)?;
        let deny = report.step("cargo-deny", setup::cargo_deny)?;
        report.step("deny", || check_dependencies(&deny))?;
        check_advisories(&deny, report)?;
        report.step("clippy", clippy)?;
        report.step("doc", doc)?;
        let binaries = report.step("build", || binaries::build(Flavor::Ci))?;
        let runtime = report.step("runtime", binaries::build_runtime)?;
        // From a cache, or built once: minutes that would look like a test that hangs.
        report.step("kube", kube::binaries)?;
        report.step("test", || test(&binaries, &runtime, with_root_tests))
    })
}

/// What can be checked without root, and without installing anything.
pub(crate) fn check() -> Outcome {
    Report::of(|report| {
        without_building(report)?;
        report.step("clippy", clippy)?;
        report.step("test", unit_tests)?;
        let packages = ROOT_TEST_PACKAGES.join(", ");
        report.not_checked(format!(
            "dependencies, documentation, integration tests, the tests of {packages} and those {}: \
             `cargo xtask ci` does",
            ROOT_TESTS.join(" or ")
        ));
        Ok(())
    })
}

/// The steps that take seconds.
fn without_building(report: &mut Report) -> Outcome {
    report.step("fmt --check", || {
        process::run(process::cargo().args(["fmt", "--all", "--check"]))
    })?;
    report.step("tidy", tidy::run)?;
    commits::check(report)?;
    report.step("codegen --check", || codegen::run(Mode::Check))
}

/// Whether tests that need root run. Without root that is for the person to decide, not for us.
fn root_tests(report: &mut Report) -> Result<bool, String> {
    let skip = std::env::var_os(SKIP_ROOT_TESTS).is_some_and(|value| value == "1");
    if skip {
        let packages = ROOT_TEST_PACKAGES.join(", ");
        report.not_checked(format!(
            "the tests of {packages} and those {}, because {SKIP_ROOT_TESTS}=1",
            ROOT_TESTS.join(" or ")
        ));
        return Ok(false);
    }
    if process::is_root() {
        return Ok(true);
    }
    Err(format!(
        "the tests make real sandboxes, and that needs root:\n  \
         sudo -E env \"PATH=$PATH\" cargo xtask ci\n\
         {SKIP_ROOT_TESTS}=1 cargo xtask ci runs the rest"
    ))
}

fn clippy() -> Outcome {
    let mut command = process::cargo();
    // The profile of the build and the tests: they share build scripts and macros.
    command.args(["clippy", "--workspace", "--all-targets", "--profile", "ci"]);
    process::run(command.args(["--", "--deny", "warnings"]))
}

fn doc() -> Outcome {
    let mut command = process::cargo();
    command.args([
        "doc",
        "--workspace",
        "--no-deps",
        "--profile",
        "ci",
        "--document-private-items",
    ]);
    process::run(command.env("RUSTDOCFLAGS", "--deny warnings"))
}

fn test(binaries: &Binaries, runtime: &Path, with_root_tests: bool) -> Outcome {
    let mut command = workspace_tests();
    // Not the examples: clippy compiles them, and an end-to-end test runs them.
    command.arg("--tests").env("K8E_RUNTIME_BIN", runtime);
    let mut args = Vec::new();
    if !with_root_tests {
        without_root(&mut command, &mut args);
    }
    test_runner::run(with_binaries(&mut command, binaries)?, &args)
}

/// Tests beside the code: quick, and without anything that has to be built or installed first.
fn unit_tests() -> Outcome {
    let mut command = workspace_tests();
    command.args(["--lib", "--bins"]);
    let mut args = Vec::new();
    without_root(&mut command, &mut args);
    test_runner::run(&mut command, &args)
}

fn workspace_tests() -> Command {
    let mut command = process::cargo();
    command.args(["test", "--workspace", "--profile", "ci"]);
    command
}

/// Leaves out what needs root.
fn without_root(command: &mut Command, args: &mut Vec<&str>) {
    for package in ROOT_TEST_PACKAGES {
        command.args(["--exclude", package]);
    }
    for name in ROOT_TESTS {
        args.extend(["--skip", name]);
    }
}

/// Builds, then runs the tests that a person asks for.
pub(crate) fn test_some(args: &[OsString]) -> Outcome {
    let binaries = binaries::build(Flavor::Ci)?;
    let mut command = process::cargo();
    command.args(["test", "--profile", "ci"]).args(args);
    process::run(with_binaries(&mut command, &binaries)?)
}

/// Tells tests where the built programs and the installed tools are.
fn with_binaries<'a>(
    command: &'a mut Command,
    binaries: &Binaries,
) -> Result<&'a mut Command, String> {
    Ok(command
        .env("K8E_BIN", &binaries.k8e)
        .env("K8E_GUEST_BIN", &binaries.guest)
        .env("K8E_TOOLS_DIR", setup::tools_dir()?))
}

fn check_dependencies(deny: &Path) -> Outcome {
    let mut command = Command::new(deny);
    command.args([
        "check",
        "--hide-inclusion-graph",
        "bans",
        "licenses",
        "sources",
    ]);
    process::run(&mut command)
}

/// Known vulnerabilities are checked when the list of them can be had: a machine without a way
/// out still builds, and says what it did not check.
fn check_advisories(deny: &Path, report: &mut Report) -> Outcome {
    let mut fetch = Command::new("timeout");
    fetch
        .arg(ADVISORIES_FETCH_SECONDS_MAX)
        .arg(deny)
        .args(["fetch", "db"]);
    if !process::succeeds(fetch.env("GIT_TERMINAL_PROMPT", "0")) {
        report.not_checked("advisories: the RustSec database could not be fetched".to_owned());
        return Ok(());
    }
    let mut command = Command::new(deny);
    command.args([
        "check",
        "--disable-fetch",
        "--hide-inclusion-graph",
        "advisories",
    ]);
    report.step("advisories", || process::run(&mut command))
}
