//! The Helm chart, and the plain manifests that are rendered from it.

use super::{crds, deploy, is_current};
use k8e_kube_dev::{Need, binaries_directory};
use std::fs;
use std::process::Command;

/// Kubernetes version for helm; a helm that is built from source assumes a very old one.
const KUBE_VERSION: &str = "1.36.0";

const CONTROLLER: [&str; 5] = [
    "namespace",
    "controller-serviceaccount",
    "controller-rbac",
    "controller-service",
    "controller-deployment",
];
const EXTENSIONS: [&str; 2] = ["controller-extensions-rbac", "controller-deployment"];
const ROUTER: [&str; 6] = [
    "namespace",
    "router-rbac",
    "router-service",
    "router-deployment",
    "router-pdb",
    "router-networkpolicy",
];

/// Runs helm; its stdout, or its error.
pub(crate) fn helm(args: &[&str]) -> Result<String, String> {
    let bin = binaries_directory(&[Need::Helm]).unwrap();
    let home = tempfile::tempdir().unwrap();
    let output = Command::new(bin.join("helm"))
        .args(args)
        .env("HOME", home.path())
        .env_remove("KUBECONFIG")
        .output();
    let output = output.unwrap();
    if output.status.success() {
        return Ok(String::from_utf8(output.stdout).unwrap());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Renders the chart with these values.
pub(crate) fn template(args: &[&str]) -> Result<String, String> {
    let chart = deploy().join("helm/k8e");
    let always = [
        "template",
        "k8e",
        chart.to_str().unwrap(),
        "--kube-version",
        KUBE_VERSION,
    ];
    helm(&always.iter().chain(args).copied().collect::<Vec<_>>())
}

/// Names and content of the manifests.
pub(crate) fn manifests() -> Vec<(&'static str, String)> {
    let definitions = crds::files();
    let (sandbox, extensions) = definitions.split_at(1);
    let both: Vec<_> = CONTROLLER
        .into_iter()
        .chain(EXTENSIONS.into_iter().take(1))
        .collect();
    vec![
        (
            "sandbox.yaml",
            manifest(sandbox, &CONTROLLER, "controller.extensions=false"),
        ),
        (
            "extensions.yaml",
            manifest(extensions, &EXTENSIONS, "controller.extensions=true"),
        ),
        (
            "sandbox-with-extensions.yaml",
            manifest(&definitions, &both, "controller.extensions=true"),
        ),
        ("router.yaml", manifest(&[], &ROUTER, "router.enabled=true")),
    ]
}

fn manifest(definitions: &[(String, String)], templates: &[&str], set: &str) -> String {
    let mut text =
        "# Generated from the chart in deploy/helm/k8e (see CONTRIBUTING.md).\n".to_owned();
    for template_name in templates {
        let shown = format!("templates/{template_name}.yaml");
        let rendered = template(&["--show-only", &shown, "--set", set]).unwrap();
        for line in rendered
            .lines()
            .filter(|line| !line.starts_with("# Source:"))
        {
            assert_eq!(
                line,
                line.trim_end(),
                "{template_name} has space at the end of a line"
            );
            text.push_str(line);
            text.push('\n');
        }
    }
    for (_, definition) in definitions {
        text.push_str("---\n");
        text.push_str(definition);
    }
    text
}

#[test]
fn the_manifests_are_rendered_from_the_chart() {
    for (name, text) in manifests() {
        is_current(&deploy().join("manifests").join(name), &text);
    }
}

#[test]
fn the_chart_passes_helm_lint() {
    let chart = deploy().join("helm/k8e");
    let linted = helm(&[
        "lint",
        "--strict",
        chart.to_str().unwrap(),
        "--kube-version",
        KUBE_VERSION,
    ]);
    linted.unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let described = fs::read_to_string(chart.join("Chart.yaml")).unwrap();
    assert!(
        described.contains(&format!("\nversion: {version}\n")),
        "the chart's version is the product's"
    );
    assert!(described.contains(&format!("\nappVersion: \"{version}\"\n")));
}

#[test]
fn chart_values_become_flags() {
    let set = "controller.kubeApiQps=-1,controller.pprofBlockProfileRate=1000000,controller.kubeApiBurst=0,\
               controller.enableWarmPoolEviction=false,controller.extraArgs={--zap-log-level=debug}";
    let rendered = template(&[
        "--show-only",
        "templates/controller-deployment.yaml",
        "--set",
        set,
    ])
    .unwrap();
    let flags: Vec<_> = rendered
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("- --"))
        .collect();
    let wanted = [
        "- --leader-elect=true",
        "- --extensions",
        "- --enable-warm-pool-eviction=false",
        "- --kube-api-burst=0",
        "- --kube-api-qps=-1",
        "- --pprof-block-profile-rate=1000000",
        "- --zap-log-level=debug",
    ];
    assert_eq!(flags, wanted);
}

#[test]
fn invalid_router_values_are_refused() {
    let said = template(&["--set", "router.authzMode=scoped-token"]).unwrap_err();
    assert!(said.contains("router.scopedToken.secretName"), "{said}");
}

/// The table in the chart's README has exactly the values of the chart.
#[test]
fn the_table_of_values_is_complete() {
    let chart = deploy().join("helm/k8e");
    let values = fs::read_to_string(chart.join("values.yaml")).unwrap();
    let values: serde_json::Value = serde_saphyr::from_str(&values).unwrap();
    let readme = fs::read_to_string(chart.join("README.md")).unwrap();
    let rows = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut documented: Vec<_> = rows.map(str::to_owned).collect();
    documented.sort();
    let mut existing = Vec::new();
    leaves("", &values, &mut existing);
    existing.sort();
    assert_eq!(documented, existing);
}

/// Paths of the values that users set; free-form maps are not descended into.
fn leaves(path: &str, value: &serde_json::Value, found: &mut Vec<String>) {
    const WHOLE: [&str; 3] = [
        "podSecurityContext",
        "containerSecurityContext",
        "router.resources",
    ];
    match value.as_object() {
        Some(object) if !object.is_empty() && !WHOLE.contains(&path) => {
            for (name, value) in object {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                leaves(&path, value, found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}
