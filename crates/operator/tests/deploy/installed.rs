//! Installation on a real API server, and the controller with the RBAC permissions of the chart.

use super::{chart, deploy};
use clap::Parser;
use k8e_kube_dev::{Cluster, Options};
use k8e_operator::options::OperatorOptions;
use std::io::Write as _;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

/// Timeout of every step; it takes seconds on an idle machine.
const AT_MOST: Duration = Duration::from_secs(180);

/// Minimal CRDs of the Prometheus operator, so that the ServiceMonitors are accepted.
const MONITORING: [(&str, &str); 2] = [
    ("ServiceMonitor", "servicemonitors"),
    ("PrometheusRule", "prometheusrules"),
];

/// Values that enable every template of the chart.
const VALUES: [&str; 4] = [
    "router.enabled=true",
    "controller.extensions=false,router.enabled=false",
    "metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true,metrics.serviceMonitor.scrapeTimeout=10s,\
     controller.allowedLabelDomains={a.example,b.example},controller.kubeApiQps=-1,replicaCount=2,podLabels.team=a,\
     imagePullSecrets[0].name=pull,resources.limits.memory=1Gi,nodeSelector.disk=ssd,tolerations[0].operator=Exists,\
     service.name=other",
    "router.authzMode=scoped-token,router.scopedToken.secretName=s,router.tls.secretName=t,router.watchNamespace=default,\
     router.accessLog=true,router.dnsFallback=true,router.pathRoutingPrefix=/s,router.tokenAudiences={a,b},\
     router.networkPolicy.ingressFrom[0].podSelector.matchLabels.app=agent,router.service.type=LoadBalancer,\
     podSecurityContext=null,containerSecurityContext=null,namespace.create=false",
];

const WORK: &str = r#"
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: alone, namespace: default}
spec:
  service: true
  volumeClaimTemplates:
    - metadata: {name: data}
      spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
  podTemplate: {spec: {containers: [{name: c, image: none}]}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: template, namespace: default}
spec: {podTemplate: {spec: {containers: [{name: c, image: none}]}}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: pool, namespace: default}
spec: {replicas: 2, sandboxTemplateRef: {name: template}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxClaim
metadata: {name: claim, namespace: default}
spec: {warmPoolRef: {name: pool}}
"#;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: OperatorOptions,
}

/// Runs kubectl with this stdin.
fn kubectl(cluster: &Cluster, args: &[&str], input: &str) -> Output {
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
    child.wait_with_output().unwrap()
}

