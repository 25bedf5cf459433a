//! The runtime inside a Kubernetes sandbox pod: one static program that, beside a shell, is all that an
//! image needs for clients of agent-sandbox.
//!
//! # Doors
//! | door | port | what |
//! |---|---|---|
//! | legacy | 8888 | HTTP: execute, upload, download, list, exists |
//! | rest | 8080 | HTTP of sandboxd: files, health, metadata |
//! | grpc | 9090 | `process.v1.ProcessService` of sandboxd, with reflection |
//!
//! # How
//! The work is done by the guest, the agent of k8e's own sandboxes, as a part of this process: each
//! request becomes a call of the guest's protocol, over a pair of sockets. So a command here is
//! supervised, killed with all it started and counted as it is there, and a path is resolved by the same
//! code. What is written here is the way in: HTTP, gRPC, and what these APIs mean.
//!
//! # Guarantees
//! - Whoever lets go of a request or a stream, or whose time is over, ends its command with everything
//!   it started, also what left its process group.
//! - No path leads out of its root, whoever renames and links meanwhile.
//! - A file that is replaced is there whole or as it was.
//! - Nothing that a client sends or a command writes is held without a bound.
//!
//! # One thread
//! As the guest: the pod's limit of processes counts threads, and a fork bomb must not stop this.

mod agent;
mod config;
mod deadline;
mod host;
mod http;
mod legacy;
mod multipart;
mod origin;
mod path;
mod process;
mod registry;
mod rest;
mod run;
mod server;
mod shared;
mod stop;
mod store;
mod time;

pub use config::{Config, ConfigError, Task};

use agent::Agent;
use server::Door;
use shared::Shared;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

/// Why the runtime did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A root cannot be made or entered.
    #[error("root directory {0:?}: make it in the image, or name another with -{1}")]
    Root(PathBuf, &'static str, #[source] io::Error),
    /// An address cannot be listened on.
    #[error("listen on {0}: choose another with -listen-host and -{1}")]
    Listen(SocketAddr, &'static str, #[source] io::Error),
    /// The description of the gRPC service is not what it should be.
    #[error("describe the gRPC service")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// The system refused what every program gets.
    #[error("start")]
    System(#[source] io::Error),
}

/// Serves until it is told to stop, then ends what runs.
pub fn run(config: Config) -> Result<(), StartError> {
    if config.token.is_some() {
        // Commands run as the same user: they must not read our environment or memory.
        let hidden = rustix::process::DumpableBehavior::NotDumpable;
        rustix::process::set_dumpable_behavior(hidden)
            .map_err(|errno| StartError::System(errno.into()))?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(StartError::System)?;
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> Result<(), StartError> {
    let handle = |kind| signal(kind).map_err(StartError::System);
    // All before the guest looks which signals are handled here: commands get those reset.
    let (mut terminate, mut interrupt) = (
        handle(SignalKind::terminate())?,
        handle(SignalKind::interrupt())?,
    );
    let _child = handle(SignalKind::child())?;
    let is_init = std::process::id() == 1;
    let guest = if is_init {
        k8e_guest::Config::for_init()
    } else {
        k8e_guest::Config::default()
    };
    let agent = Agent::new(k8e_guest::Agent::new(guest));
    let root = root(&config.root_dir, "root-dir")?;
    let legacy_root = match config.legacy_port {
        Some(_) => self::root(&config.legacy_root_dir, "legacy-root-dir")?,
        None => root.clone(),
    };
    let shared = Arc::new(Shared::new(config, agent, &root, &legacy_root));
    let doors = open(&shared).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stop::stop(&shared, doors, is_init).await;
    Ok(())
}

/// Makes a root if it is missing; without symbolic links, which may be changed later.
fn root(dir: &Path, flag: &'static str) -> Result<PathBuf, StartError> {
    std::fs::create_dir_all(dir)
        .and_then(|()| dir.canonicalize())
        .map_err(|error| StartError::Root(dir.to_owned(), flag, error))
}

/// Opens the doors, and says where they are.
async fn open(shared: &Arc<Shared>) -> Result<JoinSet<()>, StartError> {
    let config = &shared.config;
    let grpc = Door::grpc(shared).map_err(StartError::Reflection)?;
    let doors = [
        ("legacy", "legacy-port", config.legacy_port, Door::Legacy),
        ("rest", "rest-port", config.rest_port, Door::Rest),
        ("grpc", "grpc-port", config.grpc_port, grpc),
    ];
    let mut serving = JoinSet::new();
    let mut said = format!("k8e-runtime {} listens:", env!("CARGO_PKG_VERSION"));
    for (name, flag, port, door) in doors {
        let Some(port) = port else { continue };
        let address = SocketAddr::new(config.listen_host, port);
        let failed = |error| StartError::Listen(address, flag, error);
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        said.push_str(&format!(" {name}={address}"));
        serving.spawn(server::serve(door, listener, Arc::clone(shared)));
    }
    say(&said);
    Ok(serving)
}

/// Tells whoever reads the log of the pod.
fn say(text: &str) {
    // Nobody there is no reason to stop.
    let _ = writeln!(io::stderr(), "{text}");
}
