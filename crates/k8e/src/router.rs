//! `k8e router`: reverse proxy to the sandboxes of a Kubernetes cluster.

use k8e_operator::router::{self, Command, Options};
use std::process::ExitCode;

pub(crate) const LONG_ABOUT: &str = "\
Pass HTTP, WebSocket and gRPC requests to the sandboxes of a Kubernetes cluster, as the Service
sandbox-router-svc of agent-sandbox does: the header X-Sandbox-ID names the sandbox.

  k8e router --authz-mode tokenreview
  k8e router token --namespace default --name my-sandbox --ttl 1h";

/// Runs the router until SIGTERM or SIGINT, or prints a token.
pub(crate) fn run(options: Options) -> ExitCode {
    crate::log::by_environment();
    let outcome = match &options.command {
        Some(Command::Token(token)) => router::token(token)
            .map(|token| k8e_cli::print(format!("{token}\n").as_bytes(), 0))
            .map_err(|e| e.to_string()),
        None => serve(options).map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|message| {
        tracing::error!("{message}");
        ExitCode::FAILURE
    })
}

fn serve(options: Options) -> Result<(), String> {
    crate::descriptors::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start threads: {e}"))?;
    runtime
        .block_on(router::run(options))
        .map_err(|e| e.to_string())
}
