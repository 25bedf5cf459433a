//! Fork of a sandbox's first process (`clone3` into its namespaces and cgroup), and the status report
//! that it sends to the launcher over a pipe.

use super::cgroup::Join;
use super::launcher::Failure;
use super::sys::{self, Fork};
use super::userns::user_namespace;
use crate::DriverError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};

/// Bytes of a report: an error names a path or two.
const REPORT_BYTES_MAX: u64 = 64 * 1024;

/// The last message of the forked process. One that has executed the guest sends none.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The sandbox runs.
    Running {
        /// Of its first process, in the host's pid namespace.
        pid: i32,
    },
    /// The trial succeeded.
    Works,
    /// The launch or trial failed.
    Failed(Failure),
}

/// The forked process.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    status: OwnedFd,
}

/// Forks into `namespaces` and the control group; the child runs `work` with the user namespace it
/// will enter, writes its report, and exits.
pub(crate) fn fork(
    namespaces: i32,
    join: &Join,
    uid_base: u32,
    work: impl FnOnce(OwnedFd) -> Report,
) -> Result<Forked, DriverError> {
    let step = || DriverError::step::<io::Error>("prepare", "a launch");
    let userns = sys::move_up(user_namespace(uid_base)?).map_err(step())?;
    let (status, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(DriverError::step("make", "a status pipe"))?;
    let theirs = sys::move_up(theirs).map_err(step())?;
    let cgroup = match join {
        Join::CloneInto(dir) => {
            let opened =
                fs::File::open(dir).map_err(DriverError::step("open", dir.display().to_string()));
            Some(OwnedFd::from(opened?))
        }
        Join::Write(_) => None,
    };
    let forked = sys::fork_into(
        u64::from(namespaces.unsigned_abs()),
        cgroup.as_ref().map(OwnedFd::as_fd),
    );
    match forked.map_err(DriverError::step("fork", "the sandbox"))? {
        Fork::Parent { pid, pidfd } => Ok(Forked { pid, pidfd, status }),
        Fork::Child => {
            let report = serde_json::to_vec(&work(userns)).unwrap_or_default();
            let _ = rustix::io::write(&theirs, &report);
            sys::exit_now(0)
        }
    }
}

// === impl Forked ===

impl Forked {
    /// Waits until the process has executed the guest, or sent a report. Blocks.
    pub(crate) fn wait(&self) -> Result<Option<Report>, DriverError> {
        let step = || DriverError::step::<io::Error>("read", "the status pipe");
        let mut report = Vec::new();
        let pipe = fs::File::from(self.status.try_clone().map_err(step())?);
        pipe.take(REPORT_BYTES_MAX)
            .read_to_end(&mut report)
            .map_err(step())?;
        if report.is_empty() {
            return Ok(None);
        }
        let report = serde_json::from_slice(&report)
            .map_err(io::Error::other)
            .map_err(step())?;
        match report {
            Report::Failed(failure) => Err(failure.into_error()),
            Report::Running { .. } | Report::Works => Ok(Some(report)),
        }
    }
}
