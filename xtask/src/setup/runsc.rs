//! A `runsc` that works: gVisor is the default runtime, and its driver's tests fail without.
//!
//! Debian 12 has one that is too old and its backports one that is right; some builds die of the
//! first process made inside. So one counts only when it has made a process here.

use super::apt_get;
use crate::{Outcome, process};
use std::path::Path;
use std::process::{Command, Stdio};

/// Where Debian keeps the keys of its archive; other systems let apt find theirs.
const ARCHIVE_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Makes sure that there is one.
pub(super) fn install() -> Outcome {
    if works() {
        return Ok(());
    }
    eprintln!("missing: a runsc that works (gVisor sandboxes)");
    let by_hand = "install runsc by gVisor's installation guide, and check it with:\n  \
                   runsc --network=none --ignore-cgroups do sh -c 'true & wait; echo works'";
    if !process::is_root() || process::system_program("apt-get").is_none() {
        return Err(by_hand.to_owned());
    }
    let mut install = apt_get();
    install.args(["install", "--yes", "--no-install-recommends"]);
    match codename().as_deref() {
        Some("bookworm") => {
            add_backports("bookworm")?;
            install.args(["--target-release", "bookworm-backports"]);
        }
        Some(_) | None => process::run(apt_get().args(["update", "--quiet=2"]))?,
    }
    process::run(install.arg("runsc"))?;
    if works() {
        Ok(())
    } else {
        Err(format!(
            "the runsc that apt-get installed does not work here: {by_hand}"
        ))
    }
}

/// Whether a process can be made inside.
fn works() -> bool {
    let Some(runsc) = process::system_program("runsc") else {
        return false;
    };
    let output = Command::new(runsc)
        .args(["--network=none", "--ignore-cgroups", "do"])
        .args(["sh", "-c", "(true); true & wait; echo works"])
        .stdin(Stdio::null())
        .output();
    output.is_ok_and(|output| output.status.success() && output.stdout == b"works\n")
}

fn codename() -> Option<String> {
    let text = std::fs::read_to_string("/etc/os-release").ok()?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    Some(value.trim_matches('"').to_owned())
}

/// The mirror that this machine uses for its own release.
pub(super) fn mirror() -> Result<String, String> {
    let release = codename().ok_or("this system has no release name")?;
    let known = known_mirrors()?;
    let mirror = mirror_of(&known, &release);
    Ok(mirror
        .ok_or_else(|| format!("apt knows no mirror of {release}"))?
        .to_owned())
}

/// The keys of Debian's archive, where apt does not find them by itself.
pub(super) fn archive_keys() -> Option<&'static str> {
    Path::new(ARCHIVE_KEYS).exists().then_some(ARCHIVE_KEYS)
}

/// Lines of `release mirror`.
fn known_mirrors() -> Result<String, String> {
    let mut targets = apt_get();
    targets.args(["indextargets", "--format", "$(RELEASE) $(REPO_URI)"]);
    process::output(targets.arg("Created-By: Packages"))
}

/// Adds the backports of this release, from the mirror that this machine uses for the release.
fn add_backports(release: &str) -> Outcome {
    let known = known_mirrors()?;
    let suite = format!("{release}-backports");
    if mirror_of(&known, &suite).is_none() {
        let mirror = mirror_of(&known, release)
            .ok_or_else(|| format!("apt knows no mirror of {release}: add {suite} by hand"))?;
        let path = format!("/etc/apt/sources.list.d/{suite}.sources");
        eprintln!("adding {path}");
        std::fs::write(&path, source(mirror, &suite, archive_keys()))
            .map_err(|e| format!("{path}: {e}"))?;
    }
    process::run(apt_get().args(["update", "--quiet=2"]))
}

/// The first mirror in lines of `release mirror`.
fn mirror_of<'a>(known: &'a str, release: &str) -> Option<&'a str> {
    known
        .lines()
        .find_map(|line| line.strip_prefix(release)?.strip_prefix(' '))
}

fn source(mirror: &str, suite: &str, keys: Option<&str>) -> String {
    let signed = keys.map(|keys| format!("Signed-By: {keys}\n"));
    format!(
        "Types: deb\nURIs: {mirror}\nSuites: {suite}\nComponents: main\n{}",
        signed.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_machines_own() {
        let known = "other-security http://a/\nother http://b/debian/\n";
        assert_eq!(mirror_of(known, "other"), Some("http://b/debian/"));
        assert_eq!(mirror_of(known, "other-backports"), None);
        assert_eq!(
            source("http://b/", "x-backports", None),
            "Types: deb\nURIs: http://b/\nSuites: x-backports\nComponents: main\n"
        );
        assert!(source("http://b/", "x", Some("/k")).ends_with("Signed-By: /k\n"));
    }
}
