//! What the parts of a cluster share: its directory, its programs, its keys, and how they are written to
//! and called.

use super::node::Network;
use crate::certificates::{self, Certificates, Subject};
use crate::{Error, error, service};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the parts of a cluster need to know to be started.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) dir: PathBuf,
    pub(super) bin: PathBuf,
    pub(super) certificates: Certificates,
    pub(super) network: Option<Network>,
    pub(super) audit: bool,
}

// === impl Site ===

impl Site {
    /// A command for one of our programs.
    pub(super) fn command(&self, program: &str) -> Command {
        let program = self.bin.join(program);
        service::clean_command(&program, &self.bin, &self.dir)
    }

    /// A command for a program of the system.
    pub(super) fn system_command(&self, program: &str) -> Command {
        service::clean_command(Path::new(program), &self.bin, &self.dir)
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf, Error> {
        let path = self.dir.join(name);
        std::fs::write(&path, text).map_err(error::file("write", &path))?;
        Ok(path)
    }

    /// Writes a kubeconfig for a user of the cluster's own making.
    pub(super) fn user_kubeconfig(
        &self,
        path: &Path,
        url: &str,
        file: &str,
        subject: Subject<'_>,
    ) -> Result<(), Error> {
        let keys = &self.certificates;
        keys.issue(certificates::CLUSTER, file, subject)?;
        let user = format!(
            "client-certificate: {}, client-key: {}",
            keys.cert(file).display(),
            keys.key(file).display()
        );
        write_kubeconfig(path, url, &keys.cert(certificates::CLUSTER), &user)
    }

    pub(super) fn kubectl(&self) -> Command {
        kubectl(&self.bin, &self.dir)
    }

    /// Creates what a manifest says.
    pub(super) fn apply(&self, name: &str, manifest: &str) -> Result<(), Error> {
        let path = self.write(name, manifest)?;
        let mut command = self.kubectl();
        service::output(command.args(["apply", "--server-side", "-f"]).arg(path)).map(drop)
    }
}

/// `kubectl` as the administrator of the cluster in `dir`.
pub(super) fn kubectl(bin: &Path, dir: &Path) -> Command {
    let mut command = service::clean_command(&bin.join("kubectl"), bin, dir);
    command.env("KUBECONFIG", kubeconfig_path(dir));
    command
}

/// The administrator's kubeconfig.
pub(super) fn kubeconfig_path(dir: &Path) -> PathBuf {
    dir.join("kubeconfig")
}

/// Writes a kubeconfig with the fields of a user, which only its owner can read.
pub(super) fn write_kubeconfig(path: &Path, url: &str, ca: &Path, user: &str) -> Result<(), Error> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let text = format!(
        "apiVersion: v1
kind: Config
clusters: [{{name: kube, cluster: {{server: \"{url}\", certificate-authority: {}}}}}]
users: [{{name: user, user: {{{user}}}}}]
contexts: [{{name: kube, context: {{cluster: kube, user: user}}}}]
current-context: kube
",
        ca.display()
    );
    let mut options = std::fs::OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    options
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(error::file("write", path))
}
