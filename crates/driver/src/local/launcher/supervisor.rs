//! Supervisor of the launcher's worker: its parent process, which restarts it when it dies.
//!
//! The server cannot start a process as root once it has dropped its privileges. The supervisor reads
//! nothing from the server after its start.

use super::channel::Channel;
use super::request::Start;
use super::worker;
use crate::DriverError;
use crate::local::sys::{self, Fork};
use rustix::event::{PollFd, PollFlags, poll};
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A worker that ends sooner than this counts as a failure.
const WORKED: Duration = Duration::from_secs(1);

/// Consecutive failures after which the supervisor gives up.
const FAILURES_MAX: u32 = 10;

/// Delay before a restart after a failure.
const FAILURE_PAUSE: Duration = Duration::from_millis(100);

/// Main function of the launcher process: run by `main` if its first argument is [`super::LAUNCHER_ARG`].
///
/// Must be called before anything starts a thread.
pub fn launcher_main() -> ExitCode {
    match supervise() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// There is no subscriber for tracing in this process; standard error is the server's log.
fn log_error(error: &DriverError) {
    let cause = std::error::Error::source(error);
    let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
    let _ = writeln!(io::stderr(), "k8e-launcher: {error}{cause}");
}

fn supervise() -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("serve", "the launcher's channel");
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(step())?;
    let server = Channel::from(sys::move_up(stdin).map_err(step())?);
    let null = fs::File::open("/dev/null").map_err(DriverError::step("open", "/dev/null"))?;
    rustix::stdio::dup2_stdin(&null).map_err(DriverError::step("set", "standard input"))?;
    drop(null);
    let Some((start, fds)) = server.receive::<Start>().map_err(step())? else {
        return Ok(());
    };
    let Ok([guest, lock]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Ok(());
    };
    let (guest, lock) = (
        sys::move_up(guest).map_err(step())?,
        sys::move_up(lock).map_err(step())?,
    );
    sys::ignore_children();
    // Orphans of a dead worker become our children (subreaper), and the kernel reaps them.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(DriverError::step("become", "a subreaper"))?;
    let mut failures = 0;
    while failures < FAILURES_MAX {
        let (theirs, own) = Channel::pair().map_err(step())?;
        let began = Instant::now();
        match sys::fork_into(0, None).map_err(DriverError::step("fork", "the worker"))? {
            Fork::Child => {
                drop((server, theirs));
                let served = worker::serve(Channel::from(own), start, guest, lock);
                if let Err(error) = &served {
                    log_error(error);
                }
                sys::exit_now(i32::from(served.is_err()));
            }
            Fork::Parent { pidfd, .. } => {
                drop(own);
                if server.send(&(), &[theirs.as_fd()]).is_err() {
                    return Ok(());
                }
                drop(theirs);
                if server_went_first(&server, &pidfd)? {
                    // The server is gone: the worker ends by itself.
                    return Ok(());
                }
            }
        }
        if began.elapsed() < WORKED {
            failures += 1;
            std::thread::sleep(FAILURE_PAUSE);
        } else {
            failures = 0;
        }
    }
    Ok(())
}

/// Waits until the server or the worker has exited; true for the server.
fn server_went_first(server: &Channel, worker: &OwnedFd) -> Result<bool, DriverError> {
    loop {
        // Nothing is read from the server: only the hang-up counts.
        let mut fds = [
            PollFd::new(server, PollFlags::empty()),
            PollFd::new(worker, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            done => done.map_err(DriverError::step("wait for", "the server"))?,
        };
        if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            return Ok(true);
        }
        if !fds[1].revents().is_empty() {
            return Ok(false);
        }
    }
}
