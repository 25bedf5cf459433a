//! `Exec`: the command is one line for a shell.

use super::{OUTPUT_BYTES_MAX, text};
use crate::sandbox_v1::{ExecRequest, ExecResponse, PollRunResponse};
use bytes::Bytes;
use k8e_model::{
    BackgroundRun, BackgroundStatus, Command, Error, Outcome, Program, RunStatus, TimeLimit,
};
use std::time::Duration;

/// A month. Longer is a typo.
const TIMEOUT_S_MAX: u64 = 31 * 24 * 3600;

/// The kernel takes no longer argument, and `sh -c` has the command as one.
const COMMAND_BYTES_MAX: usize = 128 * 1024 - 1;

/// The command of an `Exec` that waits for it.
pub fn command(request: &ExecRequest) -> Result<Command, Error> {
    let mut command = background_command(request)?;
    command.output_bytes_max = Some(OUTPUT_BYTES_MAX);
    Ok(command)
}

/// The command of an `Exec` in the background.
pub fn background_command(request: &ExecRequest) -> Result<Command, Error> {
    let mut command = shell(request)?;
    command.timeout = timeout(request)?;
    Ok(command)
}

/// How an `Exec` ended, without what only its request knows.
pub fn exec_response(outcome: &Outcome, stdout: Vec<u8>, stderr: Vec<u8>) -> ExecResponse {
    let (stdout, stdout_cut) = text(stdout, OUTPUT_BYTES_MAX);
    let (stderr, stderr_cut) = text(stderr, OUTPUT_BYTES_MAX);
    let status = match outcome.status {
        RunStatus::TimedOut => "timed_out",
        // The API has no more words; the exit code tells.
        RunStatus::Completed | RunStatus::OomKilled => "completed",
    };
    ExecResponse {
        stdout,
        stderr,
        exit_code: outcome.exit_code,
        status: status.to_owned(),
        duration_ms: millis(outcome.duration),
        truncated: outcome.stdout_truncated || outcome.stderr_truncated || stdout_cut || stderr_cut,
        ..ExecResponse::default()
    }
}

/// A background run in the words of `sandbox.v1`. Every one that is over is `completed` or `timed_out`, or clients would wait
/// for ever; why it ended otherwise is at the end of its standard error.
pub fn poll_response(run: BackgroundRun) -> PollRunResponse {
    let mut stderr = run.stderr;
    let status = match run.status {
        BackgroundStatus::Running => "running",
        BackgroundStatus::TimedOut => "timed_out",
        BackgroundStatus::Completed => "completed",
        BackgroundStatus::OomKilled
        | BackgroundStatus::Cancelled
        | BackgroundStatus::Failed
        | BackgroundStatus::Lost => {
            let (word, reason) = (run.status.as_str(), &run.reason);
            stderr.extend_from_slice(format!("\nk8e: the run is {word} {reason}\n").as_bytes());
            "completed"
        }
    };
    // Room for that line too.
    let (stderr, stderr_cut) = text(stderr, OUTPUT_BYTES_MAX + 4096);
    let (stdout, stdout_cut) = text(run.stdout, OUTPUT_BYTES_MAX);
    PollRunResponse {
        run_id: run.id.to_string(),
        status: status.to_owned(),
        stdout,
        stderr,
        exit_code: run.exit_code,
        duration_ms: millis(run.duration),
        truncated: run.stdout_truncated || run.stderr_truncated || stdout_cut || stderr_cut,
    }
}

fn shell(request: &ExecRequest) -> Result<Command, Error> {
    let bytes = request.command.len();
    if bytes > COMMAND_BYTES_MAX {
        return Err(Error::invalid(format!(
            "a command of {bytes} bytes, at most {COMMAND_BYTES_MAX} are allowed: write it to a file and run that"
        )));
    }
    let argv =
        ["/bin/sh", "-c", &request.command].map(|arg| Bytes::copy_from_slice(arg.as_bytes()));
    Command::new(Program::Argv(argv.to_vec()))?.in_dir(&request.workdir)
}

/// The timeout of the request; without one, the default of the kind of run.
fn timeout(request: &ExecRequest) -> Result<TimeLimit, Error> {
    match u64::try_from(request.timeout) {
        Ok(0) => Ok(TimeLimit::Default),
        Ok(seconds) if seconds <= TIMEOUT_S_MAX => {
            Ok(TimeLimit::After(Duration::from_secs(seconds)))
        }
        _ => Err(Error::invalid(format!(
            "timeout of {} s: use 1 to {TIMEOUT_S_MAX}",
            request.timeout
        ))),
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::SessionId;

    fn request(timeout: i32) -> ExecRequest {
        ExecRequest {
            command: "echo hi".to_owned(),
            timeout,
            ..ExecRequest::default()
        }
    }

    #[test]
    fn a_shell_gets_the_command_as_it_is() {
        let command = command(&request(0)).unwrap();
        let argv = ["/bin/sh", "-c", "echo hi"].map(Bytes::from);
        assert_eq!(command.program, Program::Argv(argv.to_vec()));
        assert_eq!(command.timeout, TimeLimit::Default);
        assert_eq!(command.output_bytes_max, Some(1024 * 1024));
        let five = TimeLimit::After(Duration::from_secs(5));
        assert_eq!(background_command(&request(5)).unwrap().timeout, five);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(command(&request(-1)).is_err());
        assert!(background_command(&request(i32::MAX)).is_err());
        let long = ExecRequest {
            command: "x".repeat(COMMAND_BYTES_MAX + 1),
            ..request(0)
        };
        assert!(command(&long).unwrap_err().message.contains("file"));
        let relative = ExecRequest {
            workdir: "tmp".to_owned(),
            ..request(0)
        };
        assert!(command(&relative).is_err());
    }

    #[test]
    fn every_run_that_is_over_says_so_in_words_that_clients_know() {
        let session: SessionId = "s".parse().unwrap();
        let mut run = BackgroundRun::new(session, "sh".to_owned(), None, 7);
        let status = |run: &BackgroundRun| poll_response(run.clone()).status;
        assert_eq!(status(&run), "running");
        run.status = BackgroundStatus::TimedOut;
        assert_eq!(status(&run), "timed_out");
        run.status = BackgroundStatus::Lost;
        run.reason = "its session ended".to_owned();
        let lost = poll_response(run);
        assert_eq!(lost.status, "completed");
        assert!(lost.stderr.contains("lost its session ended"), "{lost:?}");
    }
}
