//! `k8e operator`: the controllers of the agent-sandbox API, in a cluster or beside it.

use k8e_net::shutdown;
use k8e_operator::options::OperatorOptions;
use std::process::ExitCode;

pub(crate) const LONG_ABOUT: &str = "\
Serve the agent-sandbox API on a Kubernetes cluster: Sandbox and, with --extensions, SandboxClaim,
SandboxWarmPool and SandboxTemplate. It takes the flags of the agent-sandbox controller, so that a
Deployment can change its image and keep its arguments.

  k8e operator --extensions --kubeconfig ~/.kube/config

Install the kinds first: kubectl apply -f deploy/crds (or the Helm chart in deploy/helm/k8e).";

/// Runs the operator until SIGTERM or SIGINT.
pub(crate) fn run(options: OperatorOptions) -> ExitCode {
    crate::log::by_environment();
    match serve(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            tracing::error!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn serve(options: OperatorOptions) -> Result<(), String> {
    crate::descriptors::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start threads: {e}"))?;
    runtime.block_on(async {
        let stop = shutdown::signals().map_err(|e| format!("cannot listen for signals: {e}"))?;
        k8e_operator::run(options, stop)
            .await
            .map_err(|e| e.to_string())
    })
}
