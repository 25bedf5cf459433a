//! Privilege drop of a process that was started by root: an unprivileged user, no capabilities,
//! `no_new_privs`, a Landlock ruleset and a seccomp allow list. Irreversible.
//!
//! For processes that parse untrusted input. What still needs root is done by another process
//! (`k8e-driver`'s launcher).

mod landlock;
mod seccomp;
mod user;

use std::path::PathBuf;

/// Privileges that the process keeps.
#[derive(Clone, Debug)]
pub struct Confinement {
    /// Uid that it becomes; not 0.
    pub uid: u32,
    /// Gid that it becomes; not 0.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Directories below which it may read and write files.
    pub read_write: Vec<PathBuf>,
    /// Files and directories that it may read.
    pub read_only: Vec<PathBuf>,
}

/// Why the privilege drop failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// The process is multi-threaded: only the calling thread could be confined.
    #[error("the process has {0} threads: privileges must be dropped before any is started")]
    Threads(usize),
    /// The target user or group is root.
    #[error("uid {uid} and gid {gid} must not be root's")]
    Root {
        /// The requested uid.
        uid: u32,
        /// The requested gid.
        gid: u32,
    },
    /// A system call failed.
    #[error("cannot {0}")]
    Step(&'static str, #[source] std::io::Error),
}

/// Confines the calling process, which must be single-threaded. Returns what this kernel does not
/// enforce, one sentence each.
///
/// # Errors
///
/// When a step fails. The process may have lost some of its privileges then, and should end.
pub fn confine(confinement: &Confinement) -> Result<Vec<String>, ConfineError> {
    user::one_thread()?;
    user::become_user(confinement)?;
    let weaker = landlock::restrict(confinement)?;
    seccomp::restrict()?;
    Ok(weaker.into_iter().collect())
}
