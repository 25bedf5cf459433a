//! Other people's clients, for the contract tests: the gRPC stacks that K8E's are made of, and those of agent-sandbox
//! and E2B.
//!
//! They live in the directory for tools, with pinned versions. What is there with other versions, or was
//! not finished, is made anew.

use crate::{Outcome, process};
use std::path::Path;
use std::process::Command;

const PYTHON: &[&str] = &["grpcio==1.85.1", "grpcio-tools==1.85.1", "protobuf==7.36.2"];

const NODE: &[&str] = &["@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1"];

/// The client that Kubernetes users have, and what it speaks HTTP, gRPC and Kubernetes with.
const AGENT_SANDBOX: &[&str] = &[
    "k8s-agent-sandbox[async,grpc]==1.0.8",
    "grpcio==1.85.1",
    "protobuf==7.36.2",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "httpx==0.28.1",
    "kubernetes==37.0.2",
    "kubernetes_asyncio==33.3.0",
];

/// E2B's official clients.
const E2B_PYTHON: &[&str] = &["e2b==2.63.0", "e2b-code-interpreter==2.11.5"];

const E2B_NODE: &[&str] = &["e2b@2.51.0", "@e2b/code-interpreter@2.8.0"];

/// What code in a sandbox draws with: for the kernel of the code interpreter.
const CHARTS: &[&str] = &["matplotlib==3.11.2", "pandas==3.1.1", "ipython==9.18.1"];

/// Written last: what is there, whole.
const DONE: &str = "installed";

/// Makes sure that all are in `tools`.
pub(super) fn install(tools: &Path) -> Outcome {
    let dir = tools.join("contract");
    installed(&dir.join("python"), PYTHON, |dir| python(dir, PYTHON))?;
    installed(&dir.join("agent-sandbox"), AGENT_SANDBOX, |dir| {
        python(dir, AGENT_SANDBOX)
    })?;
    installed(&dir.join("e2b-python"), E2B_PYTHON, |dir| {
        python(dir, E2B_PYTHON)
    })?;
    installed(&dir.join("charts"), CHARTS, |dir| python(dir, CHARTS))?;
    installed(&dir.join("e2b-node"), E2B_NODE, |dir| node(dir, E2B_NODE))?;
    installed(&dir.join("node"), NODE, |dir| node(dir, NODE))
}

fn installed(dir: &Path, packages: &[&str], install: impl FnOnce(&Path) -> Outcome) -> Outcome {
    let (done, want) = (dir.join(DONE), packages.join("\n"));
    if std::fs::read_to_string(&done).is_ok_and(|have| have == want) {
        return Ok(());
    }
    eprintln!("installing {} into {}", packages.join(" "), dir.display());
    if dir.exists() {
        std::fs::remove_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    install(dir)?;
    std::fs::write(&done, want).map_err(|e| format!("{}: {e}", done.display()))
}

fn python(dir: &Path, packages: &[&str]) -> Outcome {
    let python = process::system_program("python3").ok_or("python3 is missing")?;
    process::run(Command::new(python).args(["-m", "venv"]).arg(dir))?;
    let mut command = Command::new(dir.join("bin/python"));
    // Wheels only: building these takes many minutes.
    command.args(["-m", "pip", "install", "--quiet", "--only-binary=:all:"]);
    process::run(command.args(packages))
}

fn node(dir: &Path, packages: &[&str]) -> Outcome {
    let npm = process::system_program("npm").ok_or("npm is missing")?;
    // A project of its own, or npm would look for one in the directories above.
    let project = dir.join("package.json");
    std::fs::write(&project, "{\"private\": true}\n")
        .map_err(|e| format!("{}: {e}", project.display()))?;
    let mut command = Command::new(npm);
    command
        .current_dir(dir)
        .args(["install", "--save-exact", "--ignore-scripts"])
        .args(["--no-audit", "--no-fund", "--loglevel=error"]);
    process::run(command.args(packages))
}
