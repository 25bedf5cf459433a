//! etcd, the apiserver, the controller-manager and the scheduler.

use super::READY_MAX;
use super::site::{Site, kubeconfig_path, kubectl};
use crate::certificates::{CLUSTER, ETCD, Subject};
use crate::service::{self, Service, clean_command};
use crate::{Error, ports};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// Requests a second that a controller may make. Their defaults (20 to 50) would make a test wait for
/// the client side of somebody else's controller.
const CLIENT_QPS: u32 = 2000;

/// Services of a cluster without a real node have addresses that nobody can reach: any will do.
const SERVICES_NOWHERE: &str = "10.43.0.0/24";

/// How a request is remembered: who, what, which object; no bodies.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
";

/// The processes every cluster has.
#[derive(Debug)]
pub(super) struct ControlPlane {
    url: String,
    /// Kept to start it again as it was.
    apiserver_args: Vec<OsString>,
    apiserver: Option<Service>,
    others: Vec<Service>,
}

// === impl ControlPlane ===

impl ControlPlane {
    /// Starts etcd and the apiserver; [`Self::finish`] does the rest.
    pub(super) fn start(site: &Site) -> Result<Self, Error> {
        let (host, port) = match &site.network {
            // The service address of the apiserver itself: pods find it without a kube-proxy.
            Some(network) => (network.apiserver_address(), 443),
            None => ("127.0.0.1".to_owned(), ports::free_port()?),
        };
        let url = format!("https://{host}:{port}");
        issue(site, &host, &url)?;
        let (etcd, etcd_url) = start_etcd(site)?;
        Ok(Self {
            url,
            apiserver_args: apiserver_args(site, &host, port, &etcd_url)?,
            apiserver: None,
            others: vec![etcd],
        })
    }

