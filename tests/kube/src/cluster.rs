//! A cluster, from its directory to its last process.

mod control_plane;
mod node;
mod simulated;

use crate::binaries::{self, Need};
use crate::certificates::{self, Certificates, Subject};
use crate::keeper::{self, Keeper};
use crate::service::{self, MARK, Service};
use crate::{Error, error, ports};
use control_plane::ControlPlane;
use node::Network;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long one part may take to answer. Seconds are usual; a machine that compiles beside it on
/// two cores needs more.
const READY_MAX: Duration = Duration::from_secs(180);

/// Says that a directory is a cluster's, and may be removed as one.
const OURS: &str = "cluster";

/// What a cluster has besides its control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Simulated nodes only: pods become Ready, and nothing runs. Needs no root.
    ControlPlane,
    /// A kubelet on this machine too, with containerd, runc and runsc. Needs root.
    Node,
}

/// What to start.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where everything goes; without one, a temporary directory.
    pub dir: Option<PathBuf>,
    /// With a real node or without.
    pub profile: Profile,
    /// How many nodes KWOK simulates.
    pub simulated_nodes: u32,
    /// Whether the apiserver writes who asked for what to `audit.log` in the directory, one JSON
    /// object a line: tests count writes with it.
    pub audit: bool,
}

/// A cluster that runs. Dropping it removes it; so does the end of this process, however it ends.
#[derive(Debug)]
pub struct Cluster {
    dir: PathBuf,
    bin: PathBuf,
    control_plane: ControlPlane,
    services: Vec<Service>,
    keeper: Option<Keeper>,
}

/// What the parts of a cluster need to know to be started.
#[derive(Debug)]
struct Site {
    dir: PathBuf,
    bin: PathBuf,
    certificates: Certificates,
    network: Option<Network>,
    audit: bool,
}

/// Removes the cluster in `dir`, whoever started it and whatever is left of it.
///
/// # Errors
/// When the directory is something else's, or a process does not end.
pub fn down(dir: &Path) -> Result<(), Error> {
    let Ok(dir) = dir.canonicalize() else {
        return Ok(());
    };
    if !dir.join(OURS).is_file() {
        let is_empty = std::fs::read_dir(&dir).is_ok_and(|mut entries| entries.next().is_none());
        return if is_empty {
            Ok(())
        } else {
            Err(Error::NotOurs(dir))
        };
    }
    keeper::remove(&dir)
}

/// Where a person's cluster is when they name no directory.
///
/// # Errors
/// When this person has no home.
pub fn default_dir() -> Result<PathBuf, Error> {
    Ok(binaries::user_cache_dir()?.join("kube-dev"))
}

// === impl Cluster ===

impl Cluster {
    /// Starts a cluster and waits until it can be used. The first time, this builds what it needs.
    ///
    /// # Errors
    /// When something cannot be started; nothing is left of it then.
    pub fn up(options: Options) -> Result<Self, Error> {
        let needs: &[Need] = match options.profile {
            Profile::ControlPlane => &[Need::ControlPlane],
            Profile::Node => &[Need::ControlPlane, Need::Node],
        };
        let bin = binaries::directory(needs)?;
        let dir = make_dir(options.dir.as_deref())?;
        // From here on whatever goes wrong, or whoever kills us, it is removed.
        let keeper = Keeper::start(&dir)?;
        match Self::start(&options, bin, dir) {
            Ok(mut cluster) => {
                cluster.keeper = Some(keeper);
                Ok(cluster)
            }
            Err(why) => {
                keeper.remove()?;
                Err(why)
            }
        }
    }

    fn start(options: &Options, bin: PathBuf, dir: PathBuf) -> Result<Self, Error> {
        let network = match options.profile {
            Profile::ControlPlane => None,
            Profile::Node => Some(Network::make(&dir)?),
        };
        let site = Site {
            certificates: Certificates::make(dir.join("certificates"))?,
            dir,
            bin,
            network,
            audit: options.audit,
        };
        let mut control_plane = ControlPlane::start(&site)?;
        let mut services = Vec::new();
        let started = control_plane
            .finish(&site)
            .and_then(|()| simulated::start(&site, options.simulated_nodes, &mut services))
            .and_then(|()| match &site.network {
                None => Ok(()),
                Some(network) => node::start(&site, network, &mut services),
            });
        let mut cluster = Self {
            dir: site.dir,
            bin: site.bin,
            control_plane,
            services,
            keeper: None,
        };
        match started {
            Ok(()) => Ok(cluster),
            Err(why) => {
                // A part that died says more than the one that waited for it.
                cluster.check()?;
                Err(why)
            }
        }
    }

    /// Fails when a part of the cluster has died, with the end of its log.
    ///
    /// # Errors
    /// Names the part.
    pub fn check(&mut self) -> Result<(), Error> {
        self.control_plane.check()?;
        self.services.iter_mut().try_for_each(Service::check)
    }

