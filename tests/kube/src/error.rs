//! What can go wrong, with what to do about it.

use std::path::PathBuf;

/// Why there is no cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or directory could not be read, written or removed.
    #[error("{operation} {}: {source}", path.display())]
    File {
        /// What was tried.
        operation: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A program could not be started.
    #[error("start {program}: {source}; is it installed?")]
    Start {
        /// Which.
        program: String,
        /// Why not.
        source: std::io::Error,
    },
    /// A command ended badly.
    #[error("{command}: {status}: {stderr}")]
    Command {
        /// The whole command.
        command: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The end of what it said.
        stderr: String,
    },
    /// A part of the cluster ended while others still waited for it.
    #[error("{service} ended ({status}); the end of {}:\n{tail}", log.display())]
    Died {
        /// Which.
        service: &'static str,
        /// How.
        status: std::process::ExitStatus,
        /// Where it wrote why.
        log: PathBuf,
        /// The last lines of that.
        tail: String,
    },
    /// Something did not come true in time.
    #[error("waited {seconds} s for {what}: {last}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long.
        seconds: u64,
        /// What the last look showed.
        last: String,
    },
    /// A directory that is not a cluster's.
    #[error("{} is neither an empty directory of your own nor a cluster's: name another with --dir", .0.display())]
    NotOurs(PathBuf),
    /// A directory whose name would not survive the files it is written into.
    #[error("{}: the directory of a cluster needs a name without spaces, quotes and backslashes", .0.display())]
    Unspeakable(PathBuf),
    /// A program that no way led to.
    #[error("no {program}: {reason}")]
    NoBinary {
        /// Which.
        program: String,
        /// What was tried, and what to do.
        reason: String,
    },
    /// The machine lacks something that a real node needs.
    #[error("a real node needs {0}")]
    NotFit(String),
    /// A certificate could not be made.
    #[error("make certificate {name}: {source}")]
    Certificate {
        /// Whose.
        name: String,
        /// Why not.
        source: rcgen::Error,
    },
    /// No port, or no network, is free.
    #[error("no free {0} after many tries")]
    NothingFree(&'static str),
}

/// Gives an IO error its operation and path.
pub(crate) fn file(
    operation: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    move |source| Error::File {
        operation,
        path,
        source,
    }
}
