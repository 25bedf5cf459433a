//! The newest runsc, for tests of saved sessions: built from the Go module proxy with the versions of
//! `deploy/dev/gvisor/go.mod`, once for each version, and kept beside the distribution's.

use crate::{Outcome, process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The pinned module, from the root of the repository.
const MODULE_DIR: &str = "deploy/dev/gvisor";
const MODULE: &str = "gvisor.dev/gvisor";
const PACKAGE: &str = "gvisor.dev/gvisor/runsc";

/// Where Go's own installation guide puts it.
const USUAL_GO: &str = "/usr/local/go/bin";

/// Makes sure that it is in `tools/runsc/<version>`, and that `tools/runsc/newest` leads there.
pub(super) fn install(tools: &Path) -> Outcome {
    let path = Path::new(MODULE_DIR).join("go.mod");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let version = version(&text).ok_or(format!("{} names no version", path.display()))?;
    let all = tools.join("runsc");
    let dir = all.join(version);
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    if !dir.join("runsc").is_file() {
        fs::create_dir_all(&dir).map_err(failed)?;
        let new = dir.join("runsc.new");
        build(version, &new)?;
        fs::rename(&new, dir.join("runsc")).map_err(failed)?;
    }
    let (link, new) = (all.join("newest"), all.join("newest.new"));
    if fs::read_link(&link).is_ok_and(|to| to == Path::new(version)) {
        return Ok(());
    }
    let _ = fs::remove_file(&new);
    std::os::unix::fs::symlink(version, &new)
        .and_then(|()| fs::rename(&new, &link))
        .map_err(failed)
}

/// Static: a runsc that is linked dynamically cannot start sandboxes. Takes two minutes of CPU time.
fn build(version: &str, to: &Path) -> Outcome {
    let date = version.split('-').nth(1).unwrap_or(version);
    let flags = format!("-s -w -X {PACKAGE}/version.version={date}");
    let to = to.to_string_lossy().into_owned();
    let mut command = Command::new("go");
    command
        .current_dir(MODULE_DIR)
        .args([
            "build",
            "-p",
            "2",
            "-trimpath",
            "-buildvcs=false",
            "-mod=readonly",
        ])
        .args(["-ldflags", flags.as_str(), "-o", to.as_str(), PACKAGE])
        .env("PATH", go_path())
        // Settings for this person's own Go projects are not for this one.
        .env_remove("GOFLAGS")
        .env("GOWORK", "off")
        .env("CGO_ENABLED", "0");
    process::run(&mut command)
}

fn go_path() -> std::ffi::OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain([PathBuf::from(USUAL_GO)]);
    std::env::join_paths(dirs).unwrap_or(path)
}

/// The version of gVisor in a `go.mod`.
fn version(go_mod: &str) -> Option<&str> {
    let line = go_mod.lines().find_map(|line| {
        let line = line.trim().trim_start_matches("require ");
        line.strip_prefix(MODULE)?.strip_prefix(' ')
    })?;
    line.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_module() {
        let text = "module x\n\ntool gvisor.dev/gvisor/runsc\n\nrequire (\n\ta.b v1\n\tgvisor.dev/gvisor v0.0.0-2-3 // indirect\n)\n";
        assert_eq!(version(text), Some("v0.0.0-2-3"));
        assert_eq!(version("module x\n"), None);
    }
}
