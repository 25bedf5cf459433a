//! `cargo xtask cross-check`: type-checks the client for systems that it cannot be built for here.
//!
//! The standard library of another target cannot be had from Debian for our compiler, but its sources can: cargo compiles
//! them along (`-Zbuild-std`). C code of dependencies is not compiled: a program that writes empty files stands for the
//! target's C compiler, since `cargo check` links nothing.

use crate::{Outcome, process, setup};
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Targets of the client.
const TARGETS: [&str; 2] = ["x86_64-pc-windows-gnu", "x86_64-apple-darwin"];

/// What a client consists of.
const CRATES: [&str; 3] = ["k8e-model", "k8e-api", "k8e-cli"];

/// Suites of Debian that have recent compilers, and so their sources; the smallest index first.
const SUITES: [&str; 2] = ["trixie-backports", "sid"];

/// Stands for C compiler, archiver and dlltool of a target: writes an empty object or archive.
const NO_COMPILER: &str = r#"#!/bin/sh
archive=
object=
while [ $# -gt 0 ]; do
    case "$1" in
        -o) object=$2; shift ;;
        -l) archive=$2; shift ;;
        *.a | *.lib) archive=$1 ;;
    esac
    shift
done
[ -z "$object" ] || : > "$object"
[ -z "$archive" ] || printf '!<arch>\n' > "$archive"
"#;

/// What build scripts are told to call.
const CC: &str = "no-cc";

/// What rustc calls for the import libraries of `x86_64-pc-windows-gnu`.
const DLLTOOL: &str = "x86_64-w64-mingw32-dlltool";

/// Checks every target, or says why none was.
pub(crate) fn run() -> Outcome {
    let sources = match sources() {
        Ok(sources) => sources,
        Err(reason) => {
            for target in TARGETS {
                eprintln!("NOT CHECKED {target}: {reason}");
            }
            return Ok(());
        }
    };
    let tools = no_compiler()?;
    for target in TARGETS {
        check(target, &sources, &tools)?;
        eprintln!("checked {target}: {}", CRATES.join(", "));
    }
    Ok(())
}

fn check(target: &str, sources: &Path, tools: &Path) -> Outcome {
    let mut path = OsString::from(tools);
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let variable = |tool: &str| format!("{tool}_{}", target.replace('-', "_"));
    let mut cargo = process::cargo();
    cargo
        .args(["check", "--locked", "-Zbuild-std=std", "--target", target])
        .args(["--target-dir", "target/cross"])
        .args(CRATES.iter().flat_map(|name| ["-p", *name]))
        // Both are what cargo's own tests use: unstable features on this compiler, and sources elsewhere.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("__CARGO_TESTS_ONLY_SRC_ROOT", sources)
        .env("PATH", path)
        .env(variable("CC"), tools.join(CC))
        .env(variable("AR"), tools.join(CC));
    process::run(&mut cargo)
}

/// The directory `library` with the sources of our compiler's standard library: rustup's component `rust-src`, else
/// Debian's package of the same version.
fn sources() -> Result<PathBuf, String> {
    let sysroot = process::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let component = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    if component.exists() {
        return Ok(component);
    }
    let version = process::output(Command::new("rustc").arg("--version"))?;
    let version = version.split(' ').nth(1).unwrap_or_default().to_owned();
    let unpacked = setup::tools_dir()?.join("rust-src");
    let library = unpacked.join(format!("usr/src/rustc-{version}/library"));
    if !library.exists() {
        let package = download(&version)?;
        process::run(Command::new("dpkg").arg("-x").arg(package).arg(&unpacked))?;
    }
    match library.join("Cargo.lock").exists() {
        true => Ok(library),
        false => Err(format!("Debian's rust-src of {version} is incomplete")),
    }
}

/// Downloads Debian's `rust-src` of this version from the mirror that the machine uses. Nothing is installed, and the
/// machine's own package lists stay as they are.
fn download(version: &str) -> Result<PathBuf, String> {
    let missing = |suite: &str| {
        format!("no sources of std {version} (`rustup component add rust-src`; not in {suite})")
    };
    let mirror = setup::debian_mirror().map_err(|_| missing("any Debian suite"))?;
    let dir = setup::tools_dir()?.join("apt");
    for part in ["lists/partial", "cache/archives/partial"] {
        let part = dir.join(part);
        std::fs::create_dir_all(&part).map_err(|e| format!("{}: {e}", part.display()))?;
    }
    for suite in SUITES {
        let list = dir.join("sources.list");
        let signed = setup::archive_keys().map(|keys| format!("[signed-by={keys}] "));
        let line = format!("deb {}{mirror} {suite} main\n", signed.unwrap_or_default());
        std::fs::write(&list, line).map_err(|e| format!("{}: {e}", list.display()))?;
        let apt = |program: &str| {
            let mut apt = Command::new(program);
            for (option, value) in [
                ("Dir::Etc::sourcelist", list.clone()),
                ("Dir::Etc::sourceparts", PathBuf::from("-")),
                ("Dir::State::lists", dir.join("lists")),
                ("Dir::Cache", dir.join("cache")),
                ("Acquire::Languages", PathBuf::from("none")),
            ] {
                apt.arg("-o").arg(format!("{option}={}", value.display()));
            }
            apt.current_dir(&dir);
            apt
        };
        process::run(apt("apt-get").args(["update", "--quiet=2"]))?;
        let known = process::output(apt("apt-cache").args(["madison", "rust-src"]))?;
        let Some(found) = debian_version(&known, version) else {
            continue;
        };
        let package = format!("rust-src={found}");
        process::run(apt("apt-get").args(["download", "--quiet=2", &package]))?;
        let escaped = found.replace(':', "%3a");
        return Ok(dir.join(format!("rust-src_{escaped}_all.deb")));
    }
    Err(missing(&SUITES.join(", ")))
}

/// The Debian version of an upstream one in the output of `apt-cache madison`: `rust-src | 1.95.0+dfsg1-2 | …`.
fn debian_version(known: &str, upstream: &str) -> Option<String> {
    let versions = known.lines().filter_map(|line| line.split('|').nth(1));
    let matches = |version: &&str| {
        let rest = version.strip_prefix(upstream);
        rest.is_some_and(|rest| rest.starts_with(['+', '-']))
    };
    versions.map(str::trim).find(matches).map(str::to_owned)
}

/// A directory with a program that stands for the tools of the targets, under each name that is looked for.
fn no_compiler() -> Result<PathBuf, String> {
    let dir = setup::tools_dir()?.join("no-compiler");
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    for name in [CC, DLLTOOL] {
        let path = dir.join(name);
        let failed = |e| format!("{}: {e}", path.display());
        std::fs::write(&path, NO_COMPILER).map_err(failed)?;
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, mode).map_err(failed)?;
    }
    std::path::absolute(&dir).map_err(|e| format!("{}: {e}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_version_counts() {
        let known = "  rust-src | 1.97.1+dfsg1-1 | http://a sid/main amd64 Packages\n\
                     \x20 rust-src | 1.95.0+dfsg1-2~bpo13+1 | http://a b/main amd64 Packages\n";
        let found = debian_version(known, "1.95.0");
        assert_eq!(found.as_deref(), Some("1.95.0+dfsg1-2~bpo13+1"));
        assert_eq!(debian_version(known, "1.95"), None);
        assert_eq!(debian_version(known, "1.96.0"), None);
    }
}
