//! Everything that must be green before a commit lands, in the order that fails soonest.
//! `.ci/run` and a contributor run the same thing.

use crate::binaries::{self, Binaries, Flavor};
use crate::codegen::{self, Mode};
use crate::{Outcome, kube, process, setup, tidy};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Set to 1 by a person without root, who wants what can run without it.
const SKIP_ROOT_TESTS: &str = "K8E_SKIP_ROOT_TESTS";

/// The packages whose tests make real sandboxes, or a real node.
const ROOT_TEST_PACKAGES: &[&str] = &["k8e-e2e", "k8e-driver", "k8e-kube-dev"];

/// Tests elsewhere that need a real node, by what their names contain.
const ROOT_TESTS: &str = "on_a_real_node";

/// How long the advisory database may take to arrive: a shallow clone takes seconds.
const ADVISORIES_FETCH_SECONDS_MAX: &str = "60";

/// What happened so far: times, and what was not checked.
struct Report {
    started: Instant,
    steps: Vec<(&'static str, Duration)>,
    not_checked: Vec<String>,
}

/// Runs every step and stops at the first that fails.
pub(crate) fn run() -> Outcome {
    let mut report = Report::new();
    let with_root_tests = root_tests(&mut report)?;

    if with_root_tests {
        report.step("setup", setup::run)?;
    }
    report.step("codegen --check", || codegen::run(Mode::Check))?;
    report.step("fmt --check", || {
        process::run(process::cargo().args(["fmt", "--all", "--check"]))
    })?;
    report.step("tidy", tidy::run)?;
    let deny = report.step("cargo-deny", setup::cargo_deny)?;
    report.step("deny", || check_dependencies(&deny))?;
    check_advisories(&deny, &mut report)?;
    report.step("clippy", clippy)?;
    report.step("doc", doc)?;
    let binaries = report.step("build", || binaries::build(Flavor::Ci))?;
    let runtime = report.step("runtime", binaries::build_runtime)?;
    // From a cache, or built once: minutes that would look like a test that hangs.
    report.step("kube", kube::binaries)?;
    report.step("test", || test(&binaries, &runtime, with_root_tests))?;

    report.print_summary();
    Ok(())
}

/// Whether tests that need root run. Without root that is for the person to decide, not for us.
fn root_tests(report: &mut Report) -> Result<bool, String> {
    let skip = std::env::var_os(SKIP_ROOT_TESTS).is_some_and(|value| value == "1");
    if skip {
        let packages = ROOT_TEST_PACKAGES.join(", ");
        report.not_checked(format!(
            "the tests of {packages} and those {ROOT_TESTS}, because {SKIP_ROOT_TESTS}=1"
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
    // Our own tests use the profile we were built with: the other would build protox again.
    process::run(process::cargo().args(["test", "--quiet", "--package", "xtask"]))?;
    let mut command = process::cargo();
    command.args([
        "test",
        "--workspace",
        "--exclude",
        "xtask",
        // One run names everything that fails: on a machine elsewhere a second one costs minutes.
        "--no-fail-fast",
        "--profile",
        "ci",
    ]);
    if !with_root_tests {
        for package in ROOT_TEST_PACKAGES {
            command.args(["--exclude", package]);
        }
        command.args(["--", "--skip", ROOT_TESTS]);
    }
    with_binaries(command.env("K8E_RUNTIME_BIN", runtime), binaries)
}

/// Builds, then runs the tests that a person asks for.
pub(crate) fn test_some(args: &[OsString]) -> Outcome {
    let binaries = binaries::build(Flavor::Ci)?;
    let mut command = process::cargo();
    command.args(["test", "--profile", "ci"]).args(args);
    with_binaries(&mut command, &binaries)
}

fn with_binaries(command: &mut Command, binaries: &Binaries) -> Outcome {
    command
        .env("K8E_BIN", &binaries.k8e)
        .env("K8E_GUEST_BIN", &binaries.guest)
        .env("K8E_TOOLS_DIR", setup::tools_dir()?);
    process::run(command)
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

// === impl Report ===

impl Report {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            steps: Vec::new(),
            not_checked: Vec::new(),
        }
    }

    fn step<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        eprintln!("==> {name}");
        let started = Instant::now();
        let outcome = work();
        let took = started.elapsed();
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        eprintln!("<== {name}: {word} in {:.1} s", took.as_secs_f64());
        self.steps.push((name, took));
        outcome.map_err(|message| format!("ci stopped at `{name}`: {message}"))
    }

    fn not_checked(&mut self, what: String) {
        eprintln!("!!! NOT CHECKED: {what}");
        self.not_checked.push(what);
    }

    fn print_summary(&self) {
        eprintln!();
        for (name, took) in &self.steps {
            eprintln!("{:>8.1} s  {name}", took.as_secs_f64());
        }
        eprintln!(
            "{:>8.1} s  all: green",
            self.started.elapsed().as_secs_f64()
        );
        for what in &self.not_checked {
            eprintln!("!!! NOT CHECKED: {what}");
        }
    }
}
