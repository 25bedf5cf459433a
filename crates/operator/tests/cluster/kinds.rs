//! Client, installation of the CRDs, and operator options; shared with the stress tests.

use clap::Parser;
use k8e_operator::crd::schema;
use k8e_operator::options::OperatorOptions;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::path::Path;
use std::time::{Duration, Instant};

/// Timeout until a CRD is served.
const ESTABLISHED: Duration = Duration::from_secs(60);

#[derive(Parser)]
#[command(args_override_self = true)]
struct Cli {
    #[command(flatten)]
    options: OperatorOptions,
}

/// Operator options with all controllers.
pub(crate) fn options(more: &[&str]) -> OperatorOptions {
    let usual = [
        "operator",
        "--extensions",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
    ];
    Cli::parse_from(usual.iter().chain(more)).options
}

/// Client configuration from a kubeconfig.
pub(crate) async fn config(file: &Path) -> Config {
    let kubeconfig = Kubeconfig::read_from(file).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.expect("a configuration")
}

/// A client of the cluster.
pub(crate) async fn connect(file: &Path) -> Client {
    Client::try_from(config(file).await).expect("a client")
}

/// Installs the generated CRDs and waits until they are served.
pub(crate) async fn install_kinds(client: &Client) {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in schema::definitions() {
        let name = definition["metadata"]["name"]
            .as_str()
            .expect("a name")
            .to_owned();
        let apply = PatchParams::apply("test").force();
        let applied = api.patch(&name, &apply, &Patch::Apply(definition)).await;
        applied.expect("a definition that the API server takes");
        let started = Instant::now();
        while !is_established(&api, &name).await {
            assert!(started.elapsed() < ESTABLISHED, "{name} is not established");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn is_established(api: &Api<CustomResourceDefinition>, name: &str) -> bool {
    let crd = api.get(name).await.expect("it is there");
    let conditions = crd.status.and_then(|s| s.conditions).unwrap_or_default();
    let holds = |kind: &str| {
        conditions
            .iter()
            .any(|c| c.type_ == kind && c.status == "True")
    };
    assert!(!holds("NonStructuralSchema"), "{name}: {conditions:?}");
    holds("Established")
}
