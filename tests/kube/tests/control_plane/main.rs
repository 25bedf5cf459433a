//! A control plane with simulated nodes: the cluster that the operator's tests get.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use k8e_kube_dev::{Cluster, Options, down};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long anything here may take: seconds on a quiet machine.
const AT_MOST: Duration = Duration::from_secs(120);

const PODS: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: work}
---
apiVersion: v1
kind: Pod
metadata: {name: plain, namespace: work}
spec:
  containers: [{name: c, image: none, volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: v}}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: v, namespace: work}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: slow, namespace: work, annotations: {k8e.test/ready: "false"}}
spec: {containers: [{name: c, image: none}]}
---
apiVersion: v1
kind: Pod
metadata: {name: held, namespace: work, annotations: {k8e.test/hold: "true"}}
spec: {containers: [{name: c, image: none}]}
---
apiVersion: v1
kind: Pod
metadata: {name: good, namespace: work, annotations: {k8e.test/complete: succeeded}}
spec: {containers: [{name: c, image: none}]}
---
apiVersion: v1
kind: Pod
metadata: {name: bad, namespace: work, annotations: {k8e.test/complete: failed}}
spec: {containers: [{name: c, image: none}]}
"#;

/// Runs kubectl; what it prints.
fn kubectl(cluster: &Cluster, args: &str) -> String {
    let mut command = cluster.kubectl();
    let output = command.args(args.split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {args}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Looks until kubectl prints `wanted`.
fn eventually(cluster: &Cluster, args: &str, wanted: &str) {
    let started = Instant::now();
    loop {
        let printed = kubectl(cluster, args);
        if printed.trim() == wanted {
            return;
        }
        assert!(
            started.elapsed() < AT_MOST,
            "kubectl {args}: {printed}, not {wanted}"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn create(cluster: &Cluster, manifest: &str) {
    let path = cluster.dir().join("test.yaml");
    std::fs::write(&path, manifest).unwrap();
    kubectl(cluster, &format!("create -f {}", path.display()));
}

/// Processes that carry the directory in their environment.
fn processes_of(dir: &std::path::Path) -> Vec<String> {
    let mark = format!("K8E_KUBE_DIR={}", dir.display());
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter(|entry| {
            let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            environ
                .split(|byte| *byte == 0)
                .any(|part| part == mark.as_bytes())
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn simulated_pods_live_and_end_as_they_are_told_and_nothing_is_left() {
    let mut cluster = Cluster::up(Options {
        simulated_nodes: 2,
        audit: true,
        ..Options::default()
    })
    .unwrap();
    let dir = cluster.dir().to_owned();
    assert!(processes_of(&dir).len() >= 5);
    assert!(kubectl(&cluster, "version").contains("Server Version: v1."));

    create(&cluster, PODS);
    let phase = |name: &str| format!("get pod {name} -n work -o jsonpath={{.status.phase}}");
    let ready = |name: &str| {
        format!(
            "get pod {name} -n work -o jsonpath={{.status.conditions[?(@.type==\"Ready\")].status}}"
        )
    };
    eventually(&cluster, &ready("plain"), "True");
    let address = kubectl(
        &cluster,
        "get pod plain -n work -o jsonpath={.status.podIPs[0].ip}",
    );
    assert!(address.parse::<std::net::Ipv4Addr>().is_ok(), "{address}");
    eventually(
        &cluster,
        "get pvc v -n work -o jsonpath={.status.phase}",
        "Bound",
    );
    eventually(&cluster, &phase("good"), "Succeeded");
    eventually(&cluster, &phase("bad"), "Failed");
    eventually(&cluster, &phase("slow"), "Running");
    assert_eq!(kubectl(&cluster, &ready("slow")), "False");
    assert_eq!(kubectl(&cluster, &phase("held")), "Pending");
    kubectl(&cluster, "annotate pod slow -n work k8e.test/ready-");
    kubectl(&cluster, "annotate pod held -n work k8e.test/hold-");
    eventually(&cluster, &ready("slow"), "True");
    eventually(&cluster, &ready("held"), "True");

    // What a program in the cluster may do is what its service account may do.
    let account = cluster
        .service_account_kubeconfig("work", "default")
        .unwrap();
    let refused = cluster
        .kubectl()
        .env("KUBECONFIG", account)
        .args(["get", "pods", "-n", "work"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.contains("system:serviceaccount:work:default"),
        "{said}"
    );

    cluster.stop_apiserver().unwrap();
    let down = cluster.kubectl().args(["get", "pods"]).output().unwrap();
    assert!(!down.status.success(), "the apiserver still answers");
    cluster.start_apiserver().unwrap();
    kubectl(&cluster, "delete namespace work --timeout=90s");
    eventually(&cluster, "get pv -o name", "");
    let audit = std::fs::read_to_string(dir.join("audit.log")).unwrap();
    assert!(
        audit.contains(r#""verb":"create""#),
        "no writes in the audit"
    );

    cluster.check().unwrap();
    drop(cluster);
    assert!(processes_of(&dir).is_empty());
    assert!(!dir.exists());
}

#[test]
fn whoever_dies_leaves_no_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let cluster_dir = dir.path().join("cluster");
    let mut starter = Command::new(env!("CARGO_BIN_EXE_k8e-kube"))
        .args(["up", "--dir"])
        .arg(&cluster_dir)
        .spawn()
        .unwrap();
    let started = Instant::now();
    while processes_of(&cluster_dir).is_empty() {
        assert!(started.elapsed() < AT_MOST, "nothing was started");
        std::thread::sleep(Duration::from_millis(20));
    }
    starter.kill().unwrap();
    starter.wait().unwrap();
    while cluster_dir.exists() {
        assert!(
            started.elapsed() < AT_MOST,
            "the cluster outlives its starter"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(processes_of(&cluster_dir).is_empty());
}

#[test]
fn a_directory_of_somebody_elses_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("precious");
    std::fs::write(&precious, "x").unwrap();
    assert!(down(dir.path()).is_err());
    let up = Cluster::up(Options {
        dir: Some(dir.path().to_owned()),
        ..Options::default()
    });
    assert!(up.is_err());
    assert!(precious.exists());
    down(&dir.path().join("nowhere")).unwrap();
}
