//! `cargo xtask kube`: a cluster for a person.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command talks to its terminal"
)]

use clap::{Parser, Subcommand, ValueEnum};
use k8e_kube_dev::{Cluster, Error, Need, Options, Profile, binaries_directory, default_dir, down};
use std::path::PathBuf;
use std::process::ExitCode;

/// A real Kubernetes of plain processes, for development and tests.
///
/// Programs come from $K8E_KUBE_BIN, else from a cache, else from the official releases, else they
/// are built with Go from the module proxy (a quarter of an hour, once for each version).
#[derive(Debug, Parser)]
#[command(name = "cargo xtask kube", bin_name = "cargo xtask kube")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Start a cluster and print the path of its kubeconfig
    #[command(after_help = "Example:\n  \
        export KUBECONFIG=$(cargo xtask kube up --nodes 3)\n  \
        export PATH=$PATH:$(cargo xtask kube bin)\n  \
        kubectl get nodes\n  \
        cargo xtask kube down")]
    Up {
        /// Where its files go; what is left of a cluster there is removed first
        #[arg(long)]
        dir: Option<PathBuf>,
        /// What it has besides a control plane
        #[arg(long, value_enum, default_value = "control-plane")]
        profile: ProfileArg,
        /// How many nodes KWOK simulates [default: 1, and 0 with --profile node]
        #[arg(long)]
        nodes: Option<u32>,
        /// Write who asked the apiserver for what to audit.log
        #[arg(long)]
        audit: bool,
    },
    /// Stop a cluster and remove everything it has
    Down {
        /// The directory that `up` was given
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// Print the directory with the programs, getting them first if they are not there
    Bin {
        /// For which kind of cluster
        #[arg(long, value_enum, default_value = "control-plane")]
        profile: ProfileArg,
        /// With helm
        #[arg(long)]
        helm: bool,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ProfileArg {
    /// Simulated nodes: pods become Ready, nothing runs; needs no root
    ControlPlane,
    /// A kubelet on this machine with containerd, runc and runsc; needs root
    Node,
}

fn main() -> ExitCode {
    match run(Args::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<(), Error> {
    match task {
        Task::Up {
            dir,
            profile,
            nodes,
            audit,
        } => {
            let is_real = matches!(profile, ProfileArg::Node);
            let cluster = Cluster::up(Options {
                dir: Some(dir.map_or_else(default_dir, Ok)?),
                profile: profile.into(),
                simulated_nodes: nodes.unwrap_or(u32::from(!is_real)),
                audit,
            })?;
            println!("{}", cluster.kubeconfig().display());
            cluster.keep()
        }
        Task::Down { dir } => down(&dir.map_or_else(default_dir, Ok)?),
        Task::Bin { profile, helm } => {
            let mut needs = vec![Need::ControlPlane];
            needs.extend(matches!(profile, ProfileArg::Node).then_some(Need::Node));
            needs.extend(helm.then_some(Need::Helm));
            println!("{}", binaries_directory(&needs)?.display());
            Ok(())
        }
    }
}

// === impl ProfileArg ===

impl From<ProfileArg> for Profile {
    fn from(arg: ProfileArg) -> Self {
        match arg {
            ProfileArg::ControlPlane => Self::ControlPlane,
            ProfileArg::Node => Self::Node,
        }
    }
}
