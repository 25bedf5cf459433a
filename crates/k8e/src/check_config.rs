//! `k8e check-config`: the drivers' preflight checks of this machine, as a table or as JSON.

use clap::Args;
use k8e_cli::Globals;
use k8e_driver::checks::{self, Report, Subject, Verdict};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// What `k8e check-config --help` begins with.
pub(crate) const LONG_ABOUT: &str = "\
Check whether this machine can make sandboxes.

Prints kernel features, limits, runtimes and languages, each with a verdict (ok, weaker, missing, or
unknown where it could not be checked) and what to do about it. As root it also creates a sandbox
with each runtime, in a separate directory beside the data directory, and removes it again. No
server has to run, and a running one is not affected.

The exit code is 0 when gvisor or native works, and 1 otherwise: also without root, because then
neither can be tried.";

/// Arguments of `k8e check-config`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  sudo k8e check-config
  k8e check-config --json | jq '.checks[] | select(.verdict != \"ok\")'")]
pub(crate) struct CheckConfigArgs {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the checks and prints the report.
pub(crate) fn run(globals: &Globals, args: &CheckConfigArgs, guest: &[u8]) -> ExitCode {
    let report = checks::run(Subject {
        data_dir: globals.data_dir.clone(),
        guest: guest.to_vec(),
        launcher: PathBuf::from("/proc/self/exe"),
    });
    let text = match args.json {
        true => format!("{}\n", serde_json::json!(report)),
        false => table(&report),
    };
    k8e_cli::print(text.as_bytes(), u8::from(!report.usable))
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    let mut group = None;
    for check in &report.checks {
        if group.replace(check.group) != Some(check.group) {
            let _ = writeln!(text, "{}", check.group.as_str());
        }
        let (verdict, name) = (check.verdict.as_str(), &check.name);
        let _ = writeln!(text, "  {verdict:<8} {name:<18} {}", check.found);
        if !check.fix.is_empty() {
            let _ = writeln!(text, "{:>29} {}", "→", check.fix);
        }
    }
    let untried = |name: &str| {
        let mut checks = report.checks.iter();
        checks.any(|check| check.name == name && check.verdict == Verdict::Unknown)
    };
    let _ = writeln!(
        text,
        "\n{}",
        match (report.usable, untried("native")) {
            (true, _) => "sandboxes can be created here",
            (false, true) => "not checked: only root can create sandboxes; run it with sudo",
            (false, false) => "sandboxes cannot be created here: fix what is missing",
        }
    );
    text
}