    /// Starts everything else, and waits until pods can be made.
    pub(super) fn finish(&mut self, site: &Site) -> Result<(), Error> {
        self.start_apiserver(&site.bin, &site.dir)?;
        self.others.push(start_controllers(site)?);
        self.others.push(start_scheduler(site)?);
        // Pods are refused until their namespace has a service account, which a controller makes.
        service::wait_for("the default service account", READY_MAX, || {
            self.check()?;
            let mut command = site.kubectl();
            command.args(["get", "serviceaccount", "default", "-n", "default"]);
            Ok(service::output(&mut command).map_err(|e| e.to_string()))
        })
        .map(drop)
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn check(&mut self) -> Result<(), Error> {
        let mut all = self.others.iter_mut().chain(&mut self.apiserver);
        all.try_for_each(Service::check)
    }

    pub(super) fn stop_apiserver(&mut self) -> Result<(), Error> {
        match self.apiserver.take() {
            Some(mut apiserver) => apiserver.kill(),
            None => Ok(()),
        }
    }

    pub(super) fn start_apiserver(&mut self, bin: &Path, dir: &Path) -> Result<(), Error> {
        self.stop_apiserver()?;
        let mut command = clean_command(&bin.join("kube-apiserver"), bin, dir);
        command.args(&self.apiserver_args);
        self.apiserver = Some(Service::start("apiserver", dir, &mut command)?);
        service::wait_for("the apiserver", READY_MAX, || {
            self.check()?;
            let mut command = kubectl(bin, dir);
            command.args(["get", "--raw", "/readyz"]);
            Ok(service::output(&mut command).map_err(|e| e.to_string()))
        })
        .map(drop)
    }

    pub(super) fn reap(&mut self) {
        self.others
            .iter_mut()
            .chain(&mut self.apiserver)
            .for_each(Service::reap);
    }
}

fn issue(site: &Site, host: &str, url: &str) -> Result<(), Error> {
    let keys = &site.certificates;
    let names = [
        "localhost",
        "127.0.0.1",
        "10.43.0.1",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        host,
    ];
    let hosts = names.map(str::to_owned);
    let server = |name| Subject {
        name,
        hosts: &hosts,
        ..Subject::default()
    };
    keys.issue(CLUSTER, "apiserver", server("kube-apiserver"))?;
    keys.issue(ETCD, "etcd", server("etcd"))?;
    let admin = Subject {
        name: "admin",
        group: Some("system:masters"),
        hosts: &[],
    };
    site.user_kubeconfig(&kubeconfig_path(&site.dir), url, "admin", admin)
}

fn start_etcd(site: &Site) -> Result<(Service, String), Error> {
    let client = format!("https://127.0.0.1:{}", ports::free_port()?);
    let peer = format!("https://127.0.0.1:{}", ports::free_port()?);
    let keys = &site.certificates;
    let mut command = site.command("etcd");
    command
        .args(["--name", "default", "--data-dir", "etcd"])
        // Nothing of it has to survive the machine.
        .arg("--unsafe-no-fsync")
        .args(["--quota-backend-bytes", "4294967296"])
        .args(["--log-level", "warn"])
        .args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--initial-cluster", &format!("default={peer}")]);
    for (prefix, option) in [("", "client-cert-auth"), ("peer-", "peer-client-cert-auth")] {
        command
            .arg(format!("--{option}"))
            .arg(flag(&format!("{prefix}cert-file"), &keys.cert("etcd")))
            .arg(flag(&format!("{prefix}key-file"), &keys.key("etcd")))
            .arg(flag(&format!("{prefix}trusted-ca-file"), &keys.cert(ETCD)));
    }
    Ok((Service::start("etcd", &site.dir, &mut command)?, client))
}

fn apiserver_args(site: &Site, host: &str, port: u16, etcd: &str) -> Result<Vec<OsString>, Error> {
    let keys = &site.certificates;
    let services = match &site.network {
        Some(network) => network.services(),
        None => SERVICES_NOWHERE.to_owned(),
    };
    let mut args: Vec<OsString> = [
        format!("--bind-address={host}"),
        format!("--secure-port={port}"),
        format!("--service-cluster-ip-range={services}"),
        format!("--etcd-servers={etcd}"),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement".to_owned(),
        "--allow-privileged=true".to_owned(),
        // No DNS knows the names of our nodes.
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
    ]
    .into_iter()
    .map(OsString::from)
    .collect();
    args.extend([
        flag("etcd-cafile", &keys.cert(ETCD)),
        flag("etcd-certfile", &keys.cert("etcd")),
        flag("etcd-keyfile", &keys.key("etcd")),
        flag("tls-cert-file", &keys.cert("apiserver")),
        flag("tls-private-key-file", &keys.key("apiserver")),
        flag("client-ca-file", &keys.cert(CLUSTER)),
        flag("kubelet-client-certificate", &keys.cert("admin")),
        flag("kubelet-client-key", &keys.key("admin")),
        flag("service-account-key-file", &keys.tokens_public()),
        flag("service-account-signing-key-file", &keys.key("tokens")),
        flag("cert-dir", &site.dir.join("certificates")),
    ]);
    if site.audit {
        let policy = site.write("audit-policy.yaml", AUDIT_POLICY)?;
        args.push(flag("audit-policy-file", &policy));
        args.push(flag("audit-log-path", &site.dir.join("audit.log")));
    }
    Ok(args)
}

fn start_controllers(site: &Site) -> Result<Service, Error> {
    let keys = &site.certificates;
    let mut command = site.command("kube-controller-manager");
    command
        .arg(flag("kubeconfig", &kubeconfig_path(&site.dir)))
        .args(["--leader-elect=false", "--secure-port=0"])
        .arg(flag("root-ca-file", &keys.cert(CLUSTER)))
        .arg(flag(
            "service-account-private-key-file",
            &keys.key("tokens"),
        ))
        .arg(flag("cluster-signing-cert-file", &keys.cert(CLUSTER)))
        .arg(flag("cluster-signing-key-file", &keys.key(CLUSTER)))
        // A busy machine renews the leases of nodes late; that is no reason to evict pods.
        .arg("--node-monitor-grace-period=150s");
    qps(&mut command);
    Service::start("controller-manager", &site.dir, &mut command)
}

fn qps(command: &mut Command) {
    command.arg(format!("--kube-api-qps={CLIENT_QPS}"));
    command.arg(format!("--kube-api-burst={CLIENT_QPS}"));
}

fn start_scheduler(site: &Site) -> Result<Service, Error> {
    let text = format!(
        "apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {{leaderElect: false}}
clientConnection: {{kubeconfig: {}, qps: {CLIENT_QPS}, burst: {CLIENT_QPS}}}
",
        kubeconfig_path(&site.dir).display()
    );
    let config = site.write("scheduler.yaml", &text)?;
    let mut command = site.command("kube-scheduler");
    command.arg(flag("config", &config)).arg("--secure-port=0");
    Service::start("scheduler", &site.dir, &mut command)
}

/// `--name=path`.
fn flag(name: &str, path: &Path) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(path);
    flag
}
