//! The unmodified Python client of agent-sandbox on a real node, with our controller and router, installed with our
//! chart. The image of the sandboxes has our static runtime, a shell, and nothing else.
//!
//! Needs root and what `cargo xtask setup` installs. By hand:
//! `K8E_RUNTIME_BIN=$(cargo xtask runtime) cargo xtask test -p k8e-operator --test sdk`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "what a client did is worth seeing")]

use k8e_kube_dev::{Cluster, Image, Need, Options, Profile, binaries_directory};
use std::fs::{Permissions, create_dir_all, set_permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SYSTEM: &str = "agent-sandbox-system";
const SANDBOX_IMAGE: &str = "k8e.test/sandbox:1";
const K8E_IMAGE: (&str, &str) = ("k8e.test/k8e", "1");

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/k8e");
const POOLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/pools.yaml");
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/agent_sandbox.py");

/// Timeout until pods are ready, on a busy machine.
const READY_MAX: &str = "--timeout=180s";

/// Path of a build artifact, from an environment variable.
fn built(variable: &str, how: &str) -> PathBuf {
    let path = std::env::var_os(variable).map(PathBuf::from);
    path.filter(|path| path.exists())
        .unwrap_or_else(|| panic!("{variable} does not lead to a file: {how}"))
}

/// Root file system with the static runtime and a static shell, and without libraries.
fn sandbox_image(dir: &Path) -> Image {
    let rootfs = dir.join("sandbox");
    let runtime = built(
        "K8E_RUNTIME_BIN",
        "set it to what `cargo xtask runtime` prints",
    );
    Image::copy_program(&rootfs, &runtime, "k8e-runtime").unwrap();
    Image::copy_programs(&rootfs, &["busybox"]).unwrap();
    symlink("busybox", rootfs.join("bin/sh")).unwrap();
    assert!(!rootfs.join("lib").exists() && !rootfs.join("lib64").exists());
    for name in ["app", "workspace", "tmp"] {
        let path = rootfs.join(name);
        create_dir_all(&path).unwrap();
        set_permissions(&path, Permissions::from_mode(0o1777)).unwrap();
    }
    Image::from_rootfs(SANDBOX_IMAGE, &rootfs)
        .command(&["/bin/k8e-runtime"])
        .user("1000:1000")
}

/// Root file system of the image of controller and router.
fn k8e_image(dir: &Path) -> Image {
    let rootfs = dir.join("k8e");
    let k8e = built("K8E_BIN", "run this with `cargo xtask test`");
    Image::copy_program(&rootfs, &k8e, "k8e").unwrap();
    let (name, tag) = K8E_IMAGE;
    Image::from_rootfs(&format!("{name}:{tag}"), &rootfs).command(&["/bin/k8e"])
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Panics with a dump of the state of the cluster.
fn expect(cluster: &Cluster, what: &str, output: &Output) -> String {
    if output.status.success() {
        return text(&output.stdout);
    }
    let mut about = String::new();
    let looks: &[&[&str]] = &[
        &[
            "get",
            "pods,sandboxes,sandboxclaims,swp",
            "-A",
            "-o",
            "wide",
        ],
        &["get", "events", "-A", "--sort-by=.lastTimestamp"],
        &["describe", "pods", "-A"],
        &[
            "logs",
            "-n",
            SYSTEM,
            "-l",
            "app=agent-sandbox-controller",
            "--tail=100",
        ],
        &[
            "logs",
            "-n",
            SYSTEM,
            "-l",
            "app=sandbox-router",
            "--tail=100",
        ],
    ];
    for look in looks {
        let seen = cluster.kubectl().args(*look).output().unwrap();
        about += &format!("\n$ kubectl {}\n{}", look.join(" "), text(&seen.stdout));
    }
    let said = text(&output.stdout) + &text(&output.stderr);
    panic!("{about}\n{what} failed:\n{said}");
}

fn kubectl(cluster: &Cluster, args: &[&str]) -> String {
    let output = cluster.kubectl().args(args).output().unwrap();
    expect(cluster, &format!("kubectl {}", args.join(" ")), &output)
}

/// Installs or upgrades the chart, and waits for the rollout.
fn helm(cluster: &Cluster, verb: &str, authz_mode: &str) {
    let (name, tag) = K8E_IMAGE;
    let helm = binaries_directory(&[Need::Helm]).unwrap().join("helm");
    let output = Command::new(helm)
        .args([verb, "k8e", CHART, "--wait", READY_MAX])
        .args(["--set", &format!("image.repository={name},image.tag={tag}")])
        .args(["--set", "image.pullPolicy=Never"])
        .args(["--set", &format!("router.authzMode={authz_mode}")])
        .env("HOME", cluster.dir())
        .env("KUBECONFIG", cluster.kubeconfig())
        .output()
        .unwrap();
    expect(cluster, &format!("helm {verb}"), &output);
    for deployment in ["agent-sandbox-controller", "sandbox-router"] {
        let deployment = format!("deployment/{deployment}");
        kubectl(
            cluster,
            &["rollout", "status", &deployment, "-n", SYSTEM, READY_MAX],
        );
    }
}

fn pools(cluster: &Cluster) {
    kubectl(cluster, &["apply", "-f", POOLS]);
    let pools = [
        ("plain", "default", 2),
        ("keep", "default", 1),
        ("gvisor", "default", 1),
        ("plain", "team", 1),
    ];
    for (name, namespace, replicas) in pools {
        let ready = format!("--for=jsonpath={{.status.readyReplicas}}={replicas}");
        let pool = format!("swp/{name}");
        kubectl(
            cluster,
            &["wait", &pool, "-n", namespace, &ready, READY_MAX],
        );
    }
}

/// Runs a part of the Python script, as a user of the cluster.
fn client(cluster: &Cluster, part: &str) {
    let tools = built(
        "K8E_TOOLS_DIR",
        "run this with `cargo xtask test`, after `cargo xtask setup`",
    );
    let path = std::env::join_paths([cluster.bin(), Path::new("/usr/bin"), Path::new("/bin")]);
    let output = Command::new(tools.join("contract/agent-sandbox/bin/python"))
        .args([SCRIPT, part])
        .env_clear()
        .env("PATH", path.unwrap())
        .env("HOME", cluster.dir())
        .env("KUBECONFIG", cluster.kubeconfig())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let said = expect(cluster, &format!("the client's part `{part}`"), &output);
    print!("{said}");
}

/// Checks the logs for missing permissions and panics.
fn nothing_is_missing(cluster: &Cluster) {
    // Terminating pods may be gone before their logs are read.
    let staying =
        "{{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}} {{end}}{{end}}";
    let template = format!("go-template={staying}");
    let pods = kubectl(cluster, &["get", "pods", "-n", SYSTEM, "-o", &template]);
    assert_eq!(pods.split_whitespace().count(), 3, "{pods}");
    for pod in pods.split_whitespace() {
        let logs = kubectl(cluster, &["logs", "-n", SYSTEM, pod]);
        let is_bad = logs.contains("is forbidden: User") || logs.contains("panicked");
        assert!(!is_bad, "{pod}:\n{logs}");
    }
}

#[test]
fn the_official_client_works_on_a_real_node() {
    let scratch = tempfile::tempdir().unwrap();
    let (sandbox, k8e) = (sandbox_image(scratch.path()), k8e_image(scratch.path()));
    let mut cluster = Cluster::up(Options {
        profile: Profile::Node,
        simulated_nodes: 0,
        ..Options::default()
    })
    .unwrap();
    cluster.import(&sandbox).unwrap();
    cluster.import(&k8e).unwrap();

    // The client sends no token on its own.
    helm(&cluster, "install", "allow-all");
    pools(&cluster);
    client(&cluster, "everything");
    nothing_is_missing(&cluster);
    // The default of the chart: the client sends a token when it is configured to.
    helm(&cluster, "upgrade", "tokenreview");
    client(&cluster, "tokens");

    nothing_is_missing(&cluster);
    cluster.check().unwrap();
}
