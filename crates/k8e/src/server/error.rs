//! Fatal errors of `k8e server`.

use std::io;
use std::path::PathBuf;

/// A fatal error of `k8e server`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "k8e server needs root, because it makes namespaces, mounts and control groups: run it with sudo"
    )]
    NotRoot,
    #[error("this k8e was built without its guest: build it with `cargo xtask build`")]
    NoGuest,
    #[error("--log {filter:?} is not a filter: write info, debug or k8e_engine=debug")]
    Log { filter: String },
    #[error(
        "the default limits (--default-memory, --default-cpus, --default-pids, --default-disk) are not valid"
    )]
    Limits(#[source] k8e_model::Error),
    #[error(transparent)]
    Pool(k8e_model::Error),
    #[error("--allowed-hosts is not valid")]
    AllowedHosts(#[source] k8e_model::Error),
    #[error("--denied-hosts is not valid")]
    DeniedHosts(#[source] k8e_model::Error),
    #[error("--registry-insecure, --registry-private or --registry-mirror cannot work")]
    Registries(#[source] k8e_image::ImageError),
    #[error("cannot {operation} the data directory {}: choose one that root can write, with --data-dir", path.display())]
    DataDir {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the server runs as an unprivileged user (uid {uid}), which cannot pass through {}: run `chmod o+x` on it, or choose another --data-dir", path.display())]
    CannotPass {
        path: PathBuf,
        uid: u32,
        #[source]
        source: io::Error,
    },
    #[error("cannot drop root privileges")]
    Confine(#[source] k8e_confine::ConfineError),
    #[error("the data directory {} is not safe to use: {why} (--data-dir)", path.display())]
    UnsafeDataDir { path: PathBuf, why: String },
    #[error("another k8e server{} uses {}: stop it or choose another --data-dir", shown(*.pid), path.display())]
    Taken { pid: Option<u32>, path: PathBuf },
    #[error("cannot prepare this machine for sandboxes")]
    Driver(#[source] k8e_driver::DriverError),
    #[error("--default-runtime {kind} does not work on this machine: {reason}")]
    DefaultRuntime {
        kind: k8e_model::RuntimeKind,
        reason: String,
    },
    #[error("cannot start the async runtime")]
    Runtime(#[source] io::Error),
    #[error("cannot open the store")]
    Store(#[source] k8e_store::StoreError),
    #[error("cannot start the session service")]
    Engine(#[source] k8e_engine::Error),
    #[error(transparent)]
    Gateway(k8e_gateway::Error),
}

// === impl Error ===

impl Error {
    /// The error and its causes, as one line.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut next = std::error::Error::source(self);
        let mut full = false;
        while let Some(cause) = next {
            full |= cause.downcast_ref().is_some_and(is_full);
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            next = cause.source();
        }
        // Any step can run out of disk space, and only here it is known what to do about it.
        if full {
            text.push_str(": free some space or choose another --data-dir");
        }
        text
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

fn shown(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}
