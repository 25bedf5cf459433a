//! State shared by all APIs: configuration, the guest agent, the process table, and the phase of the shutdown.

use crate::agent::{Agent, Failure, Root};
use crate::config::Config;
use crate::registry::{Registry, Running};
use bytes::Bytes;
use k8e_wire::proto::{Argv, EnvVar, ErrorCode, Exec, FileType, exec::Program};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::Instant;

/// Phase of the server, up to its shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Requests are served.
    Serving,
    /// No command is started any more, running ones get SIGTERM, and probes get 503.
    Stopping,
    /// Connections are closed after their current request.
    Closing,
}

/// State shared by all APIs.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) agent: Agent,
    /// Root directory of sandboxd's APIs.
    pub(crate) root: Root,
    /// Root directory of the legacy API.
    pub(crate) legacy_root: Root,
    pub(crate) registry: Arc<Registry>,
    pub(crate) phase: watch::Sender<Phase>,
    pub(crate) started: Instant,
    env: Vec<EnvVar>,
    /// UID of commands: that of this process.
    user: String,
}

// === impl Shared ===

impl Shared {
    /// Both roots must exist and have no symbolic links in their paths.
    pub(crate) fn new(config: Config, agent: Agent, root: &Path, legacy_root: &Path) -> Self {
        let dir = |path: &Path| Bytes::copy_from_slice(path.as_os_str().as_bytes());
        let env = config.env.iter().map(|(name, value)| EnvVar {
            name: Bytes::copy_from_slice(name.as_bytes()),
            value: Bytes::copy_from_slice(value.as_bytes()),
        });
        Self {
            env: env.collect(),
            user: rustix::process::geteuid().as_raw().to_string(),
            root: agent.root(dir(root)),
            legacy_root: agent.root(dir(legacy_root)),
            registry: Arc::new(Registry::new(config.max_processes)),
            phase: watch::Sender::new(Phase::Serving),
            started: Instant::now(),
            agent,
            config,
        }
    }

    /// Registers a command. Fails when the limit is reached or the runtime is shutting down.
    pub(crate) fn admit(&self) -> Result<Running, Failure> {
        if self.is_stopping() {
            return Err(Failure::stopping());
        }
        Registry::admit(&self.registry)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.phase.borrow() > Phase::Serving
    }

    /// Builds a guest call that runs a command with the environment and the user of this process.
    pub(crate) fn exec(&self, args: impl IntoIterator<Item = String>, cwd: &Bytes) -> Exec {
        let args = args.into_iter().map(Bytes::from).collect();
        Exec {
            program: Some(Program::Argv(Argv { args })),
            env: self.env.clone(),
            cwd: cwd.clone(),
            user: self.user.clone(),
            ..Exec::default()
        }
    }
}

/// Resolves the working directory of a command beneath a root.
pub(crate) async fn working_dir(root: &Root, path: &str) -> Result<Bytes, Failure> {
    let found = root
        .stat(&crate::path::beneath_root(path.as_bytes())?)
        .await;
    let info = found.map_err(|failure| Failure {
        message: format!("working directory: {}", failure.message),
        ..failure
    })?;
    match info.r#type() {
        FileType::Directory => Ok(info.path),
        FileType::File | FileType::Symlink | FileType::Other | FileType::Unspecified => {
            let message = format!("working directory {path:?} is not a directory");
            Err(Failure::new(ErrorCode::NotDirectory, message))
        }
    }
}
