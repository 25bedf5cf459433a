//! The k8e binary: parses the command line and dispatches to server, client, operator, router or launcher. Wiring only.

mod check_config;
mod descriptors;
mod doctor;
mod log;
mod operator;
mod router;
mod server;

use clap::{CommandFactory as _, Parser, Subcommand};
use k8e_cli::Late;
use k8e_driver::{LAUNCHER_ARG, launcher_main};
use k8e_operator::options::with_double_dashes;
use std::ffi::OsString;
use std::process::ExitCode;

/// Sandboxes for AI agents.
#[derive(Parser)]
#[command(
    name = "k8e",
    version,
    about = "Sandboxes for AI agents",
    long_about = "\
Sandboxes for AI agents: run code that you do not trust, on your own machine, in milliseconds.

  k8e sandbox run 'print(\"hello\")' --lang python

As root on Linux the first command starts a server in the background; `k8e server` runs one in the
foreground."
)]
struct K8e {
    #[command(flatten)]
    globals: k8e_cli::Globals,
    #[command(subcommand)]
    role: Role,
}

/// The role of this process.
#[derive(Subcommand)]
enum Role {
    /// Serve sandboxes on this machine
    #[command(long_about = server::LONG_ABOUT)]
    Server(Late<Box<server::ServerArgs>>),
    /// Check whether this machine can make sandboxes
    #[command(long_about = check_config::LONG_ABOUT)]
    CheckConfig(Late<check_config::CheckConfigArgs>),
    /// Find out what is wrong with client, server or machine, and how to fix it
    #[command(long_about = k8e_cli::doctor::LONG_ABOUT)]
    Doctor(Late<k8e_cli::doctor::DoctorArgs>),
    /// Serve the agent-sandbox API on a Kubernetes cluster
    // Go's flags may be given twice, and Deployments do: the last one counts.
    #[command(long_about = operator::LONG_ABOUT, args_override_self = true)]
    Operator(Late<Box<k8e_operator::options::OperatorOptions>>),
    /// Pass requests to the sandboxes of a Kubernetes cluster
    #[command(long_about = router::LONG_ABOUT, args_override_self = true)]
    Router(Box<k8e_operator::router::Options>),
    #[command(flatten)]
    Client(k8e_cli::Command),
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    // First of all: the launcher forks, and so must never have had a second thread.
    if args.get(1).is_some_and(|arg| arg == LAUNCHER_ARG) {
        return launcher_main();
    }
    let args = match args.get(1) {
        Some(role) if role == "operator" || role == "router" => {
            with_double_dashes(args.into_iter())
        }
        _ => args,
    };
    let K8e { globals, role } = match k8e_cli::parse(&args) {
        Ok(k8e) => k8e,
        Err(code) => return code,
    };
    match role {
        Role::Server(Late(args)) => match args.command() {
            Some(command) => server::control(&globals, command),
            None => server::run(&globals, *args),
        },
        Role::CheckConfig(Late(args)) => check_config::run(&globals, &args, server::GUEST),
        Role::Doctor(Late(args)) => doctor::run(&globals, &args, server::GUEST),
        Role::Operator(Late(options)) => operator::run(*options),
        Role::Router(options) => router::run(*options),
        Role::Client(command) => k8e_cli::run(&globals, command, K8e::command),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        K8e::command().debug_assert();
    }
}
