//! `k8e doctor`: the checks of the client, and those of this machine where the server is on it.

use clap::CommandFactory as _;
use k8e_cli::Globals;
use k8e_cli::doctor::{Check, DoctorArgs, check_client, report};
use k8e_driver::checks::{self, Subject, Verdict};
use std::path::PathBuf;
use std::process::ExitCode;

/// Runs the checks and prints the report. The machine comes first: its trial must be made by a process with one thread.
pub(crate) fn run(globals: &Globals, args: &DoctorArgs, guest: &[u8]) -> ExitCode {
    let is_local = k8e_cli::doctor::is_local(globals);
    let machine = is_local.then(|| check_machine(globals, guest));
    let mut found = check_client(globals, crate::K8e::command);
    found.extend(machine.unwrap_or_default());
    report(&found, args)
}

/// What of `k8e check-config` is a problem; everything else is one line.
fn check_machine(globals: &Globals, guest: &[u8]) -> Vec<Check> {
    if !rustix::process::geteuid().is_root() {
        let detail = "not checked: only root can create a sandbox to try it; run `sudo k8e doctor`";
        return vec![Check::ok("machine", detail)];
    }
    let machine = checks::run(Subject {
        data_dir: globals.data_dir.clone(),
        guest: guest.to_vec(),
        launcher: PathBuf::from("/proc/self/exe"),
    });
    if machine.usable {
        let detail = "sandboxes can be created here; `k8e check-config` has the details";
        return vec![Check::ok("machine", detail)];
    }
    let missing = machine
        .checks
        .iter()
        .filter(|check| check.verdict == Verdict::Missing);
    missing
        .map(|check| Check::problem(&check.name, &check.found, &check.fix))
        .collect()
}
