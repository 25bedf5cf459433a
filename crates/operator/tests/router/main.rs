//! The router with a real API server and the RBAC permissions of its manifest: authorization by token review.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use clap::Parser;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use k8e_kube_dev::{Cluster, Options};
use k8e_operator::router;
use std::convert::Infallible;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};

/// Timeout of every step; it takes seconds on an idle machine.
const AT_MOST: Duration = Duration::from_secs(120);

const SANDBOXES: &str = r#"
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: mine, namespace: default}
spec: {podTemplate: {spec: {containers: [{name: c, image: none}]}}}
---
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: theirs, namespace: default}
spec: {podTemplate: {spec: {containers: [{name: c, image: none}]}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: caller, namespace: default}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: stranger, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: caller, namespace: default}
rules:
  - {apiGroups: [agents.x-k8s.io], resources: [sandboxes/proxy], resourceNames: [mine], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: caller, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: caller}
subjects: [{kind: ServiceAccount, name: caller, namespace: default}]
"#;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: router::Options,
}

/// Runs kubectl with this stdin and returns its stdout.
fn kubectl(cluster: &Cluster, args: &[&str], input: &str) -> String {
    let mut command = cluster.kubectl();
    command
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// A pod as the controller creates it for a sandbox. KWOK does not manage it, so that the test can set its address.
fn pod(cluster: &Cluster, name: &str) {
    let uid = kubectl(
        cluster,
        &["get", "sandbox", name, "-o", "jsonpath={.metadata.uid}"],
        "",
    );
    let hash = k8e_operator::crd::names::hash(name);
    let pod = format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  labels: {{agents.x-k8s.io/sandbox-name-hash: \"{hash}\"}}\n\
         \x20 ownerReferences: [{{apiVersion: agents.x-k8s.io/v1beta1, kind: Sandbox, name: {name}, uid: {uid}, controller: true}}]\n\
         spec:\n  nodeName: nowhere\n  tolerations: [{{operator: Exists}}]\n  containers: [{{name: c, image: none}}]\n"
    );
    kubectl(cluster, &["apply", "-f", "-"], &pod);
    let status = r#"{"status": {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}],
                     "conditions": [{"type": "Ready", "status": "True"}]}}"#;
    kubectl(
        cluster,
        &[
            "patch",
            "pod",
            name,
            "--subresource=status",
            "--type=merge",
            "-p",
            status,
        ],
        "",
    );
}

/// A server that stands for a sandbox.
async fn sandbox() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service =
                service_fn(|_| async { Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())) });
            tokio::spawn(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    address
}

/// Status and body of a GET; `None` if nothing listens.
async fn get(address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Option<(u16, String)> {
    let stream = TcpStream::connect(address).await.ok()?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    tokio::spawn(connection);
    let mut request = Request::get(path).header("host", "router");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = sender
        .send_request(request.body(Empty::<Bytes>::new()).unwrap())
        .await
        .ok()?;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.ok()?.to_bytes();
    Some((status, String::from_utf8_lossy(&body).into_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn rbac_decides_which_sandboxes_a_client_reaches() {
    let cluster = Cluster::up(Options::default()).unwrap();
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let files = [
        "crds/agents.x-k8s.io_sandboxes.yaml",
        "manifests/router.yaml",
    ];
    for file in files {
        kubectl(
            &cluster,
            &["apply", "-f", deploy.join(file).to_str().unwrap()],
            "",
        );
    }
    kubectl(
        &cluster,
        &[
            "wait",
            "--for=condition=Established",
            "crd",
            "--all",
            "--timeout=60s",
        ],
        "",
    );
    kubectl(&cluster, &["apply", "-f", "-"], SANDBOXES);
    pod(&cluster, "mine");
    let kubeconfig = cluster
        .service_account_kubeconfig("agent-sandbox-system", "sandbox-router")
        .unwrap();
    let free: Vec<_> = (0..3)
        .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let [proxy, metrics, probes] = [0, 1, 2].map(|n: usize| free[n].local_addr().unwrap());
    drop(free);
    let flags = [
        "router".to_owned(),
        "--allow-loopback-pod-ip".to_owned(),
        "--shutdown-delay=1s".to_owned(),
        format!("--http-bind-address={proxy}"),
        format!("--metrics-bind-address={metrics}"),
        format!("--health-probe-bind-address={probes}"),
        format!("--kubeconfig={}", kubeconfig.display()),
    ];
    let running = tokio::spawn(router::run(Cli::parse_from(flags).options));
    until(async || {
        get(probes, "/readyz", &[])
            .await
            .is_some_and(|(status, _)| status == 200)
    })
    .await;

    let port = sandbox().await.port().to_string();
    let token = |name: &str| {
        kubectl(&cluster, &["create", "token", name], "")
            .trim()
            .to_owned()
    };
    let (caller, stranger) = (
        format!("Bearer {}", token("caller")),
        format!("Bearer {}", token("stranger")),
    );
    let ask = async |name: &str, authorization: &str| {
        let headers = [
            ("x-sandbox-id", name),
            ("x-sandbox-port", &*port),
            ("authorization", authorization),
        ];
        get(proxy, "/", &headers).await.unwrap()
    };
    assert_eq!(ask("mine", &caller).await.0, 200);
    assert_eq!(ask("mine", &stranger).await.0, 403);
    assert_eq!(ask("theirs", &caller).await.0, 403);
    assert_eq!(ask("mine", "Bearer nonsense").await.0, 401);
    assert_eq!(
        get(proxy, "/", &[("x-sandbox-id", "mine")])
            .await
            .unwrap()
            .0,
        401
    );

    // A pod that is created later, and one that is deleted.
    let role = r#"[{"op": "add", "path": "/rules/0/resourceNames/-", "value": "theirs"}]"#;
    kubectl(
        &cluster,
        &["patch", "role", "caller", "--type=json", "-p", role],
        "",
    );
    pod(&cluster, "theirs");
    until(async || ask("theirs", &caller).await.0 == 200).await;
    kubectl(
        &cluster,
        &["delete", "pod", "mine", "--grace-period=0", "--force"],
        "",
    );
    until(async || ask("mine", &caller).await.0 == 502).await;

    let (_, seen) = get(metrics, "/metrics", &[]).await.unwrap();
    for name in [
        "requests_total",
        "request_duration_seconds_bucket",
        "inflight_requests",
        "authz_decisions_total",
        "build_info",
    ] {
        assert!(
            seen.contains(&format!("sandbox_router_{name}")),
            "{name} is not in\n{seen}"
        );
    }
    assert!(seen.contains("sandbox_namespace=\"default\""), "{seen}");
    let me = std::process::id().to_string();
    Command::new("kill").args(["-TERM", &me]).status().unwrap();
    until(async || {
        get(probes, "/readyz", &[])
            .await
            .is_none_or(|(status, _)| status == 503)
    })
    .await;
    tokio::time::timeout(AT_MOST, running)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
}

async fn until(mut done: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !done().await {
        assert!(started.elapsed() < AT_MOST, "it does not happen");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
