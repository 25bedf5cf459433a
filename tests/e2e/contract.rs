//! The `sandbox.v1` API, spoken by stacks that are not ours: grpcio with stubs made from our proto, and grpc-js.
//! Over TLS, with a certificate that `Login` gave for an API key. Each drives every call.

use crate::identity::{endpoint, key};
use k8e_e2e::{Server, tools};
use rcgen::{CertificateParams, KeyPair};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Twice what all of it takes on a machine that runs other tests as well.
const WITHIN: Duration = Duration::from_secs(400);

/// What commands get and nobody reads.
const SECRET: &str = "hunter2-hunter2";

fn proto() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto")
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("contract")
        .join(name)
}

/// Runs a client against a server of its own, and shows what it said if it fails.
fn drive(runtime: &str, client: impl FnOnce(&Path) -> Command) {
    let flags = [
        "--listen",
        "127.0.0.1:0",
        "--expose-listen",
        "127.0.0.1:0",
        "--default-runtime",
        runtime,
    ];
    let server = Server::start_with(&flags);
    let dir = tempfile::tempdir().unwrap();
    let own = KeyPair::generate().unwrap();
    let csr = CertificateParams::default()
        .serialize_request(&own)
        .unwrap();
    std::fs::write(dir.path().join("key.pem"), own.serialize_pem()).unwrap();
    std::fs::write(dir.path().join("csr.pem"), csr.pem().unwrap()).unwrap();
    let command = client(dir.path());
    let api_key = key(&server, "contract", &[]);
    let second_key = key(&server, "person", &["--principal", "contract"]);
    let set = ["secret", "set", "github:token", "--principal", "contract"];
    let set = server.k8e_with(&set, SECRET.as_bytes());
    assert_eq!(set.code, 0, "{}", set.all());
    let address = endpoint(&server);
    let seconds = WITHIN.as_secs().to_string();
    // A client that hangs must not hang the tests.
    let mut bounded = Command::new("timeout");
    bounded
        .args(["--kill-after=5", &seconds])
        .arg(command.get_program())
        .args(command.get_args())
        .envs(
            command
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .env("ENDPOINT", address.trim_start_matches("https://"))
        // Where clients of the first generation look, below K8E's directory.
        .env(
            "CA",
            server
                .data_dir()
                .join("server/tls/serving-kube-apiserver.crt"),
        )
        .env("APIKEY", api_key)
        .env("SECOND_APIKEY", second_key)
        .env("SECRET", SECRET)
        .env("KEY", dir.path().join("key.pem"))
        .env("CSR", dir.path().join("csr.pem"))
        .env("RUNTIME", runtime)
        // A proxy of the machine's is not for this.
        .env("no_proxy", "127.0.0.1");
    let ran = crate::identity::ran(&mut bounded);
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.out().contains("every call was made"), "{}", ran.all());
    assert!(!server.log_text().contains(SECRET));
    server.assert_traces(0);
}

fn python(dir: &Path) -> Command {
    let python = tools("contract/python").join("bin/python");
    let stubs = Command::new(&python)
        .args(["-m", "grpc_tools.protoc", "sandbox/v1/sandbox.proto"])
        .arg(format!("--proto_path={}", proto().display()))
        .arg(format!("--python_out={}", dir.display()))
        .arg(format!("--grpc_python_out={}", dir.display()))
        .output()
        .unwrap();
    assert!(stubs.status.success(), "{stubs:?}");
    let mut command = Command::new(python);
    command.arg(script("client.py")).env("STUBS", dir);
    command
}

fn node(_dir: &Path) -> Command {
    let mut command = Command::new("node");
    command
        .arg(script("client.js"))
        .env("NODE_TOOLS", tools("contract/node"))
        .env("PROTO", proto());
    command
}

#[test]
fn python_drives_every_call() {
    drive("native", python);
}

#[test]
fn python_drives_every_call_with_a_kernel_of_its_own() {
    drive("gvisor", python);
}

#[test]
fn node_drives_every_call() {
    drive("native", node);
}
