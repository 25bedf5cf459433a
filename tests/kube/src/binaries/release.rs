//! Official release downloads, with the checksum that the release publishes beside them. A machine
//! that cannot reach them finds out in seconds, once for each host.

use super::{Program, hex};
use ring::digest::{Context, SHA256};
use std::collections::HashSet;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Who publishes what we use.
const KUBERNETES: &str = "https://dl.k8s.io/release";
const GITHUB: &str = "https://github.com";
const HELM: &str = "https://get.helm.sh";

/// How long a host may take to answer at all, and to hand over a checksum.
const CONNECT_SECONDS_MAX: &str = "3";
const CHECKSUM_SECONDS_MAX: &str = "15";

/// How long a program may take to arrive: the largest is 100 MB.
const DOWNLOAD_SECONDS_MAX: &str = "900";

/// Downloads of one session: hosts that did not answer are not asked again.
#[derive(Debug, Default)]
pub(super) struct Releases {
    unreachable: HashSet<&'static str>,
}

/// Where a program is published.
#[derive(Debug)]
struct Published {
    host: &'static str,
    url: String,
    checksums: String,
    /// Its name in the archive, when it is in one.
    member: Option<String>,
}

// === impl Releases ===

impl Releases {
    /// Downloads a program as `made`, or says why not.
    pub(super) fn download(
        &mut self,
        program: &Program,
        version: &str,
        made: &Path,
        scratch: &Path,
    ) -> Result<(), String> {
        let published = published(program, version).ok_or("none for this machine")?;
        if self.unreachable.contains(published.host) {
            return Err(format!("{} does not answer", published.host));
        }
        let sums = scratch.join("checksums");
        if let Err(reason) = fetch(&published.checksums, &sums, CHECKSUM_SECONDS_MAX) {
            self.unreachable.insert(published.host);
            return Err(reason);
        }
        let sums = std::fs::read_to_string(&sums).map_err(|e| format!("checksums: {e}"))?;
        let file_name = published.url.rsplit('/').next().unwrap_or_default();
        let wanted = checksum_of(&sums, file_name).ok_or("the release has no checksum for it")?;

        // Programs of one archive come one after the other.
        let got = scratch.join(file_name);
        if !got.exists() {
            fetch(&published.url, &got, DOWNLOAD_SECONDS_MAX)?;
        }
        let is = sha256(&got).map_err(|e| format!("{file_name}: {e}"))?;
        if is != wanted {
            return Err(format!(
                "{file_name} has checksum {is}, its release says {wanted}"
            ));
        }
        match &published.member {
            Some(member) => extract(&got, member, made)?,
            None => std::fs::rename(&got, made).map_err(|e| format!("{file_name}: {e}"))?,
        }
        make_executable(made).map_err(|e| format!("{file_name}: {e}"))
    }
}

fn published(program: &Program, version: &str) -> Option<Published> {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        _ => return None,
    };
    let name = program.name;
    let plain = version.trim_start_matches('v');
    let (host, url, checksums, member) = match program.module {
        "kubernetes" => {
            let url = format!("{KUBERNETES}/{version}/bin/linux/{arch}/{name}");
            let sums = format!("{url}.sha256");
            (KUBERNETES, url, sums, None)
        }
        "etcd" => {
            let base = format!("{GITHUB}/etcd-io/etcd/releases/download/{version}");
            let folder = format!("etcd-{version}-linux-{arch}");
            let url = format!("{base}/{folder}.tar.gz");
            let sums = format!("{base}/SHA256SUMS");
            (GITHUB, url, sums, Some(format!("{folder}/{name}")))
        }
        "containerd" => {
            let base = format!("{GITHUB}/containerd/containerd/releases/download/{version}");
            let url = format!("{base}/containerd-{plain}-linux-{arch}.tar.gz");
            let sums = format!("{url}.sha256sum");
            (GITHUB, url, sums, Some(format!("bin/{name}")))
        }
        "helm" => {
            let url = format!("{HELM}/helm-{version}-linux-{arch}.tar.gz");
            let sums = format!("{url}.sha256sum");
            (HELM, url, sums, Some(format!("linux-{arch}/{name}")))
        }
        // Without a published checksum there is nothing to compare a download with.
        _ => return None,
    };
    Some(Published {
        host,
        url,
        checksums,
        member,
    })
}

fn fetch(url: &str, to: &Path, seconds_max: &str) -> Result<(), String> {
    let output = Command::new("curl")
        .args(["--fail", "--silent", "--show-error", "--location"])
        .args(["--proto", "=https", "--proto-redir", "=https"])
        .args(["--connect-timeout", CONNECT_SECONDS_MAX])
        .args(["--max-time", seconds_max, "--output"])
        .arg(to)
        .arg(url)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("curl: {e}"))?;
    if output.status.success() {
        Ok(())
    } else {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(format!("{url}: {said}"))
    }
}

fn extract(archive: &Path, member: &str, made: &Path) -> Result<(), String> {
    let file = File::create(made).map_err(|e| format!("{}: {e}", made.display()))?;
    let status = Command::new("tar")
        .args(["--extract", "--gzip", "--to-stdout", "--file"])
        .arg(archive)
        .arg(member)
        .stdin(Stdio::null())
        .stdout(file)
        .status()
        .map_err(|e| format!("tar: {e}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("tar: no {member} in the release: {status}"))
    }
}

fn make_executable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
}

/// The checksum of `file_name` in lines of `checksum name`, or the only one there is.
fn checksum_of(sums: &str, file_name: &str) -> Option<String> {
    let mut found = sums.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let sum = words.next().filter(|sum| sum.len() == 64)?;
        let name = words.next().map(|name| name.trim_start_matches('*'));
        let is_it = name.is_none_or(|name| name.rsplit('/').next() == Some(file_name));
        is_it.then(|| sum.to_ascii_lowercase())
    });
    found.next()
}

fn sha256(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut context = Context::new(&SHA256);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(hex(context.finish().as_ref()));
        }
        context.update(&buffer[..read]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_that_of_the_file_that_was_asked_for() {
        let (a, b) = ("a".repeat(64), "B".repeat(64));
        let sums = format!("{a}  other.tar.gz\n{b} *wanted.tar.gz\n");
        assert_eq!(
            checksum_of(&sums, "wanted.tar.gz"),
            Some(b.to_ascii_lowercase())
        );
        assert_eq!(checksum_of(&a, "wanted"), Some(a.clone()));
        assert_eq!(checksum_of(&sums, "third"), None);
        assert_eq!(checksum_of("<html>not found</html>", "wanted"), None);
    }

    #[test]
    fn a_file_is_digested_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, b"abc").unwrap();
        assert_eq!(
            sha256(&path).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
