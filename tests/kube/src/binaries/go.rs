//! Building a program from the Go module proxy, with the versions of our `go.mod` only.

use super::Program;
use crate::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where Go's own installation guide puts it.
const USUAL_GO: &str = "/usr/local/go/bin/go";

/// Packages in which Kubernetes' programs look up their own version.
const KUBERNETES_VERSIONS: &[&str] = &[
    "k8s.io/component-base/version",
    "k8s.io/client-go/pkg/version",
];

/// Packages in which helm looks up the version of Kubernetes that it is for.
const HELM_VERSIONS: &[&str] = &[
    "helm.sh/helm/v3/pkg/chartutil",
    "helm.sh/helm/v3/pkg/lint/rules",
];

/// Builds `program` of the module in `module_dir` as `made`; `kubernetes` is the version that goes with it.
pub(super) fn build(
    program: &Program,
    version: &str,
    kubernetes: &str,
    module_dir: &Path,
    made: &Path,
) -> Result<(), Error> {
    let mut command = Command::new(go());
    command
        .current_dir(module_dir)
        .args([
            "build",
            "-trimpath",
            "-buildvcs=false",
            "-mod=readonly",
            "-ldflags",
        ])
        .arg(link_flags(program.module, version, kubernetes))
        .arg("-o")
        .args([made, Path::new(program.package)])
        // What this person has set for their own Go projects is not for this one.
        .env_remove("GOFLAGS")
        .env("GOWORK", "off")
        .env("CGO_ENABLED", "0")
        .stdin(Stdio::null())
        // Its stdout is our caller's answer.
        .stdout(Stdio::null());
    let failed = |reason: String| Error::NoBinary {
        program: program.name.to_owned(),
        reason: format!(
            "{reason}; install the Go that {} asks for, or set K8E_KUBE_BIN to a directory with \
             the programs",
            module_dir.join("go.mod").display()
        ),
    };
    let status = command
        .status()
        .map_err(|e| failed(format!("cannot run go: {e}")))?;
    if status.success() {
        Ok(())
    } else {
        Err(failed(format!("go build: {status}")))
    }
}

/// No debugger's tables; and programs are told their version, as their own build scripts would.
fn link_flags(module: &str, version: &str, kubernetes: &str) -> String {
    let mut numbers = kubernetes.trim_start_matches('v').split('.');
    let major = numbers.next().unwrap_or_default();
    let minor = numbers.next().unwrap_or_default();
    let values: Vec<(&str, &str)> = match module {
        "kubernetes" => vec![
            ("gitVersion", version),
            ("gitMajor", major),
            ("gitMinor", minor),
            ("gitTreeState", "clean"),
            ("buildDate", "1970-01-01T00:00:00Z"),
        ],
        // What a chart is rendered for when no cluster is asked.
        "helm" => vec![("k8sVersionMajor", major), ("k8sVersionMinor", minor)],
        _ => Vec::new(),
    };
    let packages = match module {
        "kubernetes" => KUBERNETES_VERSIONS,
        _ => HELM_VERSIONS,
    };
    let mut flags = "-s -w".to_owned();
    for package in packages {
        for (name, value) in &values {
            flags.push_str(&format!(" -X {package}.{name}={value}"));
        }
    }
    if module == "helm" {
        flags.push_str(&format!(
            " -X helm.sh/helm/v3/internal/version.version={version}"
        ));
    }
    flags
}

fn go() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).any(|dir| dir.join("go").is_file());
    if in_path { "go" } else { USUAL_GO }.into()
}
