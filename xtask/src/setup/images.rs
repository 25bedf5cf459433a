//! A root file system for tests of images: Debian's minimal base with Python, made once by mmdebstrap from
//! the packages of the machine's own release.

use crate::{Outcome, process};
use std::path::Path;
use std::process::Command;

const INCLUDE: &str = "python3-minimal";

/// Makes sure that `images/python.tar` is in `tools`, and `images/python`, an OCI layout of it.
pub(super) fn install(tools: &Path) -> Outcome {
    let dir = tools.join("images");
    root_file_system(&dir)?;
    layout(&dir)
}

fn layout(dir: &Path) -> Outcome {
    let (layout, new) = (dir.join("python"), dir.join("python.new"));
    if layout.exists() {
        return Ok(());
    }
    // Of a set-up that was interrupted.
    let _ = std::fs::remove_dir_all(&new);
    let image = format!("{}:python", new.display());
    let umoci = || Command::new("umoci");
    process::run(umoci().args(["init", "--layout"]).arg(&new))?;
    process::run(umoci().args(["new", "--image", &image]))?;
    let mut add = umoci();
    add.args(["raw", "add-layer", "--image", &image]);
    process::run(add.arg(dir.join("python.tar")))?;
    std::fs::rename(&new, &layout).map_err(|error| format!("{}: {error}", layout.display()))
}

fn root_file_system(dir: &Path) -> Outcome {
    let (tar, new) = (dir.join("python.tar"), dir.join("python.new.tar"));
    if tar.exists() {
        return Ok(());
    }
    if !process::is_root() {
        return Err(format!(
            "missing: {} (tests of images); as root: cargo xtask setup",
            tar.display()
        ));
    }
    eprintln!("making {} with mmdebstrap", tar.display());
    std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let suite = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .unwrap_or("stable");
    // Device nodes are not for layers; files of packages need not be on the disk when it ends.
    process::run(
        Command::new("mmdebstrap")
            .args(["--quiet", "--variant=minbase", "--skip=output/mknod"])
            .args(["--dpkgopt=force-unsafe-io", &format!("--include={INCLUDE}")])
            .arg(suite)
            .arg(&new),
    )?;
    std::fs::rename(&new, &tar).map_err(|error| format!("{}: {error}", tar.display()))
}
