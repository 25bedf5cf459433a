//! `k8e router`: the way to sandboxes in Kubernetes, and the tokens that open one of them.

use k8e_operator::router::{Command, Options};
use std::process::ExitCode;

pub(crate) const LONG_ABOUT: &str = "\
Pass requests on to sandboxes in Kubernetes: HTTP/1.1, HTTP/2, WebSocket and gRPC. The headers of a
request say which sandbox: X-Sandbox-ID and, if need be, X-Sandbox-Namespace and X-Sandbox-Port.

  k8e router --kubeconfig ~/.kube/config --authz-mode allow-all

Callers need a token of the cluster, and `create` on `sandboxes/proxy` of their sandbox, unless
--authz-mode says otherwise. The router watches pods, so it needs `list` and `watch` on them.
The Helm chart in deploy/helm/k8e runs it as sandbox-router-svc, where clients look for it.";

/// Runs the router until it is told to stop, or makes a token.
pub(crate) fn run(options: Options) -> ExitCode {
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned());
    if !crate::log::to_stderr(&filter) {
        tracing::warn!("RUST_LOG={filter} makes no sense; using info");
    }
    let done = match &options.command {
        Some(Command::Token(token)) => {
            let made = k8e_operator::router::token(token).map_err(|e| e.to_string());
            made.map(|token| k8e_cli::print(format!("{token}\n").as_bytes(), 0))
        }
        None => serve(options).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|message| {
        tracing::error!("{message}");
        ExitCode::FAILURE
    })
}

fn serve(options: Options) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start threads: {e}"))?;
    let served = runtime.block_on(k8e_operator::router::run(options));
    served.map_err(|e| e.to_string())
}
