//! Builds the two programs k8e is made of: the static guest, and the `k8e` binary that carries it; and
//! the runtime for images, which is static too and part of neither.
//!
//! This is a task and not a build script because a build script that calls cargo waits for the
//! lock its own cargo holds, and hides a second build from whoever reads the first one's output.

use crate::{Outcome, process};
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which profile of the workspace the `k8e` binary is built with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flavor {
    /// Quick to build: to try it.
    Try,
    /// As quick, with the features that tests want, so that one build serves the program and its tests.
    Ci,
    /// What people install.
    Dist,
}

/// Where the built programs are.
pub(crate) struct Binaries {
    /// The server and the client.
    pub(crate) k8e: PathBuf,
    /// The agent inside a sandbox; also inside `k8e`.
    pub(crate) guest: PathBuf,
}

/// Builds both and says where `k8e` is.
pub(crate) fn build(flavor: Flavor) -> Result<Binaries, String> {
    let target_dir = target_dir()?;
    let guest = build_static(&target_dir, "k8e-guest")?;
    let profile = flavor.profile();
    let mut command = process::cargo();
    command
        .args(["build", "--package", "k8e", "--profile", profile])
        .env("K8E_GUEST_BIN", &guest);
    let features = flavor.features();
    if !features.is_empty() {
        command.arg("--features").arg(features.join(","));
    }
    process::run(&mut command)?;
    let k8e = target_dir.join(profile).join("k8e");
    eprintln!("built {}", k8e.display());
    Ok(Binaries { k8e, guest })
}

/// Builds the runtime that goes into images of Kubernetes sandboxes, and says where it is.
pub(crate) fn build_runtime() -> Result<PathBuf, String> {
    build_static(&target_dir()?, "k8e-runtime")
}

/// Builds, then becomes `k8e` with these arguments, in the directory the person is in.
pub(crate) fn run(args: &[OsString], called_from: &Path) -> Outcome {
    let binaries = build(Flavor::Try)?;
    if !process::is_root() {
        eprintln!(
            "note: a k8e server makes sandboxes as root. If none runs here yet, use\n  \
             sudo -E env \"PATH=$PATH\" cargo xtask run …"
        );
    }
    let failed = Command::new(&binaries.k8e)
        .args(args)
        .current_dir(called_from)
        .exec();
    Err(format!("{}: {failed}", binaries.k8e.display()))
}

/// Where cargo puts what it builds, absolute.
pub(crate) fn target_dir() -> Result<PathBuf, String> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str();
    dir.map(PathBuf::from)
        .ok_or_else(|| "cargo metadata names no target directory".to_owned())
}

/// What cargo knows of the packages of this workspace, without their dependencies' own.
pub(crate) fn metadata() -> Result<serde_json::Value, String> {
    let mut command = process::cargo();
    let json = process::output(command.args(["metadata", "--no-deps", "--format-version", "1"]))?;
    serde_json::from_str(&json).map_err(|e| format!("cargo metadata: {e}"))
}

/// What runs inside is static: nothing but the kernel can be relied on there. It has a target
/// directory of its own, and only this command the flag, so that no other build is disturbed.
fn build_static(target_dir: &Path, package: &str) -> Result<PathBuf, String> {
    let triple = linux_triple()?;
    let own_dir = target_dir.join("guest");
    let mut command = process::cargo();
    command
        .args([
            "build",
            "--package",
            package,
            "--profile",
            "guest",
            "--target",
            &triple,
        ])
        .arg("--target-dir")
        .arg(&own_dir)
        // The encoded form wins over RUSTFLAGS, so one of the person's must not get through.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    process::run(&mut command)?;
    Ok(own_dir.join(triple).join("guest").join(package))
}

pub(crate) fn linux_triple() -> Result<String, String> {
    let text = process::output(Command::new("rustc").arg("-vV"))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    triple_for(host.unwrap_or_default())
}

fn triple_for(host: &str) -> Result<String, String> {
    match host.split_once('-') {
        Some((arch, system)) if system.contains("linux") => Ok(format!("{arch}-unknown-linux-gnu")),
        _ => Err(format!(
            "the k8e server and guest are built on Linux, and rustc's host is {host:?}"
        )),
    }
}

// === impl Flavor ===

impl Flavor {
    fn profile(self) -> &'static str {
        match self {
            Self::Try | Self::Ci => "ci",
            Self::Dist => "dist",
        }
    }

    /// Without these, all that uses tokio or k8s-openapi would be built twice, for the program and for
    /// its tests. Schemas are left out where no test needs them: they take longest to compile.
    fn features(self) -> &'static [&'static str] {
        match self {
            Self::Try => &["tokio/test-util"],
            Self::Ci => &["tokio/test-util", "k8e-operator/schema"],
            Self::Dist => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::triple_for;

    #[test]
    fn the_guest_is_built_for_the_architecture_of_the_host() {
        for (host, want) in [
            ("x86_64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"),
            ("aarch64-unknown-linux-musl", "aarch64-unknown-linux-gnu"),
        ] {
            assert_eq!(triple_for(host).as_deref(), Ok(want));
        }
        for host in ["aarch64-apple-darwin", ""] {
            assert!(triple_for(host).is_err(), "{host:?}");
        }
    }
}
