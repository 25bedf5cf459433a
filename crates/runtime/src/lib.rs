//! The in-pod runtime (container agent) of a Kubernetes sandbox: an HTTP and gRPC server that runs commands and serves
//! files for agent-sandbox clients, and the init process of the container. One static binary; with a shell, an image
//! needs nothing else.
//!
//! # APIs
//! | API | port | protocol |
//! |---|---|---|
//! | legacy | 8888 | HTTP: execute, upload, download, list, exists |
//! | rest | 8080 | HTTP of sandboxd: files, health, metadata |
//! | grpc | 9090 | `process.v1.ProcessService` of sandboxd, with server reflection |
//!
//! # Design
//! The work is done by the guest, the agent inside k8e's own sandboxes, which is linked into this process: each
//! request becomes a call of the guest protocol over a socket pair. So commands are supervised, killed and limited by
//! the same code as there, and paths are resolved by the same code. This crate has the protocols in front of it.
//!
//! # Guarantees
//! - When a client cancels a request or a stream, or its deadline passes, the command is killed with all its
//!   descendants, also those that left its process group.
//! - No path leads out of its root, even while files are renamed and linked concurrently.
//! - A file is replaced atomically.
//! - Every buffer for what clients send and commands write is bounded.
//!
//! # One thread
//! As the guest: the process limit of the pod counts threads, and a fork bomb must not stop this program.

mod agent;
mod config;
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
mod shutdown;
mod store;
mod time;

pub use config::{Config, ConfigError, Task};

use agent::Agent;
use server::Api;
use shared::Shared;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

/// An error that kept the runtime from starting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A root directory cannot be created or resolved; its path, and the flag that sets it.
    #[error("root directory {0:?}: create it in the image, or set another with -{1}")]
    Root(PathBuf, &'static str, #[source] io::Error),
    /// An address cannot be bound; the address, and the flag that sets its port.
    #[error("listen on {0}: choose another with -listen-host and -{1}")]
    Listen(SocketAddr, &'static str, #[source] io::Error),
    /// The embedded descriptor of the gRPC service is invalid.
    #[error("set up gRPC server reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// A signal handler, the async runtime or `prctl` failed.
    #[error("set up the process")]
    System(#[source] io::Error),
}

/// Serves until SIGTERM or SIGINT, then shuts down gracefully.
pub fn run(config: Config) -> Result<(), StartError> {
    if config.token.is_some() {
        // Commands run as the same user. Not dumpable, so they cannot read the token in our environment or memory.
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
    // Before the guest starts: it resets the signals that are handled by now for its commands.
    let stop = k8e_net::shutdown::signals().map_err(StartError::System)?;
    let _child = signal(SignalKind::child()).map_err(StartError::System)?;
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
    let listeners = listen(&shared).await?;
    stop.await;
    shutdown::shutdown(&shared, listeners, is_init).await;
    Ok(())
}

/// Creates a root directory if it is missing, and resolves symbolic links, which could be changed later.
fn root(dir: &Path, flag: &'static str) -> Result<PathBuf, StartError> {
    std::fs::create_dir_all(dir)
        .and_then(|()| dir.canonicalize())
        .map_err(|error| StartError::Root(dir.to_owned(), flag, error))
}

/// Binds the ports, starts to serve, and logs the addresses.
async fn listen(shared: &Arc<Shared>) -> Result<JoinSet<()>, StartError> {
    let config = &shared.config;
    let grpc = Api::grpc(shared).map_err(StartError::Reflection)?;
    let listeners = [
        ("legacy", "legacy-port", config.legacy_port, Api::Legacy),
        ("rest", "rest-port", config.rest_port, Api::Rest),
        ("grpc", "grpc-port", config.grpc_port, grpc),
    ];
    let mut serving = JoinSet::new();
    let mut said = format!("k8e-runtime {} listens:", env!("CARGO_PKG_VERSION"));
    for (name, flag, port, api) in listeners {
        let Some(port) = port else { continue };
        let address = SocketAddr::new(config.listen_host, port);
        let failed = |error| StartError::Listen(address, flag, error);
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        said.push_str(&format!(" {name}={address}"));
        serving.spawn(server::serve(api, listener, Arc::clone(shared)));
    }
    log(&said);
    Ok(serving)
}

/// Writes a line to the log of the pod (stderr).
fn log(text: &str) {
    // A closed stderr is no reason to stop.
    let _ = writeln!(io::stderr(), "{text}");
}
