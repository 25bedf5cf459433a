//! The E2B API, spoken by E2B's official clients, unmodified, which are pointed at the server by environment variables.

use crate::identity::{key, ran};
use k8e_e2e::Server;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Several times what it takes on a machine that runs other tests as well: a client that hangs must not hang the tests.
const WITHIN: Duration = Duration::from_secs(400);

/// Where `cargo xtask setup` put a client.
fn client(name: &str) -> PathBuf {
    k8e_e2e::tools("contract").join(name)
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("e2b").join(name)
}

/// The URL of the E2B API, as the log says.
fn url(server: &Server) -> String {
    let log = server.log_text();
    let at = log.find("E2B API: http://").expect("the log says where");
    let url = log[at..].trim_start_matches("E2B API: ");
    url.split_whitespace().next().unwrap().to_owned()
}

/// Runs a script with two API keys, of two owners.
fn drive(runtime: &str, program: &Path, script: &Path, env: &[(&str, PathBuf)]) {
    let flags = ["--e2b-listen", "127.0.0.1:0", "--default-runtime", runtime];
    let server = Server::start_with(&flags);
    let e2b_form = |key: String| key.replacen("k8e_", "e2b_", 1);
    let url = url(&server);
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", &WITHIN.as_secs().to_string()])
        .arg(program)
        .arg(script)
        .envs(env.iter().cloned())
        .env("E2B_API_URL", &url)
        .env("E2B_SANDBOX_URL", &url)
        .env("E2B_API_KEY", e2b_form(key(&server, "ann", &[])))
        .env("OTHER_API_KEY", e2b_form(key(&server, "bob", &[])))
        // A proxy of the machine's is not for this.
        .env("no_proxy", "127.0.0.1,localhost");
    let done = ran(&mut command);
    assert_eq!(done.code, 0, "{}", done.all());
    assert!(done.out().contains("every call was made"), "{}", done.all());
    server.assert_traces(0);
}

fn python(runtime: &str, name: &str) {
    let program = client("e2b-python").join("bin/python");
    drive(runtime, &program, &script(name), &[]);
}

fn node(runtime: &str, name: &str) {
    let tools = client("e2b-node");
    let env = [("NODE_TOOLS", tools)];
    drive(runtime, Path::new("node"), &script(name), &env);
}

#[test]
fn the_javascript_client_works_unmodified() {
    node("native", "client.mjs");
}

#[test]
fn the_javascript_client_works_unmodified_in_gvisor() {
    node("gvisor", "client.mjs");
}

#[test]
fn the_python_client_works_unmodified() {
    python("native", "client.py");
}

#[test]
fn the_python_client_works_unmodified_in_gvisor() {
    python("gvisor", "client.py");
}

#[test]
fn the_javascript_code_interpreter_works_unmodified() {
    node("native", "interpreter.mjs");
}

#[test]
fn the_javascript_code_interpreter_works_unmodified_in_gvisor() {
    node("gvisor", "interpreter.mjs");
}

#[test]
fn the_python_code_interpreter_works_unmodified() {
    python("native", "interpreter.py");
}

#[test]
fn the_python_code_interpreter_works_unmodified_in_gvisor() {
    python("gvisor", "interpreter.py");
}

/// Without a sandbox, whose template would need matplotlib.
#[test]
fn the_kernel_shows_figures_and_tables_as_clients_read_them() {
    let kernel = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/engine/src/interpreter");
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", &WITHIN.as_secs().to_string()])
        .arg(client("e2b-python").join("bin/python"))
        .arg(script("charts.py"))
        .arg(client("charts").join("bin/python"))
        .args([kernel.join("charts.py"), kernel.join("kernel.py")]);
    let done = ran(&mut command);
    assert_eq!(done.code, 0, "{}", done.all());
    assert!(
        done.out().contains("every chart was read"),
        "{}",
        done.all()
    );
}

#[test]
fn watches_and_metrics_by_the_javascript_client() {
    node("native", "watch.mjs");
}

#[test]
fn watches_and_metrics_by_the_javascript_client_in_gvisor() {
    node("gvisor", "watch.mjs");
}

#[test]
fn watches_and_metrics_by_the_python_client() {
    python("native", "watch.py");
}

#[test]
fn watches_and_metrics_by_the_python_client_in_gvisor() {
    python("gvisor", "watch.py");
}

#[test]
fn a_default_address_that_is_taken_does_not_stop_the_server() {
    let Ok(_taken) = std::net::TcpListener::bind("127.0.0.1:3676") else {
        // Another server of this machine has it, which is as good.
        return;
    };
    let server = Server::start_with(&["--e2b-domain", "sandboxes.example"]);
    assert_eq!(server.k8e(&["sandbox", "status"]).code, 0);
}
