//! A real node: containerd and a kubelet on this machine, in a mount namespace of their own. What
//! they mount, and what they keep in places that cannot be configured, ends with them.
//!
//! There is no kube-proxy and no DNS: pods have addresses that this machine reaches, and reach this
//! machine and each other, nothing else. The one service address that works is Kubernetes' own,
//! because the apiserver listens on it; so clients in pods find it as on any cluster. Other
//! services are reached with `kubectl port-forward`.

mod network;

pub(super) use network::Network;

use super::READY_MAX;
use super::site::Site;
use crate::certificates::{CLUSTER, Subject};
use crate::image::{self, Image};
use crate::service::{self, Service};
use crate::{Error, error};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The node's name.
const NAME: &str = "real";

/// Where distributions and other installers put CNI plugins.
const CNI_DIRS: &[&str] = &["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];

/// Programs of the system that a node calls, and the Debian packages that have them.
const PROGRAMS: &[(&str, &str)] = &[
    ("runc", "runc"),
    ("runsc", "runsc"),
    ("ip", "iproute2"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
    ("mount", "mount"),
    ("cc", "gcc"),
    ("tar", "tar"),
];

/// The image every pod begins with.
const PAUSE_IMAGE: &str = "k8e.test/pause:1";

/// Runs its arguments in the mount namespace it is started in, after covering the places that
/// containerd, its shims, the CNI plugins and the kubelet use whatever they are told.
const ENTER: &str = "set -e
for dir in /run/containerd /var/lib/cni /var/lib/kubelet /var/log/pods /var/log/containers; do
    mkdir -p \"$dir\"
    mount -t tmpfs -o mode=0711 kube \"$dir\"
done
mount --make-rshared /
exec \"$@\"
";

/// runsc as the kernel needs it. It takes a network namespace in which it sees a file of
/// `/proc/sys/net/core` for the host's; newer kernels show that file in every one, so it is shown none.
const RUNSC: &str = "#!/bin/sh
exec unshare --mount --propagation slave sh -c \
    'mount -t tmpfs -o ro kube /proc/sys/net && exec runsc \"$@\"' runsc \"$@\"
";

/// How long containerd may take to listen.
const CONTAINERD_MAX: Duration = Duration::from_secs(60);

/// Fails when this machine cannot have a real node, before anything is started.
pub(super) fn check_machine() -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotFit("root".to_owned()));
    }
    let missing: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| image::system_program(program).is_none())
        .map(|(_, package)| *package)
        .chain(cni_dir().is_none().then_some("containernetworking-plugins"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::NotFit(format!(
        "packages that are missing (Debian's names): {}",
        missing.join(" ")
    )))
}

/// Starts containerd and the kubelet, and waits until the node is Ready.
pub(super) fn start(
    site: &Site,
    network: &Network,
    url: &str,
    services: &mut Vec<Service>,
) -> Result<(), Error> {
    network.make_cgroup()?;
    services.push(start_containerd(site, network)?);
    let containerd = services.last_mut().expect("just pushed");
    let socket = containerd_socket(&site.dir);
    service::wait_for("containerd", CONTAINERD_MAX, || {
        containerd.check()?;
        Ok(socket.exists().then_some(()).ok_or("no socket".to_owned()))
    })?;
    let namespace = format!("--mount=/proc/{}/ns/mnt", containerd.pid());
    import_pause(site)?;
    services.push(start_kubelet(site, network, url, &namespace)?);
    service::wait_for("the node", READY_MAX, || {
        services.iter_mut().try_for_each(Service::check)?;
        let mut command = site.kubectl();
        command.args(["wait", "node", NAME]);
        command.args(["--for=condition=Ready", "--timeout=5s"]);
        Ok(service::output(&mut command).map_err(|e| e.to_string()))
    })
    .map(drop)
}

/// The socket of the containerd of the cluster in `dir`.
pub(super) fn containerd_socket(dir: &Path) -> PathBuf {
    dir.join("containerd.sock")
}

