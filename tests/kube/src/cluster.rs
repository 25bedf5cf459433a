//! A cluster, from its directory to its last process.

mod control_plane;
mod node;
mod simulated;
mod site;

use crate::binaries::{self, Need};
use crate::certificates::Certificates;
use crate::keeper::{self, Keeper};
use crate::service::{self, MARK, Service};
use crate::{Error, Image, error};
use control_plane::ControlPlane;
use node::Network;
use site::{Site, kubeconfig_path, kubectl, write_kubeconfig};
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
        if options.profile == Profile::Node {
            node::check_machine()?;
        }
        let bin = binaries::directory(needs)?;
        let dir = make_dir(options.dir.as_deref())?;
        // From here on whatever goes wrong, or whoever kills us, it is removed.
        let keeper = Keeper::start(&dir)?;
        match Self::start(&options, bin, dir.clone()) {
            Ok(mut cluster) => {
                cluster.keeper = Some(keeper);
                Ok(cluster)
            }
            Err(why) => {
                keep_logs(&dir);
                remove(keeper, &dir);
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
        let url = control_plane.url().to_owned();
        let started = control_plane
            .finish(&site)
            .and_then(|()| simulated::start(&site, options.simulated_nodes, &mut services))
            .and_then(|()| match &site.network {
                None => Ok(()),
                Some(network) => node::start(&site, network, &url, &mut services),
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
        kubeconfig_path(&self.dir)
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
        let path = self.dir.join(format!("{namespace}-{name}.kubeconfig"));
        let ca = self.dir.join("certificates/ca.crt");
        write_kubeconfig(&path, self.control_plane.url(), &ca, &user)?;
        Ok(path)
    }

    /// `kubectl` as the administrator, with nothing of this person's settings.
    #[must_use]
    pub fn kubectl(&self) -> Command {
        kubectl(&self.bin, &self.dir)
    }

    /// Hands an image to the containerd of a cluster with a real node.
    ///
    /// # Errors
    /// When the image cannot be made, or there is no such node.
    pub fn import(&self, image: &Image) -> Result<(), Error> {
        let socket = node::containerd_socket(&self.dir);
        image.import(&self.bin, &self.dir, &socket)
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
        if std::thread::panicking() {
            keep_logs(&self.dir);
        }
        if remove(keeper, &self.dir) {
            self.control_plane.reap();
            self.services.iter_mut().for_each(Service::reap);
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

/// Has the cluster removed; whether that worked. Who asks for it cannot do anything about it.
fn remove(keeper: Keeper, dir: &Path) -> bool {
    let removed = keeper.remove();
    if let Err(e) = &removed {
        crate::say(&format!("{} is not removed: {e}", dir.display()));
    }
    removed.is_ok()
}

/// Saves what the processes wrote from the removal of the directory, for whoever looks for the
/// reason of a failure.
fn keep_logs(dir: &Path) {
    let made = tempfile::Builder::new().prefix("k8e-kube-logs-").tempdir();
    let Ok(kept) = made.map(tempfile::TempDir::keep) else {
        return;
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            let _best_effort = std::fs::copy(&path, kept.join(entry.file_name()));
        }
    }
    crate::say(&format!("its logs are kept in {}", kept.display()));
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
            let dir = dir.canonicalize().map_err(error::file("find", dir))?;
            make_private(&dir)?;
            dir
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

/// It was there before, perhaps: nobody else may have put it there, or may look into it.
fn make_private(dir: &Path) -> Result<(), Error> {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    let about = dir.metadata().map_err(error::file("look at", dir))?;
    if about.uid() != rustix::process::geteuid().as_raw() {
        return Err(Error::NotOurs(dir.to_owned()));
    }
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
        .map_err(error::file("close", dir))
}
