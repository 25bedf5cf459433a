//! Running other programs: one way to start cargo, one way to report that a command failed.

use crate::Outcome;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Where a sandbox of the `host` template finds programs. What the tests run inside has to be
/// here: a python3 under somebody's home directory does not count.
const SYSTEM_DIRS: &[&str] = &[
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
];

/// The cargo that runs us. What `cargo run` told us about the xtask package is taken out of the
/// environment: some build scripts (ring's) watch it and would build again each time a person
/// changes between `cargo` and `cargo xtask`.
pub(crate) fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name
            .to_str()
            .is_some_and(|name| package.iter().any(|p| name.starts_with(p)))
        {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command on our own terminal; its failure names the whole command.
pub(crate) fn run(command: &mut Command) -> Outcome {
    let status = command
        .status()
        .map_err(|e| format!("{}: {e}", shown(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{}: {status}", shown(command)))
    }
}

/// Runs a command for what it prints on stdout; stderr stays on our terminal.
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{}: {e}", shown(command)))?;
    if !output.status.success() {
        return Err(format!("{}: {}", shown(command), output.status));
    }
    String::from_utf8(output.stdout).map_err(|e| format!("{}: {e}", shown(command)))
}

/// Whether a command succeeds; what it prints is nobody's business.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// A program where a sandbox would find it.
pub(crate) fn system_program(name: &str) -> Option<PathBuf> {
    SYSTEM_DIRS
        .iter()
        .map(|dir| PathBuf::from(dir).join(name))
        .find(|path| path.is_file())
}

/// Whether we are root. The owner of our own /proc directory is our effective user.
pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
