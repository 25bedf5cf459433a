//! `cargo xtask release`: a directory with the files of a release, as `deploy/install.sh` fetches them.
//!
//! | file | |
//! |---|---|
//! | `k8e-linux-amd64` or `-arm64` | the binary, for this machine's architecture |
//! | `k8e-runtime-linux-amd64` or `-arm64` | the runtime for images of Kubernetes sandboxes |
//! | `install.sh`, `k8e.service` | installation; the script knows the key, if there is one |
//! | `SHA256SUMS`, `SHA256SUMS.sig` | sums of all files; their Ed25519 signature, with `--key` |

use crate::binaries::{self, Flavor};
use crate::{Outcome, process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the release goes, below cargo's target directory, unless `--out` says otherwise.
const OUT_DIR: &str = "release.d";

/// What `install.sh` has in place of the public key.
const NO_KEY: &str = "\nPUBLIC_KEY=''\n";

/// Options of the task.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    out: Option<PathBuf>,
    /// Private key (PEM) that signs the sums.
    key: Option<PathBuf>,
}

pub(crate) fn run(args: &[&str], called_from: &Path) -> Outcome {
    let options = Options::parse(args, called_from)?;
    let out = match options.out {
        Some(out) => out,
        None => binaries::target_dir()?.join(OUT_DIR),
    };
    let machine = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => return Err(format!("no release is made for {other}")),
    };
    let k8e = binaries::build(Flavor::Dist)?.k8e;
    let runtime = binaries::build_runtime()?;

    // From a release before: a file that is no part of this one must not get a sum.
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).map_err(failed("make", &out))?;
    copy(&k8e, &out.join(format!("k8e-linux-{machine}")))?;
    copy(&runtime, &out.join(format!("k8e-runtime-linux-{machine}")))?;
    copy(
        Path::new("deploy/systemd/k8e.service"),
        &out.join("k8e.service"),
    )?;
    let script = fs::read_to_string("deploy/install.sh")
        .map_err(failed("read", Path::new("deploy/install.sh")))?;
    let script = match &options.key {
        Some(key) => with_key(&script, &public_key(key)?)?,
        None => script,
    };
    let install = out.join("install.sh");
    fs::write(&install, script).map_err(failed("write", &install))?;

    write_sums(&out)?;
    if let Some(key) = &options.key {
        let (sums, signature) = (out.join("SHA256SUMS"), out.join("SHA256SUMS.sig"));
        let mut sign = Command::new("openssl");
        sign.args(["pkeyutl", "-sign", "-rawin", "-inkey"]).arg(key);
        process::run(sign.arg("-in").arg(sums).arg("-out").arg(signature))?;
    }
    println!("{}", out.display());
    Ok(())
}

fn write_sums(out: &Path) -> Outcome {
    let mut names = Vec::new();
    for entry in fs::read_dir(out).map_err(failed("read", out))? {
        let entry = entry.map_err(failed("read", out))?;
        names.push(entry.file_name());
    }
    names.sort();
    let sums = process::output(Command::new("sha256sum").args(&names).current_dir(out))?;
    let path = out.join("SHA256SUMS");
    fs::write(&path, sums).map_err(failed("write", &path))
}

fn public_key(private: &Path) -> Result<String, String> {
    let mut show = Command::new("openssl");
    process::output(show.args(["pkey", "-pubout", "-in"]).arg(private))
}

/// The script with the key that the release is signed with.
fn with_key(script: &str, pem: &str) -> Result<String, String> {
    if pem.contains('\'') || !pem.starts_with("-----BEGIN PUBLIC KEY-----") {
        return Err("--key: openssl finds no public key in it".to_owned());
    }
    if script.matches(NO_KEY).count() != 1 {
        return Err("deploy/install.sh has no line PUBLIC_KEY=''".to_owned());
    }
    Ok(script.replace(NO_KEY, &format!("\nPUBLIC_KEY='{}'\n", pem.trim_end())))
}

fn copy(from: &Path, to: &Path) -> Outcome {
    fs::copy(from, to).map(drop).map_err(failed("copy", from))
}

fn failed(what: &str, path: &Path) -> impl FnOnce(std::io::Error) -> String {
    let message = format!("{what} {}", path.display());
    move |error| format!("{message}: {error}")
}

// === impl Options ===

impl Options {
    fn parse(args: &[&str], called_from: &Path) -> Result<Self, String> {
        let mut options = Self::default();
        let mut args = args.iter();
        while let Some(option) = args.next() {
            let value = args.next().map(|path| called_from.join(path));
            match (*option, value) {
                ("--out", Some(out)) => options.out = Some(out),
                ("--key", Some(key)) => options.key = Some(key),
                _ => return Err("usage: cargo xtask release [--out DIR] [--key PEM]".to_owned()),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::{Options, with_key};
    use std::path::Path;

    #[test]
    fn options_are_read() {
        let parse = |args: &[&str]| Options::parse(args, Path::new("/at"));
        let options = parse(&["--key", "k.pem", "--out", "/out"]).unwrap();
        assert_eq!(options.key.as_deref(), Some(Path::new("/at/k.pem")));
        assert_eq!(options.out.as_deref(), Some(Path::new("/out")));
        assert_eq!(parse(&[]), Ok(Options::default()));
        assert!(parse(&["--key"]).is_err());
        assert!(parse(&["--sign", "x"]).is_err());
    }

    #[test]
    fn the_script_gets_the_key() {
        let script = include_str!("../../deploy/install.sh");
        let pem = "-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n";
        let with = with_key(script, pem).unwrap();
        assert!(
            with.contains(
                "PUBLIC_KEY='-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----'\n"
            )
        );
        assert!(with_key(&with, pem).is_err());
        assert!(with_key(script, "nothing").is_err());
    }
}