/// The same; panics if it fails, and returns stdout.
fn must(cluster: &Cluster, args: &[&str], input: &str) -> String {
    let output = kubectl(cluster, args, input);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {said}");
    assert!(!said.contains("Warning"), "kubectl {args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_accepts_all_and_the_controller_works_with_its_permissions() {
    let cluster = Cluster::up(Options::default()).unwrap();
    for (kind, plural) in MONITORING {
        must(&cluster, &["apply", "-f", "-"], &monitoring(kind, plural));
    }
    must(
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
    let namespace = chart::template(&["--show-only", "templates/namespace.yaml"]).unwrap();
    must(&cluster, &["apply", "-f", "-"], &namespace);
    for set in VALUES {
        let rendered = chart::template(&["--set", set]).unwrap();
        let taken = must(
            &cluster,
            &["apply", "--dry-run=server", "-f", "-"],
            &rendered,
        );
        assert!(
            taken.contains("deployment.apps/agent-sandbox-controller"),
            "{taken}"
        );
    }
    // As users do it: one after the other, or both at once.
    let all = [
        "sandbox.yaml",
        "extensions.yaml",
        "sandbox-with-extensions.yaml",
        "router.yaml",
    ];
    for name in all {
        let path = deploy().join("manifests").join(name);
        must(&cluster, &["apply", "-f", path.to_str().unwrap()], "");
    }
    must(
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
    the_router_may(&cluster);
    the_controller_works(&cluster).await;
}

fn the_router_may(cluster: &Cluster) {
    let router = "--as=system:serviceaccount:agent-sandbox-system:sandbox-router";
    let may = |verb: &str, what: &str| {
        let output = kubectl(
            cluster,
            &["auth", "can-i", verb, what, "--all-namespaces", router],
            "",
        );
        output.status.success()
    };
    for (verb, what) in [
        ("list", "pods"),
        ("watch", "pods"),
        ("create", "tokenreviews.authentication.k8s.io"),
        ("create", "subjectaccessreviews.authorization.k8s.io"),
    ] {
        assert!(may(verb, what), "the router may not {verb} {what}");
    }
    for (verb, what) in [
        ("get", "secrets"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("list", "sandboxes.agents.x-k8s.io"),
    ] {
        assert!(!may(verb, what), "the router may {verb} {what}");
    }
}

/// Runs the controller with the permissions of its service account, through all that it does.
async fn the_controller_works(cluster: &Cluster) {
    let kubeconfig = cluster
        .service_account_kubeconfig("agent-sandbox-system", "agent-sandbox-controller")
        .unwrap();
    let kubeconfig = kubeconfig.to_str().unwrap().to_owned();
    let flags = [
        "operator",
        "--extensions",
        "--leader-elect=true",
        "--leader-election-namespace=agent-sandbox-system",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
        "--kubeconfig",
        &kubeconfig,
    ];
    let options = Cli::parse_from(flags).options;
    let running = tokio::spawn(k8e_operator::run(options, std::future::pending()));
    must(cluster, &["apply", "-f", "-"], WORK);
    let ready = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status}";
    eventually(cluster, &["get", "sandbox", "alone", "-o", ready], "True").await;
    eventually(
        cluster,
        &["get", "sandboxclaim", "claim", "-o", ready],
        "True",
    )
    .await;
    eventually(
        cluster,
        &[
            "get",
            "sandboxwarmpool",
            "pool",
            "-o",
            "jsonpath={.status.readyReplicas}",
        ],
        "2",
    )
    .await;
    let policies = &["get", "networkpolicy", "-o", "name"];
    eventually(
        cluster,
        policies,
        "networkpolicy.networking.k8s.io/template-network-policy\n",
    )
    .await;
    let suspend = "{\"spec\": {\"operatingMode\": \"Suspended\", \"service\": false}}";
    must(
        cluster,
        &["patch", "sandbox", "alone", "--type=merge", "-p", suspend],
        "",
    );
    eventually(cluster, &["get", "pod", "alone", "--ignore-not-found"], "").await;
    eventually(
        cluster,
        &["get", "service", "alone", "--ignore-not-found"],
        "",
    )
    .await;
    let unmanaged = "{\"spec\": {\"networkPolicyManagement\": \"Unmanaged\"}}";
    must(
        cluster,
        &[
            "patch",
            "sandboxtemplate",
            "template",
            "--type=merge",
            "-p",
            unmanaged,
        ],
        "",
    );
    eventually(cluster, policies, "").await;
    let past = "{\"spec\": {\"lifecycle\": {\"shutdownTime\": \"2020-01-01T00:00:00Z\", \"shutdownPolicy\": \"Delete\"}}}";
    must(
        cluster,
        &["patch", "sandboxclaim", "claim", "--type=merge", "-p", past],
        "",
    );
    eventually(
        cluster,
        &["get", "sandboxclaim", "claim", "--ignore-not-found"],
        "",
    )
    .await;
    must(
        cluster,
        &["scale", "sandboxwarmpool", "pool", "--replicas=0"],
        "",
    );
    eventually(
        cluster,
        &["get", "sandbox", "-o", "name"],
        "sandbox.agents.x-k8s.io/alone\n",
    )
    .await;
    let events = must(cluster, &["get", "events.events.k8s.io", "-o", "name"], "");
    assert!(!events.is_empty(), "it may not write events");
    assert!(!running.is_finished(), "the controller gave up");
    running.abort();
}

/// Polls until kubectl prints `wanted`.
async fn eventually(cluster: &Cluster, args: &[&str], wanted: &str) {
    let started = Instant::now();
    loop {
        let output = kubectl(cluster, args, "");
        let found = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() && found == wanted {
            return;
        }
        assert!(
            started.elapsed() < AT_MOST,
            "kubectl {args:?} says {found:?}, not {wanted:?}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn monitoring(kind: &str, plural: &str) -> String {
    format!(
        "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {{name: {plural}.monitoring.coreos.com}}\n\
         spec:\n  group: monitoring.coreos.com\n  scope: Namespaced\n  names: {{kind: {kind}, plural: {plural}}}\n\
         \x20 versions:\n    - name: v1\n      served: true\n      storage: true\n      schema:\n        openAPIV3Schema:\n\
         \x20         type: object\n          x-kubernetes-preserve-unknown-fields: true\n"
    )
}