    /// The directory with everything this cluster has: logs, keys, `audit.log`.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory with the programs, `kubectl` among them.
    #[must_use]
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// The administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        kubeconfig_path(&self.dir, "kubeconfig")
    }

    /// Writes a kubeconfig with a token of a service account that exists, valid for an hour: what
    /// a program in the cluster would be allowed.
    ///
    /// # Errors
    /// When the apiserver gives no token.
    pub fn service_account_kubeconfig(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<PathBuf, Error> {
        let mut command = self.kubectl();
        let token = service::output(command.args(["create", "token", name, "-n", namespace]))?;
        let user = format!("token: \"{}\"", token.trim());
        let path = kubeconfig_path(&self.dir, &format!("kubeconfig-{namespace}-{name}"));
        let ca = self.dir.join("certificates/ca.crt");
        write_kubeconfig(&path, self.control_plane.url(), &ca, &user)?;
        Ok(path)
    }

    /// `kubectl` as the administrator, with nothing of this person's settings.
    #[must_use]
    pub fn kubectl(&self) -> Command {
        kubectl(&self.bin, &self.dir)
    }

    /// Kills the apiserver, as a crash would.
    ///
    /// # Errors
    /// When it is not running.
    pub fn stop_apiserver(&mut self) -> Result<(), Error> {
        self.control_plane.stop_apiserver()
    }

    /// Starts the apiserver again, at the same address, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn start_apiserver(&mut self) -> Result<(), Error> {
        self.control_plane.start_apiserver(&self.bin, &self.dir)
    }

    /// Leaves the cluster running when this process ends; [`down`] removes it.
    ///
    /// # Errors
    /// When the keeper cannot be told.
    pub fn keep(mut self) -> Result<(), Error> {
        match self.keeper.take() {
            Some(keeper) => keeper.dismiss(),
            None => Ok(()),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let Some(keeper) = self.keeper.take() else {
            return;
        };
        match keeper.remove() {
            Ok(()) => {
                self.control_plane.reap();
                self.services.iter_mut().for_each(Service::reap);
            }
            Err(e) => crate::say(&format!("{} is not removed: {e}", self.dir.display())),
        }
    }
}

// === impl Options ===

impl Default for Options {
    /// A control plane with one simulated node, in a temporary directory.
    fn default() -> Self {
        Self {
            dir: None,
            profile: Profile::ControlPlane,
            simulated_nodes: 1,
            audit: false,
        }
    }
}

// === impl Site ===

impl Site {
    /// A command for one of our programs.
    fn command(&self, program: &str) -> Command {
        let program = self.bin.join(program);
        service::clean_command(&program, &self.bin, &self.dir)
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, Error> {
        let path = self.dir.join(name);
        std::fs::write(&path, text).map_err(error::file("write", &path))?;
        Ok(path)
    }

    /// A kubeconfig for a user of the cluster's own making.
    fn user_kubeconfig(
        &self,
        url: &str,
        file: &str,
        subject: Subject<'_>,
    ) -> Result<PathBuf, Error> {
        let keys = &self.certificates;
        keys.issue(certificates::CLUSTER, file, subject)?;
        let user = format!(
            "client-certificate: {}, client-key: {}",
            keys.cert(file).display(),
            keys.key(file).display()
        );
        let path = kubeconfig_path(&self.dir, file);
        write_kubeconfig(&path, url, &keys.cert(certificates::CLUSTER), &user)?;
        Ok(path)
    }

    fn kubectl(&self) -> Command {
        kubectl(&self.bin, &self.dir)
    }

    /// Creates what a manifest says.
    fn apply(&self, name: &str, manifest: &str) -> Result<(), Error> {
        let path = self.write(name, manifest)?;
        let mut command = self.kubectl();
        service::output(command.args(["apply", "--server-side", "-f"]).arg(path)).map(drop)
    }
}

fn kubectl(bin: &Path, dir: &Path) -> Command {
    let mut command = service::clean_command(&bin.join("kubectl"), bin, dir);
    command.env("KUBECONFIG", kubeconfig_path(dir, "kubeconfig"));
    command
}

fn kubeconfig_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(name)
}

fn write_kubeconfig(path: &Path, url: &str, ca: &Path, user: &str) -> Result<(), Error> {
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

/// An empty directory of ours. One with a cluster in it is emptied first, so that what a crash left
/// is in nobody's way.
fn make_dir(wanted: Option<&Path>) -> Result<PathBuf, Error> {
    use std::os::unix::fs::DirBuilderExt as _;
    let dir = match wanted {
        Some(dir) => {
            down(dir)?;
            let mut builder = std::fs::DirBuilder::new();
            builder
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .map_err(error::file("make", dir))?;
            dir.canonicalize().map_err(error::file("find", dir))?
        }
        None => {
            let base = std::env::temp_dir();
            let made = tempfile::Builder::new()
                .prefix("k8e-kube-")
                .tempdir_in(&base);
            made.map_err(error::file("make a directory in", &base))?
                .keep()
        }
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-_.+".contains(c);
    if !dir.to_str().is_some_and(|name| name.chars().all(is_plain)) {
        return Err(Error::Unspeakable(dir));
    }
    let mark = dir.join(OURS);
    let about =
        format!("a Kubernetes of k8e's tests; processes have {MARK} in their environment\n");
    std::fs::write(&mark, about).map_err(error::file("write", &mark))?;
    Ok(dir)
}

/// A short name that no other cluster on this machine has, for what is outside of the directory.
fn short_name() -> String {
    format!("k8e{:08x}", ports::random())
}
