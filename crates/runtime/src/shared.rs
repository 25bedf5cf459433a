//! What all doors share: the guest, the commands that run, and whether the end has come.

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

/// Where this process is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// All calls are answered.
    Serving,
    /// No command starts any more, those that run are asked to end, and probes are told.
    Stopping,
    /// Connections end with the request they have.
    Closing,
}

/// The state behind the doors.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) agent: Agent,
    /// Files of sandboxd's API.
    pub(crate) root: Root,
    /// Files of the legacy API.
    pub(crate) legacy_root: Root,
    pub(crate) registry: Arc<Registry>,
    pub(crate) phase: watch::Sender<Phase>,
    pub(crate) started: Instant,
    env: Vec<EnvVar>,
    /// Whom commands run as: whoever this process is.
    user: String,
}

// === impl Shared ===

impl Shared {
    /// Both roots exist, and are no symbolic links.
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

    /// A place for one more command.
    pub(crate) fn admit(&self) -> Result<Running, Failure> {
        if self.is_stopping() {
            return Err(Failure::stopping());
        }
        Registry::admit(&self.registry)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.phase.borrow() > Phase::Serving
    }

    /// A command, with our environment.
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

/// The directory beneath a root in which a command is to run.
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
