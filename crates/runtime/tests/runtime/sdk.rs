//! The unmodified Python client of agent-sandbox: its modules for commands and files, connected to a runtime without
//! Kubernetes.

use crate::support::Runtime;
use std::path::PathBuf;
use std::process::Command;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/runtime/sdk.py");

#[test]
fn the_official_client_works() {
    let tools = std::env::var_os("K8E_TOOLS_DIR").map(PathBuf::from);
    let python = tools
        .map(|tools| tools.join("contract/agent-sandbox/bin/python"))
        .filter(|python| python.exists())
        .expect("`cargo xtask setup` installs the client, `cargo xtask test` sets K8E_TOOLS_DIR");
    let runtime = Runtime::with(&[], &[("SANDBOX_COLOUR", "blue")]);
    let done = Command::new(python)
        .arg(SCRIPT)
        .args([runtime.legacy, runtime.rest, runtime.grpc].map(|api| api.port().to_string()))
        // Loopback only.
        .env("no_proxy", "*")
        .env_remove("KUBECONFIG")
        .output()
        .unwrap();
    let said = [done.stdout, done.stderr].concat();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&said));
}
