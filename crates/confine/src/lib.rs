//! Privilege drop of a process that was started by root: an unprivileged user, no capabilities,
//! `no_new_privs`, Landlock and a seccomp allow-list. For good: nothing here can be undone.
//!
//! It is for processes that parse what others send. What they still need root for, another process
//! does for them (`k8e-driver`'s launcher).

mod landlock;
mod seccomp;
mod user;

use std::path::PathBuf;

/// What the process is left with.
#[derive(Clone, Debug)]
pub struct Confinement {
    /// The user it becomes; not root.
    pub uid: u32,
    /// The group it becomes.
    pub gid: u32,
    /// Groups it has besides.
    pub groups: Vec<u32>,
    /// Directories below which it may read and write files.
    pub read_write: Vec<PathBuf>,
    /// Files and directories that it may read.
    pub read_only: Vec<PathBuf>,
}

/// Why a process could not be confined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// Every thread would have to be confined, and only the calling one can be.
    #[error("the process has {0} threads: privileges must be dropped before any is started")]
    Threads(usize),
    /// Root cannot be given up to become root.
    #[error("uid {uid} and gid {gid} must not be root's")]
    Root {
        /// What was asked for.
        uid: u32,
        /// What was asked for.
        gid: u32,
    },
    /// A system call failed.
    #[error("cannot {0}")]
    Step(&'static str, #[source] std::io::Error),
}

/// Confines the calling process, which must have one thread. Returns what this kernel does not
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
