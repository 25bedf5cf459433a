//! Executes one command under a supervisor process (subreaper), with timeout, cancellation and output streaming.
//!
//! # Flow
//! 1. Everything is prepared: user, environment, working directory, a script's file.
//! 2. The guest starts a *supervisor*, a process in its own memory, or takes one that it started before; it
//!    becomes a subreaper and starts the command in a new session. Whatever the command starts, however it
//!    hides (new session, double fork, empty environment), stays a descendant of the supervisor.
//! 3. Output is forwarded as fast as the host reads, input as fast as the command reads (backpressure).
//! 4. The command ends: the supervisor reports its status and exits, the pipes are drained, then
//!    `Exited`. Background processes live on, as children of init.
//!
//! # Guarantees
//! - On timeout, on cancel and when the connection fails, no descendant of the supervisor stays alive.
//! - No output is buffered beyond a chunk; a host that does not read stops the reading of the pipes,
//!   but neither the timeout nor cancelling.
//! - A script's file is gone when the call is.
//!
//! # Caveats
//! Root in the sandbox can kill a supervisor. The command dies with it and so does its session;
//! daemons that left the session escape this exec, not the sandbox.

mod command;
mod input;
pub(crate) mod kill;
mod output;
mod raw;
mod report;
mod script;
mod spawn;
mod sys;

use crate::error::{Error, show};
use crate::sys::monotonic_ns;
use crate::{Guest, procfs, reaper};
pub(crate) use command::Command;
pub(crate) use input::has_closed;
pub(crate) use output::{Ended, Reports};
pub(crate) use report::Report;
pub(crate) use spawn::{Child, Spare, above, make_spare, spawn_on};
pub(crate) use sys::Loan;

use k8e_wire::GuestEnd;
use k8e_wire::proto::{Exec, Exited, reply::Reply};
use output::{Monitor, Output};
use report::Stage;
use spawn::Streams;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// How the forwarding loop of a command ended.
enum Outcome {
    Ended(Ended),
    NotStarted(Stage, i32),
    Cancelled(Error),
}

/// A running command. If it is dropped before its end (the guest is exiting), it is killed.
pub(crate) struct Running {
    guest: Arc<Guest>,
    supervisor: i32,
    /// Process id of the command; 0 until it has one.
    pid: Arc<AtomicI32>,
    over: bool,
}

// === impl Running ===

impl Running {
    pub(crate) fn new(guest: &Arc<Guest>, supervisor: i32, pid: Arc<AtomicI32>) -> Self {
        Self {
            guest: Arc::clone(guest),
            supervisor,
            pid,
            over: false,
        }
    }

    /// Process id of the command; 0 until it has one.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.load(Ordering::Relaxed)
    }

    /// It ended: nothing is left to be killed.
    pub(crate) fn set_over(&mut self) {
        self.over = true;
    }

    /// Kills its process tree.
    pub(crate) async fn kill(&self) {
        kill::kill_tree(
            &self.guest,
            self.supervisor,
            self.pid.load(Ordering::Relaxed),
        )
        .await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.over {
            reaper::reap_when_gone(&self.guest, self.supervisor);
        } else {
            kill::kill_tree_now(
                &self.guest,
                self.supervisor,
                self.pid.load(Ordering::Relaxed),
            );
            reaper::reap_now(&self.guest, self.supervisor);
        }
    }
}