fn start_containerd(site: &Site, network: &Network) -> Result<Service, Error> {
    let dir = site.dir.display();
    let cni = cni_dir().unwrap_or_default();
    let runsc = site.write("runsc.sh", RUNSC)?;
    std::fs::set_permissions(&runsc, std::fs::Permissions::from_mode(0o755))
        .map_err(error::file("make executable", &runsc))?;
    let binary = format!("binary_name = \"{}\"\n", runsc.display());
    site.write("runsc.toml", &binary)?;
    let cni_conf = site.dir.join("cni");
    std::fs::create_dir_all(&cni_conf).map_err(error::file("make", &cni_conf))?;
    site.write("cni/10-kube.conflist", &network.cni(&site.dir))?;
    let text = format!(
        "version = 3
root = \"{dir}/containerd\"
state = \"{dir}/containerd-state\"
[grpc]
  address = \"{}\"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = \"{PAUSE_IMAGE}\"
[plugins.'io.containerd.cri.v1.runtime']
  # Some machines may not lower the score.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  enable_unprivileged_ports = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = [\"{cni}\"]
  conf_dir = \"{dir}/cni\"
  use_internal_loopback = true
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = \"runc\"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = \"io.containerd.runc.v2\"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc]
  runtime_type = \"io.containerd.runsc.v1\"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc.options]
  TypeUrl = \"io.containerd.runsc.v1.options\"
  ConfigPath = \"{dir}/runsc.toml\"
",
        containerd_socket(&site.dir).display(),
    );
    let config = site.write("containerd.toml", &text)?;
    let mut command = site.system_command("unshare");
    command
        .args(["--mount", "--propagation", "private"])
        .args(["sh", "-c", ENTER, "enter"])
        .arg(site.bin.join("containerd"))
        .arg("--config")
        .arg(config);
    Service::start("containerd", &site.dir, &mut command)
}

fn start_kubelet(
    site: &Site,
    network: &Network,
    url: &str,
    namespace: &str,
) -> Result<Service, Error> {
    let keys = &site.certificates;
    let address = network.gateway();
    let hosts = [NAME.to_owned(), address.clone()];
    let user = format!("system:node:{NAME}");
    let subject = Subject {
        name: &user,
        group: Some("system:nodes"),
        hosts: &hosts,
    };
    let kubeconfig = site.dir.join("kubelet.kubeconfig");
    site.user_kubeconfig(&kubeconfig, url, "kubelet", subject)?;
    site.write("resolv.conf", "")?;
    let text = format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
readOnlyPort: 0
healthzPort: 0
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: false}}
  x509: {{clientCAFile: {ca}}}
authorization: {{mode: AlwaysAllow}}
tlsCertFile: {cert}
tlsPrivateKeyFile: {key}
containerRuntimeEndpoint: unix://{socket}
cgroupDriver: cgroupfs
cgroupRoot: /{cgroup}
enforceNodeAllocatable: [pods]
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
resolvConf: {dir}/resolv.conf
podLogsDir: {dir}/pod-logs
volumePluginDir: {dir}/volume-plugins
maxPods: 200
# A full disk is the machine's problem, not a reason for tests to lose their pods.
imageGCHighThresholdPercent: 100
evictionHard: {{memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}}
syncFrequency: 5s
volumeStatsAggPeriod: 0s
",
        ca = keys.cert(CLUSTER).display(),
        cert = keys.cert("kubelet").display(),
        key = keys.key("kubelet").display(),
        socket = containerd_socket(&site.dir).display(),
        cgroup = network.name(),
        dir = site.dir.display(),
    );
    let config = site.write("kubelet.yaml", &text)?;
    let mut command = site.system_command("nsenter");
    command
        .args([namespace, "--"])
        .arg(site.bin.join("kubelet"))
        .arg("--config")
        .arg(config)
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .arg("--root-dir")
        .arg(site.dir.join("kubelet"))
        .args(["--hostname-override", NAME, "--node-ip", &address]);
    Service::start("kubelet", &site.dir, &mut command)
}

fn import_pause(site: &Site) -> Result<(), Error> {
    let rootfs = site.dir.join("pause");
    image::build_pause(&rootfs)?;
    let image = Image::from_rootfs(PAUSE_IMAGE, &rootfs).command(&["/pause"]);
    image.import(&site.bin, &site.dir, &containerd_socket(&site.dir))
}

fn cni_dir() -> Option<&'static str> {
    let has_bridge = |dir: &&&str| Path::new(dir).join("bridge").is_file();
    CNI_DIRS.iter().find(has_bridge).copied()
}
