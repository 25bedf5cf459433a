//! A real node: pods of a local image run under runc and under gVisor, and kubectl reaches into
//! them. Needs root, and what `cargo xtask setup` installs.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use k8e_kube_dev::{Cluster, Image, Options, Profile};
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

const IMAGE: &str = "k8e.test/greeter:1";

/// Runs kubectl; what it prints.
fn kubectl(cluster: &Cluster, args: &[&str]) -> String {
    let output = cluster.kubectl().args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let pods = cluster.kubectl().args(["describe", "pods"]).output();
        let pods = String::from_utf8_lossy(&pods.unwrap().stdout).into_owned();
        panic!("kubectl {}: {said}\n{pods}", args.join(" "));
    }
    String::from_utf8(output.stdout).unwrap()
}

fn greeter(dir: &Path) -> Image {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/node/greeter.c");
    let rootfs = dir.join("greeter");
    std::fs::create_dir_all(&rootfs).unwrap();
    let compiled = Command::new("cc")
        .args(["-static", "-o"])
        .arg(rootfs.join("greeter"))
        .arg(source)
        .status()
        .unwrap();
    assert!(compiled.success());
    Image::copy_programs(&rootfs, &["sh", "cat", "uname", "ls"]).unwrap();
    Image::from_rootfs(IMAGE, &rootfs).command(&["/greeter"])
}

/// The first line of a command's output, which it prints once it listens.
fn port_of(forward: &mut std::process::Child) -> u16 {
    let mut line = String::new();
    let stdout = forward.stdout.as_mut().unwrap();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    let port = line
        .split("127.0.0.1:")
        .nth(1)
        .unwrap_or_else(|| panic!("{line}"));
    port.split(' ').next().unwrap().parse().unwrap()
}

fn greeting(address: &str) -> String {
    let mut said = String::new();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.read_to_string(&mut said).unwrap();
    said
}

fn pod_works(cluster: &Cluster, class: &str) {
    let manifest = format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {class}}}
spec:
  runtimeClassName: {class}
  terminationGracePeriodSeconds: 0
  containers:
  - name: greeter
    image: {IMAGE}
    imagePullPolicy: Never
    readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}
    volumeMounts: [{{name: data, mountPath: /data}}]
  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {class}}}}}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {class}}}
spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}
"
    );
    let path = cluster.dir().join(format!("{class}.yaml"));
    std::fs::write(&path, manifest).unwrap();
    kubectl(cluster, &["create", "-f", path.to_str().unwrap()]);
    let pod = format!("pod/{class}");
    kubectl(
        cluster,
        &["wait", &pod, "--for=condition=Ready", "--timeout=120s"],
    );

    assert_eq!(kubectl(cluster, &["logs", class]), "greeter is ready\n");
    let script =
        "echo kept >/data/file; cat /data/file; ls /var/run/secrets/kubernetes.io/serviceaccount";
    let said = kubectl(cluster, &["exec", class, "--", "sh", "-c", script]);
    assert!(
        said.starts_with("kept\n") && said.contains("token"),
        "{said}"
    );
    let failing = ["exec", class, "--", "sh", "-c", "exit 7"];
    let status = cluster.kubectl().args(failing).status().unwrap();
    assert_eq!(status.code(), Some(7));

    let address = kubectl(cluster, &["get", &pod, "-o", "jsonpath={.status.podIP}"]);
    assert_eq!(greeting(&format!("{address}:8080")), "hello\n");
}

/// containerd forwards to the host's side of a pod's network. gVisor's stack is behind that, so this
/// works for runc only: pods in gVisor are reached at their address.
fn forwarding_works(cluster: &Cluster, pod: &str) {
    let mut forward = cluster
        .kubectl()
        .args(["port-forward", pod, ":8080"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let port = port_of(&mut forward);
    let forwarded = greeting(&format!("127.0.0.1:{port}"));
    forward.kill().unwrap();
    forward.wait().unwrap();
    assert_eq!(forwarded, "hello\n");
}

#[test]
fn pods_run_under_runc_and_under_gvisor_and_nothing_is_left() {
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::up(Options {
        profile: Profile::Node,
        simulated_nodes: 0,
        ..Options::default()
    })
    .unwrap();
    cluster.import(&greeter(scratch.path())).unwrap();

    pod_works(&cluster, "runc");
    forwarding_works(&cluster, "pod/runc");
    pod_works(&cluster, "gvisor");
    let kernel = |pod| kubectl(&cluster, &["exec", pod, "--", "uname", "-v"]);
    assert_ne!(
        kernel("runc"),
        kernel("gvisor"),
        "gVisor has its own kernel"
    );

    // A client in a pod finds the apiserver at its service's address.
    let script = "echo $KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT";
    let inside = kubectl(&cluster, &["exec", "runc", "--", "sh", "-c", script]);
    let config = std::fs::read_to_string(cluster.kubeconfig()).unwrap();
    assert!(
        config.contains(inside.trim_end_matches(":443\n")),
        "{inside}"
    );

    let dir = cluster.dir().to_owned();
    let name = std::fs::read_to_string(dir.join("links")).unwrap();
    let name = name.trim();
    drop(cluster);
    assert!(!dir.exists());
    assert!(!Path::new("/sys/class/net").join(name).exists());
    let left = Command::new("find")
        .args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", name])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "");
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
}