/// Runs a command to its end; the final reply is `Exited`. `Started` is sent with the next reply, or
/// after `started_held` at the latest.
pub(crate) async fn exec(
    guest: &Arc<Guest>,
    end: &mut GuestEnd,
    request: Exec,
    started_held: Duration,
) -> Result<Reply, Error> {
    let (command, _script) = Command::prepare(&request).await?;
    let command = Arc::new(command);
    let begin_ns = monotonic_ns();
    let reached_before = guest.process_limit.times_reached();
    let Child {
        supervisor,
        pid,
        mut reports,
        orders,
        streams: Streams {
            stdin,
            stdout,
            stderr,
        },
    } = spawn::spawn(guest, &command, request.stdin)?;
    let mut running = Running::new(guest, supervisor, pid);
    let killed = Notify::new();
    let mut output = Output::new(stdout, stderr, request.output_bytes_max);
    let mut timed_out = false;

    let outcome = {
        let child = Monitor {
            reports: &mut reports,
            orders: &orders,
            supervisor,
            pid: &running.pid,
            killed: &killed,
            started_held,
            process_limit: &guest.process_limit,
        };
        let mut forward = pin!(output.forward(&mut end.replies, child));
        let mut input = pin!(input::forward(&mut end.requests, stdin, &running.pid));
        let mut timer = pin!(timer(request.timeout_ms));
        loop {
            tokio::select! {
                biased;
                outcome = &mut forward => break outcome,
                () = &mut input => break Outcome::Cancelled(Error::Cancelled),
                () = &mut timer, if !timed_out => {
                    timed_out = true;
                    guest.process_limit.look();
                    // It may have ended in time while the host was slow to read its output.
                    if procfs::Stat::read(supervisor).is_some_and(|stat| stat.is_live()) {
                        running.kill().await;
                        killed.notify_one();
                    } else {
                        timed_out = false;
                        timer.set(self::timer(0));
                    }
                }
            }
        }
    };

    let result = match outcome {
        Outcome::Ended(ended) => {
            if ended.lost && !timed_out {
                running.kill().await;
            }
            output.leave_to_background(guest);
            Ok(Reply::Exited(Exited {
                pids_limit_reached: guest.process_limit.times_reached() > reached_before,
                ..exited(&ended, &output, timed_out, begin_ns)
            }))
        }
        Outcome::NotStarted(stage, errno) => {
            Err(not_started(&command, &request.user, stage, errno))
        }
        Outcome::Cancelled(error) => {
            if reports.ended_already() {
                output.leave_to_background(guest);
            } else {
                running.kill().await;
            }
            Err(error)
        }
    };
    running.set_over();
    spawn::clear_away(guest, (output, reports));
    result
}

async fn timer(timeout_ms: u64) {
    match timeout_ms {
        0 => std::future::pending().await,
        _ => tokio::time::sleep(Duration::from_millis(timeout_ms)).await,
    }
}

fn exited(ended: &Ended, output: &Output, timed_out: bool, begin_ns: u64) -> Exited {
    // A command that exited just before it was killed for its timeout counts as timed out.
    let status = if timed_out {
        libc::SIGKILL
    } else {
        ended.status
    };
    let (exit_code, signal) = exit_of(status);
    Exited {
        exit_code,
        signal,
        timed_out,
        duration_us: ended.at_ns.saturating_sub(begin_ns) / 1000,
        stdout_bytes: output.stdout.total,
        stderr_bytes: output.stderr.total,
        stdout_truncated: output.stdout.truncated(),
        stderr_truncated: output.stderr.truncated(),
        pids_limit_reached: false,
    }
}

/// Exit code and signal from a `waitpid` status.
pub(crate) fn exit_of(status: i32) -> (i32, i32) {
    if libc::WIFSIGNALED(status) {
        (128 + libc::WTERMSIG(status), libc::WTERMSIG(status))
    } else {
        (libc::WEXITSTATUS(status), 0)
    }
}

/// Why a command did not start.
pub(crate) fn not_started(command: &Command, user: &str, stage: Stage, errno: i32) -> Error {
    let source = std::io::Error::from_raw_os_error(errno);
    let program = command.name();
    match (stage, errno) {
        (Stage::Fork, _) => spawn::fork_error(source),
        (Stage::Exec, libc::ENOENT | libc::ENOTDIR) => Error::NoProgram(show(program)),
        (Stage::Exec, libc::E2BIG) => Error::Invalid(format!(
            "run {:?}: arguments and environment are too long",
            show(program)
        )),
        (Stage::Exec, libc::ENOEXEC) => Error::Invalid(format!(
            "run {:?}: not a program of this machine, nor a script with #!",
            show(program)
        )),
        (Stage::Exec, libc::EAGAIN) => spawn::fork_error(source),
        (Stage::Exec, _) => Error::os("run", program)(source),
        (Stage::Chdir, _) => Error::os("enter", command.cwd.as_bytes())(source),
        (Stage::User, _) => Error::os("become user", user.as_bytes())(source),
    }
}
